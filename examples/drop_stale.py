"""A discipline of one's own: apply-reply that forgets gradients which have become too old.

offbeat train --discipline examples/drop_stale.py:DropStale:1 --workers 4
offbeat compare --disciplines apply-reply,examples/drop_stale.py:DropStale:1 --workers 4
"""

from collections.abc import Iterable

from offbeat.disciplines import Action, Apply, Discipline, Drop, Push, Reply
from offbeat.plugins import Option


class DropStale(Discipline):
    name = "drop-stale"
    options = (Option(name="most", default=2, help="apply gradients up to this staleness"),)

    def __init__(self, workers: Iterable[int], *, most: float = 2) -> None:
        super().__init__(workers)
        self.most = most

    def on_push(self, push: Push) -> list[Action]:
        if push.staleness > self.most:
            return [Drop(push), Reply(push.worker)]
        return [Apply((push,)), Reply(push.worker)]
