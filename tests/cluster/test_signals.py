"""Which signals say something new, and how long a server that is told to leave stays."""

import signal

import pytest

from offbeat.cli.signals import ECHO_S, Echoes


@pytest.mark.parametrize(
    ("signals", "heard"),
    [
        ([(signal.SIGTERM, 0.0), (signal.SIGTERM, 0.1)], [True, False]),
        ([(signal.SIGTERM, 0.0), (signal.SIGTERM, ECHO_S + 0.1)], [True, True]),
        ([(signal.SIGINT, 0.0), (signal.SIGTERM, 0.1)], [True, False]),
        ([(signal.SIGINT, 0.0), (signal.SIGINT, 0.3)], [True, True]),
        ([(signal.SIGTERM, 0.0), (signal.SIGINT, 0.3)], [True, True]),
        (
            [(signal.SIGTERM, 0.0), (signal.SIGTERM, 4.0), (signal.SIGTERM, ECHO_S + 0.1)],
            [True, False, True],
        ),
    ],
)
def test_what_a_batch_system_says_twice_is_heard_once(
    signals: list[tuple[int, float]], heard: list[bool]
) -> None:
    now = [0.0]
    echoes = Echoes(lambda: now[0])
    found = []
    for number, at_s in signals:
        now[0] = at_s
        found.append(not echoes.is_one(number))
    assert found == heard
