"""How far each life of a server has to be done again, to come to where somebody wants to look.
No torch.

    reach = Reach(recorded, to=10, target=None, without=None, is_stateful=False)
    reach.goals         # by shard, where to stop; none: where the run ended
    reach.ends          # by shard and life, the version up to which it is done again

A version of one shard may have gradients in it that were computed on later versions of another one
than are asked for. So some shards have to go further than to their goal.
"""

from collections.abc import Iterator, Mapping, Sequence

from offbeat.replaying.recorded import Computed, Life, Point, Recorded

Key = tuple[int, int]
"""Of a life: shard and number."""


class Reach:
    def __init__(
        self,
        recorded: Recorded,
        to: int | None,
        target: Computed | None,
        without: int | None,
        *,
        is_stateful: bool,
    ) -> None:
        """`target`: go as far as it takes to compute this gradient. `without`: leave out what this
        worker has brought. `is_stateful`: what a worker computes depends on what it has computed
        before."""
        self.goals: Mapping[int, Point] = {}
        self._without = without
        self._is_stateful = is_stateful
        self._seen: set[Computed] = set()
        self._lives = {
            (life.shard, life.number): life for of_shard in recorded.lives for life in of_shard
        }
        if target is not None:
            self.goals = {base.shard: base for base in target.bases if base is not None}
        elif to is not None:
            self.goals = {lives[0].shard: _where_made(lives, to) for lives in recorded.lives}
        self.ends = {key: life.ends for key, life in self._lives.items() if self._is_due(life)}
        """What was lost is done again, too, since others may have computed on it."""
        for goal in self.goals.values():
            self.ends[goal.shard, goal.life] = goal.version
        self._go_on(target)

    def _is_due(self, life: Life) -> bool:
        goal = self.goals.get(life.shard)
        return goal is None or life.number <= goal.life

    def is_beyond(self, goal: Point) -> bool:
        """Whether its shard goes further than that."""
        return self.ends[goal.shard, goal.life] > goal.version

    def _go_on(self, target: Computed | None) -> None:
        """Until all has been reached on which something that is made was computed."""
        looked: dict[Key, int] = {}
        todo = [] if target is None else list(self._bases(target))
        while todo or (todo := list(self._new_bases(looked))):
            self._extend(todo.pop())

    def _new_bases(self, looked: dict[Key, int]) -> Iterator[Point]:
        for key, end in list(self.ends.items()):
            life = self._lives[key]
            for version in range(looked.get(key, life.begins) + 1, end + 1):
                for gradient in life.updates[version]:
                    yield from self._bases(gradient)
            looked[key] = end

    def _bases(self, gradient: Computed) -> Iterator[Point]:
        """Of it, and where a worker keeps something of those before it; once."""
        found: Computed | None = gradient
        while found is not None and found not in self._seen and found.worker != self._without:
            self._seen.add(found)
            yield from (base for base in found.bases if base is not None)
            found = found.before if self._is_stateful else None

    def _extend(self, base: Point) -> None:
        for number in range(base.life + 1):
            life = self._lives[base.shard, number]
            end = min(base.version, life.ends) if number == base.life else life.ends
            key = base.shard, number
            self.ends[key] = max(end, self.ends.get(key, life.begins))


def _where_made(lives: Sequence[Life], version: int) -> Point:
    """The last life that has it."""
    life = lives[-1]
    while not life.has(version):
        assert life.source is not None, "some life has it"
        life = lives[life.source.life]
    return Point(life.shard, life.number, version)
