"""Classes of the user's own behind a flag: disciplines and rules, their options, their labels."""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers import num_dealt_with, toy_job, toy_recipe
from rig import rig
from torch import Tensor

import offbeat
from offbeat.cli import main
from offbeat.config import DISCIPLINES, make_config, options
from offbeat.disciplines import Action, Apply, Discipline, Push, Reply
from offbeat.errors import ConfigError
from offbeat.family import BUILT_IN
from offbeat.plugins import Choice, Option, parse
from offbeat.rules import BUILT_IN as RULES
from offbeat.rules import Gradient, Rule

EXAMPLE = Path(__file__).parent.parent / "examples" / "drop_stale.py"


class Pairs(Discipline):
    """An update out of any two gradients, whoever pushed them."""

    merges = True
    options = (
        Option(name="size", default=2, least=1, help="how many"),
        Option(name="pause_s", default=0, whole=False, unit="s", help="nothing; it is shown"),
    )

    def __init__(self, workers: Iterable[int], *, size: float = 2, pause_s: float = 0) -> None:
        super().__init__(workers)
        self.size = int(size)
        self.waiting: list[Push] = []

    @property
    def gradients_per_update(self) -> int:
        return self.size

    def on_push(self, push: Push) -> list[Action]:
        self.waiting.append(push)
        if len(self.waiting) < min(self.size, len(self.present)):
            return []
        pushes, self.waiting = tuple(self.waiting), []
        return [Apply(pushes), *(Reply(p.worker) for p in pushes)]

    def on_leave(self, worker: int) -> list[Action]:
        super().on_leave(worker)
        return []


class Fresh(Rule):
    """Halves what is stale, and remembers what it was shown."""

    needs_base = True
    seen: list[tuple[list[int], list[float]]] = []

    def __call__(
        self, gradients: Sequence[Gradient], staleness: Sequence[int], params: Tensor, out: Tensor
    ) -> Tensor:
        bases = [g.base for g in gradients]
        assert all(base is not None for base in bases)
        Fresh.seen.append((list(staleness), [float(b[0]) for b in bases if b is not None]))
        out.zero_()
        for gradient, age in zip(gradients, staleness, strict=True):
            out.add_(gradient.values, alpha=1.0 if age == 0 else 0.5)
        return out


# -- names and options -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "source", "rest"),
    [
        ("sync", "sync", []),
        ("bounded:2", "bounded", ["2"]),
        ("bounded:inf", "bounded", ["inf"]),
        ("sync:1:round_timeout=5", "sync", ["1", "round_timeout=5"]),
        ("a/b.py:Class", "a/b.py:Class", []),
        ("a.b:Class:2", "a.b:Class", ["2"]),
        ("module:Class:2", "module:Class", ["2"]),
        ("bonded:2", "bonded", ["2"]),
    ],
)
def test_what_names_a_class_and_what_it_is_told(text: str, source: str, rest: list[str]) -> None:
    assert parse(text, BUILT_IN) == (source, rest)


def test_every_option_of_a_discipline_is_a_flag_with_its_words() -> None:
    for kind in BUILT_IN.values():
        for option in kind.options:
            field = options()[option.flag]
            assert field.metadata["help"].startswith(f"{kind.name}: {option.help}")
            assert field.default in (option.default, None)


def test_every_rule_is_a_choice() -> None:
    assert options()["rule"].metadata["choices"] == tuple(RULES)


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("sync", "sync"),
        ("sync:0", "sync"),
        ("sync:1", "sync:1"),
        ("sync:round_timeout=5", "sync, 5 s"),
        ("bounded", "bounded:1"),
        ("bounded:inf", "bounded:inf"),
        ("ringmaster", "ringmaster:16"),
        ("ringmaster:inf", "ringmaster:inf"),
        ("rennala:3", "rennala:3"),
        ("buffer", "buffer:4"),
        (f"{__name__}:Pairs", "Pairs"),
        (f"{__name__}:Pairs:3:pause=0.5", "Pairs:3, 0.5 s"),
        (f"{EXAMPLE}:DropStale:1", "drop-stale:1"),
    ],
)
def test_a_label_says_what_is_not_understood_by_itself(text: str, label: str) -> None:
    config = make_config({"discipline": text, "workers": 3})
    assert config.chosen.label == config.variant == label
    again = make_config({k: v for k, v in config.to_json().items() if v is not None})
    assert again.chosen.label == label, "what is kept says the same"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ringmaster:0", "max_delay must be 1, 2, 3, ... or inf, not 0"),
        ("rennala:0", "collect must be at least 1, not 0"),
        ("buffer:inf", "buffer_size must be"),
        ("buffer:1.5", "buffer_size must be"),
        (f"{__name__}:Pears", "did you mean 'Pairs'"),
        (f"{__name__}:Fresh", "has no discipline 'Fresh'"),
        ("math:floor", "there is no discipline in it"),
        ("offbeat.disciplines:Discipline", "has no discipline 'Discipline'; known: ApplyReply"),
        (f"{__name__}:Pairs:0", "size must be 1, 2, 3, ... or inf, not 0"),
        (f"{__name__}:Pairs:x", "size must be a number, not 'x'"),
        (f"{__name__}:Pairs:pauze=1", "did you mean 'pause'"),
    ],
)
def test_what_is_wrong_with_ones_own_is_one_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config({"discipline": text})
    assert message in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_a_default_choice_is_what_a_grid_begins_with() -> None:
    labels = [Choice.default(kind).label for kind in BUILT_IN.values() if kind.served]
    assert labels[:5] == ["sync", "apply-reply", "reply-apply", "lock-free", "bounded:1"]
    assert labels[5:] == ["ringmaster:16", "rennala:4", "buffer:4"]


# -- disciplines -----------------------------------------------------------------------------------


def test_a_discipline_says_how_many_updates_there_will_be() -> None:
    """A schedule that comes down with the updates would else never arrive."""
    options: dict[str, Any] = {"steps": 10, "workers": 4}
    assert toy_job(discipline="apply-reply", **options).facts.total_updates == 40
    assert toy_job(discipline="sync", **options).facts.total_updates == 10
    assert toy_job(discipline="buffer:3", **options).facts.total_updates == 14
    assert toy_job(discipline="rennala:3", **options).facts.total_updates == 7, "with the dropped"
    assert toy_job(discipline="ringmaster:3", **options).facts.total_updates == 40
    job = toy_job(discipline=f"{__name__}:Pairs:3", **options)
    assert job.facts.total_updates == 14, "the last one is made of what is left"
    assert job.config.eval_every == 24 // 3


def test_ones_own_discipline_trains_and_is_reported(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for seed in range(2):
        for discipline in (f"{EXAMPLE}:DropStale:0", "apply-reply"):
            result = offbeat.train(
                toy_recipe(),
                discipline=discipline,
                workers=3,
                steps=20,
                seed=seed,
                run_dir=runs / f"{Path(discipline).stem}-{seed}",
                quiet=True,
            )
            (row,) = result.summary["kept"]
            assert row["gradients"] == 60 == row["applied"] + row["dropped"]
            if "DropStale" in discipline:
                assert result.staleness.max == 0 and result.summary["dropped"] == row["dropped"]
    assert main(["report", str(runs)]) == 0
    text = (runs / "report.md").read_text()
    assert "drop-stale:0" in text and "apply-reply" in text


def test_ones_own_discipline_goes_on_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(EXAMPLE.read_text())
    monkeypatch.chdir(tmp_path)
    recipe = toy_recipe()
    offbeat.train(recipe, discipline="own.py:DropStale", steps=5, run_dir="r", quiet=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    result = offbeat.resume(tmp_path / "r", recipe, steps=10)
    assert result.summary["gradients"] == 20


def test_a_comparison_takes_ones_own(tmp_path: Path) -> None:
    own = f"{EXAMPLE}:DropStale:1"
    done = offbeat.compare(
        toy_recipe(), disciplines=["sync", own], workers=[2], seeds=1, steps=4, out=tmp_path / "c"
    )
    assert not done.failed
    assert "drop-stale:1" in (tmp_path / "c" / "report.md").read_text()
    names = sorted(path.name for path in (tmp_path / "c").iterdir() if path.is_dir())
    assert names == ["drop_stale.py-DropStale-1-2w-1s", "sync-2w-1s"]


def test_options_of_a_discipline_do_not_outlive_it(tmp_path: Path) -> None:
    recipe = toy_recipe()
    offbeat.train(recipe, discipline="bounded:3", steps=3, run_dir=tmp_path / "r", quiet=True)
    offbeat.resume(tmp_path / "r", recipe, steps=6, discipline=f"{EXAMPLE}:DropStale")
    config = json.loads((tmp_path / "r" / "config.json").read_text())
    assert config["config"]["staleness"] is None
    assert config["job"]["variant"] == "drop-stale"


# -- rules -----------------------------------------------------------------------------------------


def test_a_rule_sees_staleness_and_what_each_gradient_was_computed_on(tmp_path: Path) -> None:
    Fresh.seen.clear()
    for discipline in ("apply-reply", "reply-apply"):
        with rig(tmp_path, discipline, 2, rule=Fresh()) as r:
            first, second = r.join_all(2)
            first.exchange(1.0)  # on zeros
            second.exchange(1.0)  # on zeros as well, and one update late
            first.exchange(1.0)
            for hand in (first, second):
                hand.link.close()
            assert r.drain()
            version, params = r.shard.version, r.shard.params[0].item()
        assert version == 3
        assert params == (-2.0 if discipline == "apply-reply" else -1.5 - 0.5)
    apply_reply, reply_apply = Fresh.seen[:3], Fresh.seen[3:]
    assert apply_reply == [([0], [0.0]), ([1], [0.0]), ([1], [-1.0])]
    assert [ages for ages, _ in reply_apply] == [[0], [1], [2]]
    assert [bases for _, bases in reply_apply] == [[0.0], [0.0], [0.0]], "as they were before it"


def test_ones_own_rule_goes_with_any_discipline(tmp_path: Path) -> None:
    for discipline in DISCIPLINES:
        result = offbeat.train(
            toy_recipe(),
            discipline=discipline,
            rule=f"{__name__}:Fresh",
            steps=5,
            run_dir=tmp_path / discipline,
            quiet=True,
        )
        assert num_dealt_with(result.summary["kept"][0], discipline) == 10
    with pytest.raises(ConfigError, match="the rule sum is for updates of several"):
        make_config({"discipline": "apply-reply", "rule": "sum"})


def test_an_option_says_what_it_takes() -> None:
    option = Option(name="rate_s", default=1, whole=False, above=True, unit="s", help="")
    assert option.flag == "rate" and option.read("inf") == math.inf
    for value in (0.0, -1.0):
        with pytest.raises(ConfigError, match="rate must be above 0"):
            option.check(value)
    bounded = Option(name="n", default=1, most=9, help="")
    with pytest.raises(ConfigError, match="n must be at most 9, not 10"):
        bounded.check(10)
    with pytest.raises(ConfigError, match="n must be a whole number, not 'nan'"):
        bounded.read("nan")
