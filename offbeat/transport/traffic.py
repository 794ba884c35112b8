"""How many bytes a worker's links carry either way, and what coding them takes of a processor.

Counted as they travel over a network: headers, and all that goes with them; of memory that both
ends share, what lies in it. roles/exchange.py counts, and each step's event says what it came to:

    traffic.joined(link); traffic.pushed(link, header); traffic.replied(link, reply)
    traffic.words()     # ', "up": 5076, "down": 5076, "whole": 5076'; and next time nothing is new
"""

from offbeat.transport.base import HEADER_BYTES, PushHeader, ReplyHeader, Slot, WorkerEnd


class Traffic:
    """One thread uses it."""

    def __init__(self) -> None:
        self.up = 0
        self.down = 0
        self.whole = 0
        """What `up` would be if everything were sent as it is."""
        self._coded_s = 0.0
        """By links that are gone."""
        self._links: list[WorkerEnd] = []
        self._sizes: dict[int, tuple[_Size, _Size]] = {}
        """Of what each link carries up, and down."""
        self._last = (0, 0, 0, 0.0)
        self._said: tuple[int, ...] = ()

    def joined(self, link: WorkerEnd) -> None:
        up, down = self._sizes[id(link)] = _Size(link.pushed_slot), _Size(link.replied_slot)
        self._links.append(link)
        self.down += down.of(link.welcome.num_bytes, 0)
        up.num_whole = up.rest + (4 * link.num_coded or up.num_values)

    def left(self, link: WorkerEnd) -> None:
        if self._sizes.pop(id(link), None) is not None:
            self._links.remove(link)
            self._coded_s += link.coding_s

    def pushed(self, link: WorkerEnd, header: PushHeader) -> None:
        up, _ = self._sizes[id(link)]
        self.up += up.of(header.num_bytes, header.num_rows)
        self.whole += up.num_whole

    def replied(self, link: WorkerEnd, header: ReplyHeader) -> None:
        self.down += self._sizes[id(link)][1].of(header.num_bytes, header.num_rows)

    def added_up(self, num_bytes: int, num_workers: int) -> None:
        """A sum of so many bytes over all workers, each of whom sends and gets a part of it at a
        time, twice around."""
        part = 2 * (num_workers - 1) * num_bytes // num_workers
        self.up, self.down, self.whole = self.up + part, self.down + part, self.whole + part

    @property
    def coding_s(self) -> float:
        return self._coded_s + sum(link.coding_s for link in self._links)

    def words(self) -> str:
        """What an event has to say of what was carried since the last one: nothing that is as it
        was then."""
        now = (self.up, self.down, self.whole, self.coding_s)
        before, self._last = self._last, now
        up, down, whole, coding_s = (a - b for a, b in zip(now, before, strict=True))
        said, self._said = self._said, (int(up), int(down), int(whole))
        text = "" if not coding_s else f', "coding_s": {coding_s:.6f}'
        if said == self._said:
            return text
        return f', "up": {up}, "down": {down}, "whole": {whole}{text}'


class _Size:
    """Of a slot's payload, with its header."""

    def __init__(self, slot: Slot) -> None:
        others = (slot.mask, slot.floats, slot.ints, slot.rates)
        self.rest = HEADER_BYTES + sum(part.nbytes for part in others)
        self.num_values = slot.values.nbytes
        self.num_whole = 0
        self._is_coded = slot.values.element_size() == 1

    def of(self, num_bytes: int, num_rows: int) -> int:
        if self._is_coded or num_rows:
            return self.rest + num_bytes + 8 * num_rows
        return self.rest + self.num_values
