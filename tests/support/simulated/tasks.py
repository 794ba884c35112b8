"""Virtual time, and threads and processes that take turns: nothing happens at the same time.

A task is a thread of the program. It runs until it waits for something, which may also be the turn
of another one; what comes next is drawn from the run's own generator. `Threading` is put into the
place of the module threading where the program's modules look for it.

    world = World(random.Random(7))
    process = world.process("worker 1")
    process.spawn(work)
    world.at(0.3, process.kill)
    world.run(until_s=100.0)
"""

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace, TracebackType
from typing import Any, Self

from greenlet import getcurrent, greenlet


class Killed(BaseException):
    """Raised in the tasks of a process that dies, wherever they are; no effect of theirs counts."""


class Task:
    def __init__(self, process: "Process", target: Callable[[], None], name: str) -> None:
        self.process = process
        self.name = name
        self.is_over = False
        self.turn = 0
        """Counts what it waited for, so that nobody wakes it from something else."""
        self.joining = Waiters(process.world)
        self.strand = greenlet(self._run, process.world.hub)
        self._target = target

    def _run(self) -> None:
        try:
            self._target()
        except Killed:
            return
        except BaseException as error:
            if not self.process.is_dead:
                self.process.world.failed(self, error)
        finally:
            self.is_over = True
            self.process.tasks.pop(self, None)
            self.joining.wake()


class Process:
    """Tasks that die together."""

    def __init__(self, world: "World", name: str) -> None:
        self.world = world
        self.name = name
        self.tasks: dict[Task, None] = {}
        self.is_dead = False
        self.is_paused = False
        self.at_death: list[Callable[[], None]] = []
        self._put_off: list[Callable[[], None]] = []

    def spawn(self, target: Callable[[], None], name: str = "main") -> Task:
        task = Task(self, target, name)
        self.tasks[task] = None
        self.world.wake(task, 0)
        return task

    def kill(self) -> None:
        """As by SIGKILL. Only ever called between two events."""
        if self.is_dead:
            return
        self.is_dead = True
        for task in list(self.tasks):
            self.world.end(task)
        self.tasks.clear()
        for notice in self.at_death:
            notice()

    def pause(self) -> None:
        self.is_paused = True

    def go_on(self) -> None:
        self.is_paused = False
        late, self._put_off = self._put_off, []
        for event in late:
            self.world.at(0.0, event)

    def in_turn(self, event: Callable[[], None]) -> None:
        """Have it happen, unless this process stands still."""
        if self.is_paused:
            self._put_off.append(event)
        elif not self.is_dead:
            event()


class World:
    """One run's time and order."""

    def __init__(self, draw: random.Random, *, yields: float = 0.0) -> None:
        """`yields`: how likely it is that a thread loses its turn as it takes a lock."""
        self.draw = draw
        self.now_s = 0.0
        self.num_events = 0
        self.is_over = False
        self.yields = yields
        self.hub = getcurrent()
        self.trace: list[str] | None = None
        self.errors: list[tuple[Task, BaseException]] = []
        self._events: list[tuple[float, float, int, Callable[[], None]]] = []
        self._count = 0
        self._current: Task | None = None

    def process(self, name: str) -> Process:
        return Process(self, name)

    def clock(self) -> float:
        return self.now_s

    def tell(self, line: str) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now_s:9.4f} {line}")

    def failed(self, task: Task, error: BaseException) -> None:
        self.errors.append((task, error))
        self.is_over = True

    # -- events --------------------------------------------------------------------------------

    def at(self, delay_s: float, event: Callable[[], None]) -> None:
        """What is due at the same moment happens in an order that is drawn."""
        self._count += 1
        due_s = self.now_s + delay_s
        heapq.heappush(self._events, (due_s, self.draw.random(), self._count, event))

    def run(self, until_s: float) -> bool:
        """Until somebody says that it `is_over`. False: it is not by then, or nothing will happen
        any more."""
        events = self._events
        while not self.is_over:
            if not events or events[0][0] > until_s:
                return False
            self.now_s, _, _, event = heapq.heappop(events)
            self.num_events += 1
            event()
        return True

    # -- tasks ---------------------------------------------------------------------------------

    @property
    def current(self) -> Task:
        assert self._current is not None, "only a task can wait"
        return self._current

    def check(self) -> None:
        """A process that is dead does nothing more."""
        if self._current is not None and self._current.process.is_dead:
            raise Killed

    def wait(self, timeout_s: float | None = None) -> bool:
        """Have the others go on until somebody wakes this task; False: nobody did in time."""
        task = self.current
        self.check()
        task.turn += 1
        turn = task.turn
        if timeout_s is not None:
            self.at(max(0.0, timeout_s), lambda: self._resume(task, turn, False))
        woken: bool = self.hub.switch()
        return woken

    def wake(self, task: Task, turn: int) -> None:
        self.at(0.0, lambda: self._resume(task, turn, True))

    def pause(self, delay_s: float = 0.0) -> None:
        """Have others take a turn, and time go by."""
        if self._current is not None:
            self.wait(delay_s)

    def _resume(self, task: Task, turn: int, woken: bool) -> None:
        if task.turn != turn or task.is_over:
            return
        process = task.process
        if process.is_paused or process.is_dead:
            process.in_turn(lambda: self._resume(task, turn, woken))
            return
        self._current = task
        try:
            task.strand.switch(*(() if turn == 0 else (woken,)))
        finally:
            self._current = None

    def end(self, task: Task) -> None:
        """In the midst of what it does, which it is told."""
        task.turn += 1
        if not task.strand:  # it never had a turn
            return
        self._current = task
        try:
            task.strand.throw(Killed)
        finally:
            self._current = None

    def unwind(self, processes: Sequence[Process]) -> None:
        """Nothing of this run is left."""
        for process in processes:
            process.at_death.clear()
            process.kill()


class Waiters:
    """Tasks that wait for the same thing, first come, first woken."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._waiting: deque[tuple[Task, int]] = deque()

    def wait(self, timeout_s: float | None) -> bool:
        task = self.world.current
        entry = (task, task.turn + 1)
        self._waiting.append(entry)
        if self.world.wait(timeout_s):
            return True
        if entry in self._waiting:
            self._waiting.remove(entry)
        return False

    def wake(self, count: int | None = None) -> None:
        while self._waiting and count != 0:
            task, turn = self._waiting.popleft()
            if task.turn == turn:
                self.world.wake(task, turn)
                count = None if count is None else count - 1


class Lock:
    def __init__(self, world: World, *, reentrant: bool = False) -> None:
        self._world = world
        self._reentrant = reentrant
        self._owner: object = None
        self._depth = 0
        self._waiters = Waiters(world)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        world = self._world
        world.check()
        me = world._current
        if self._depth and self._reentrant and self._owner is me:
            self._depth += 1
            return True
        if world.yields and me is not None and world.draw.random() < world.yields:
            world.pause()
        while self._depth:
            if not blocking:
                return False
            self._waiters.wait(None)
        self._owner, self._depth = me, 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._waiters.wake(1)

    def locked(self) -> bool:
        return bool(self._depth)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def let_go(self) -> int:
        """All of it, however often it was taken; returns how often."""
        depth, self._depth = self._depth, 1
        self.release()
        return depth

    def take_back(self, depth: int) -> None:
        self.acquire()
        self._depth = depth


class Condition:
    def __init__(self, world: World, lock: Lock | None = None) -> None:
        self._lock = lock or Lock(world, reentrant=True)
        self._waiters = Waiters(world)
        self._world = world
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> Self:
        self._lock.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        depth = self._lock.let_go()
        woken = self._waiters.wait(timeout)
        self._lock.take_back(depth)
        return woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        deadline_s = None if timeout is None else self._world.now_s + timeout
        while not (found := predicate()):
            left_s = None if deadline_s is None else deadline_s - self._world.now_s
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
        return found

    def notify(self, n: int = 1) -> None:
        self._waiters.wake(n)

    def notify_all(self) -> None:
        self._waiters.wake()


class Event:
    def __init__(self, world: World) -> None:
        self._is_set = False
        self._world = world
        self._waiters = Waiters(world)

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._world.check()
        self._is_set = True
        self._waiters.wake()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            self._waiters.wait(timeout)
        self._world.check()
        return self._is_set


class Thread:
    def __init__(
        self,
        world: World,
        target: Callable[..., None],
        name: str,
        args: tuple[Any, ...] = (),
        daemon: bool = True,
    ) -> None:
        self._world = world
        self._target = target
        self._args = args
        self._task: Task | None = None
        self.name = name
        self.ident: int | None = None

    def start(self) -> None:
        self._world.check()
        process = self._world.current.process
        self._task = process.spawn(lambda: self._target(*self._args), self.name)
        self.ident = 1

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.is_over

    def join(self, timeout: float | None = None) -> None:
        if self._task is None or self._task.is_over:
            return
        self._task.joining.wait(timeout)


def threading_of(world: World) -> SimpleNamespace:
    """What modules find in the place of threading."""
    return SimpleNamespace(
        Lock=lambda: Lock(world),
        RLock=lambda: Lock(world, reentrant=True),
        Condition=lambda lock=None: Condition(world, lock),
        Event=lambda: Event(world),
        Thread=lambda **given: Thread(world, **given),
        get_ident=lambda: 1,
    )
