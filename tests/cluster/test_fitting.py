"""What fits onto the nodes of a cluster, and how what is missing is said."""

import pytest

from offbeat.cluster.fitting import GIB, Ask, find_lack, in_words, most_at_once
from offbeat.config import make_config
from offbeat.engines.actors import asks_of


def asks(count: int, **resources: float) -> list[Ask]:
    return [Ask(who=f"worker {n}", resources=resources) for n in range(count)]


def test_what_fits_lacks_nothing() -> None:
    assert find_lack(asks(4, CPU=1.0), [{"CPU": 2.0}, {"CPU": 2.0}]) == ""
    assert find_lack(asks(2, CPU=0.5), [{"CPU": 1.0}]) == ""
    assert find_lack([], []) == ""


def test_what_is_missing_altogether_is_counted() -> None:
    assert find_lack(asks(5, CPU=1.0), [{"CPU": 4.0}]) == "the run needs 5 CPUs, and it has 4"
    assert find_lack(asks(1, GPU=1.0), [{"CPU": 4.0}]) == "the run needs 1 GPU, and it has 0"
    lack = find_lack(asks(2, memory=3.0 * GIB), [{"memory": 4.0 * GIB}])
    assert lack == "the run needs 6 GiB of memory, and it has 4 GiB"


def test_enough_in_pieces_that_are_too_small_is_told_too() -> None:
    lack = find_lack(asks(1, CPU=3.0), [{"CPU": 2.0}, {"CPU": 2.0}])
    assert lack.startswith("worker 0 needs a node with 3 CPUs, and none has so much left")
    lack = find_lack(asks(2, CPU=2.0), [{"CPU": 3.0}, {"CPU": 1.0}])
    assert lack.startswith("worker 1 needs a node with 2 CPUs")


def test_the_largest_are_placed_first() -> None:
    mixed = [*asks(2, CPU=1.0), Ask(who="server 0", resources={"CPU": 3.0})]
    assert find_lack(mixed, [{"CPU": 3.0}, {"CPU": 2.0}]) == ""


@pytest.mark.parametrize(
    ("resources", "words"),
    [
        ({"CPU": 1.0}, "1 CPU"),
        ({"CPU": 2.0, "GPU": 1.0}, "2 CPUs and 1 GPU"),
        ({"CPU": 0.5, "GPU": 2.0, "memory": GIB}, "0.5 CPUs, 2 GPUs and 1 GiB of memory"),
        ({"node:10.0.0.1": 1.0}, ""),
    ],
)
def test_resources_in_words(resources: dict[str, float], words: str) -> None:
    assert in_words(resources) == words


def test_how_many_runs_fit_side_by_side() -> None:
    nodes = [{"CPU": 4.0}, {"CPU": 4.0}]
    assert most_at_once([asks(3, CPU=1.0)] * 5, nodes) == 2
    assert most_at_once([asks(3, CPU=1.0), asks(8, CPU=1.0)], nodes) == 1, "the largest counts"
    assert most_at_once([asks(9, CPU=1.0)], nodes) == 0
    assert most_at_once([asks(1, CPU=1.0)] * 3, nodes) == 3, "no more than there are"


def test_who_needs_the_folder_is_where_it_can_be_seen() -> None:
    master = Ask(who="the master", resources={"CPU": 1.0}, needs_folder=True)
    nodes = [{"CPU": 1.0}, {"CPU": 3.0}]
    assert find_lack([*asks(3, CPU=1.0), master], nodes, [0]) == ""
    assert find_lack([Ask(who="server 0", resources={"CPU": 3.0}), master], nodes) == ""
    lack = find_lack([master, master], nodes, [0])
    assert lack.startswith("the master needs a node that sees the run's folder with 1 CPU")
    assert "the largest has nothing" in find_lack([master], nodes, [])
    assert most_at_once([[*asks(1, CPU=1.0), master]] * 5, nodes) == 2
    assert most_at_once([[*asks(1, CPU=1.0), master]] * 5, nodes, [0]) == 1


def test_a_run_asks_for_its_master_workers_and_servers() -> None:
    options = {"engine": "ray", "workers": 2, "gpus_per_worker": 1, "memory_per_server": 2}
    found = {ask.who: dict(ask.resources) for ask in asks_of(make_config(options))}
    worker, server = {"CPU": 1.0, "GPU": 1.0}, {"CPU": 1.0, "memory": 2.0 * GIB}
    assert found == {"the master": worker, "worker 1": worker, "server 0": server}
