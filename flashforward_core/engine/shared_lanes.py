"""What the lanes of several rollouts share: which tasks can start, and who works on what. See ``batch.py``."""

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ..graph.task import ForwardTask
from .dispatch import Dispatcher
from .events import Event
from .executor import task_failed
from .lanes import IDLE_S, Lane
from .run import Launched, Run

NO_ROLLOUT = -1
"""The number under which a lane that cannot go on tells its error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A rollout's task, or a lane, has failed."""

    error: Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class Quiet:
    """No lane works for a dropped rollout any more."""


Item = list[Event] | Failed | Quiet


class SharedLanes:
    """The dispatcher, the runs, and how many tasks of each are under way. Any thread may call."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self.inbox: queue.SimpleQueue[tuple[int, Item]] = queue.SimpleQueue()
        self.lanes = lanes
        self._changed = threading.Condition()
        self._dispatcher = Dispatcher(num_lanes=len(lanes))
        self._runs: dict[int, Run] = {}
        self._running: dict[int, int] = {}
        self._dropped: set[int] = set()
        self._stopped = False

    def admit(self, number: int, run: Run) -> None:
        """Let lanes work on a rollout; the lower its number, the more urgent it is."""
        with self._changed:
            self._runs[number], self._running[number] = run, 0
            self._dispatcher.admit(number, run.graph)
            self._changed.notify_all()

    def no_more(self) -> None:
        """Say that no rollout follows those that were admitted."""
        with self._changed:
            self._dispatcher.no_more()

    def drop(self, number: int) -> None:
        """Start no more of a rollout; ``Quiet`` comes once its last task has ended."""
        with self._changed:
            if number not in self._dropped:
                self._dropped.add(number)
                self._dispatcher.drop(number)
                self._tell_if_quiet(number)

    def forget(self, number: int) -> None:
        """Let go of a rollout that has ended, well or not."""
        with self._changed:
            del self._runs[number], self._running[number]
            self._dropped.discard(number)

    def stop(self) -> None:
        """Let every lane end after its running task."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def work(self, lane: int) -> None:
        """Do what there is to do, until ``stop``. On the lane's thread; never raises."""
        try:
            self._work(lane)
        except BaseException as error:  # the calling thread raises it, instead of waiting for a lane that has ended
            self.inbox.put((NO_ROLLOUT, Failed(error=task_failed(self.lanes[lane].name, error))))

    def _work(self, lane: int) -> None:
        while (taken := self._next(lane)) is not None:
            number, run, task = taken
            try:
                launched = run.launch(task, lane=lane)
            except BaseException as error:  # the calling thread tells it: a thread has nobody to tell it to
                self._ended(number, Failed(error=task_failed(task.id, error)))
                continue
            self.lanes[lane].defer(launched.end, partial(self._complete, number, run, launched))
            with self._changed:
                self._dispatcher.finish(number, task)
                self._changed.notify_all()

    def _next(self, lane: int) -> tuple[int, Run, ForwardTask] | None:
        """Return what to launch next, None at the end; deliver what is done while there is nothing."""
        while not self._stopped:
            most_s = IDLE_S if self.lanes[lane].deliver() else None
            taken = self._take(lane, most_s=most_s)
            if taken is not None:
                return taken
        return None

    def _take(self, lane: int, *, most_s: float | None) -> tuple[int, Run, ForwardTask] | None:
        """Return a task for ``lane``, after waiting once, for ``most_s`` at most, when there is none yet."""
        with self._changed:
            taken = self._dispatcher.take(lane)
            if taken is None and not self._stopped:
                self._changed.wait(most_s)
                taken = self._dispatcher.take(lane)
            if taken is None or self._stopped:
                return None
            number, task = taken
            self._running[number] += 1
            return number, self._runs[number], task

    def _complete(self, number: int, run: Run, launched: Launched) -> None:
        """Deliver a task that its device has done. Never raises."""
        try:
            self._ended(number, run.complete(launched))
        except Exception as error:
            self._ended(number, Failed(error=task_failed(launched.task.id, error)))

    def _ended(self, number: int, item: Item) -> None:
        with self._changed:
            self._running[number] -= 1  # before the caller hears of it, and forgets a rollout that is complete
            self.inbox.put((number, item))
            if isinstance(item, Failed) and number not in self._dropped:
                self.drop(number)
            else:
                self._tell_if_quiet(number)

    def _tell_if_quiet(self, number: int) -> None:
        if number in self._dropped and not self._running[number]:
            self.inbox.put((number, Quiet()))
