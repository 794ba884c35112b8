"""What a server that a worker comes to has to be told of the others' rounds, so that all have the
same ones. Asked for by the worker's exchange (exchange.py), as it joins, and as it finds that a
server was started anew:

    elsewhere = Elsewhere(job, network, keep_trying)
    hello |= elsewhere.told_to(1, epochs=[0, 0], versions=[7, 7])
    1 in elsewhere.open     # what is under way may go to it
"""

import contextlib
from collections.abc import Callable, Sequence

from offbeat.roles.calls import RoundPart
from offbeat.roles.master import RemoteServer
from offbeat.run.job import Job
from offbeat.transport.base import Message, Network

KeepTrying = Callable[[Callable[[], RoundPart]], RoundPart]
"""Call a server as often as it takes."""


class Elsewhere:
    """Used by the worker's thread."""

    def __init__(self, job: Job, network: Network, keep_trying: KeepTrying) -> None:
        self.open: set[int] = set()
        """Shards whose server was started anew, and may have what is under way, since its round is
        not over elsewhere."""
        self._job = job
        self._network = network
        self._keep_trying = keep_trying

    def last_round(self, shard: int) -> Message:
        """What the other servers are to know, so that we take part in the same rounds everywhere:
        which one was the last at this server, now that we are there. One that was started anew does
        not know."""
        part = self._ask(shard)
        is_known = part.number or not part.epoch
        return _told(part) if is_known else {}

    def told_to(self, shard: int, epochs: Sequence[int], versions: Sequence[int]) -> Message:
        """The same for a server that took the place of another one in the midst of a round.
        `epochs`: of the servers that the worker has links to; `versions`: what these had shown it
        before what is under way."""
        self.open.discard(shard)
        if not self._may_be_apart or self._ask(shard).epoch == epochs[shard]:
            return {}
        other = 0 if shard else 1
        if self._job.joins_norms:
            return self.last_round(other)
        part = self._ask(other)
        if part.epoch != epochs[other]:
            return {}  # it was started anew, too
        if part.version == versions[other]:
            self.open.add(shard)
        return _told(part)

    @property
    def _may_be_apart(self) -> bool:
        """Where servers promise, all that they had not answered is pushed again."""
        job = self._job
        return job.facts.in_rounds and len(job.slices) > 1 and not job.config.is_durable

    def _ask(self, shard: int) -> RoundPart:
        layout = self._job.layout(shard)
        server = RemoteServer(self._network, shard, self._job.agreement, layout)
        with contextlib.closing(server):
            return self._keep_trying(lambda: server.round(0.0))


def _told(part: RoundPart) -> Message:
    return {"last_round": [list(push) for push in part.pushes]}
