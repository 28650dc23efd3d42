"""A nemesis, which harms a run again and again while it goes on."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

import psutil

from tests.faults.scenario import AnyPlan, Witness
from tests.processes import CeleryWorker, wait_for


class WorkerNemesis:
    """
    Kills children of workers, and whole workers, with SIGKILL, by its plan's seed.

    Args:
        witness: Its trouble has each harm, and each kill, with the process, what it was, and
            whether that was inside a room.
        harms: How often each of ``ways`` is done.
    """

    #: Part of the kills of children that is aimed at one inside a task; the first one is in any
    #: case.
    aimed: ClassVar[float] = 0.6
    #: A harm that comes as early as it can.
    early: ClassVar[str] = ""

    def __init__(
        self,
        plan: AnyPlan,
        workers: Sequence[CeleryWorker],
        witness: Witness,
        harms: Mapping[str, int],
    ) -> None:
        self.random = random.Random(f"{plan.seed}:nemesis")
        self.workers, self.witness = workers, witness
        #: The function for each harm; it returns False if the harm was not possible now.
        self.ways: dict[str, Callable[[], object]] = {
            "children killed": self.kill_some_child,
            "workers killed": self.kill_worker,
        }
        # Spread over the whole run, at uneven distances.
        self._due = sorted(
            ((place + (what != self.early) * self.random.random()) / number, what)
            for what, number in harms.items()
            for place in range(number)
        )
        #: The children that stand still, by their ids.
        self.paused: dict[int, Any] = {}
        self._has_killed_inside = False

    @property
    def is_spent(self) -> bool:
        """Whether all harm is done that must be done."""
        return not self._due and not self.paused

    def strike(self, done: float) -> bool:
        """Do the harm that is due when this part of the run is done; return whether one was."""
        if not self._due or done < self._due[0][0]:
            return False
        began, (_, what) = time.monotonic_ns(), self._due[0]
        if self.ways[what]() is False:
            return False
        del self._due[0]
        self.witness.trouble.write(what, began_ns=began)
        return True

    def choose_child(self, inside: bool = False) -> psutil.Process | None:
        """
        Return some child of some worker that does not stand still; None: there was none just now.

        Args:
            inside: Only one inside a task. No other process is looked at: what such a child is
                inside of may end soon.
        """
        if not inside:
            children = self.random.choice(self.workers).children()
            moving = [child for child in children if child.pid not in self.paused]
            return self.random.choice(moving) if moving else None
        pids = sorted(self.witness.room.pids() - self.paused.keys())
        with suppress(psutil.NoSuchProcess):
            child = psutil.Process(self.random.choice(pids)) if pids else None
            # The id of a dead one may be that of somebody else's process by now.
            if child is not None and child.ppid() in {worker.pid for worker in self.workers}:
                return child
        return None

    def stop_inside(self, wanted: Callable[[str], bool]) -> psutil.Process | None:
        """Stop some child inside of what is wanted; None: the one looked at was not."""
        child = self.choose_child(inside=True)
        if child is None:
            return None
        with suppress(psutil.NoSuchProcess, TimeoutError):
            child.suspend()
            wait_for(lambda: child.status() == psutil.STATUS_STOPPED, 1)
            what = self.witness.room.what(child.pid)
            if what is not None and wanted(what):
                return child
        self.resume(child)
        return None

    def resume(self, child: psutil.Process) -> None:
        """Let a child go on, if it lives."""
        with suppress(psutil.NoSuchProcess):
            child.resume()

    def kill_some_child(self) -> bool:
        """Kill a child, mostly inside a task; return whether that was done."""
        is_aimed = not self._has_killed_inside or self.random.random() < self.aimed
        child = self.stop_inside(self.may_kill_in) if is_aimed else self.choose_child()
        if child is None:
            return False
        self._has_killed_inside |= is_aimed
        self.kill_child(child)
        return True

    def may_kill_in(self, what: str) -> bool:
        """Whether a child that is inside of this may be killed."""
        return True

    def kill_child(self, child: psutil.Process) -> None:
        """Kill a child."""
        with suppress(psutil.NoSuchProcess):
            child.kill()
            self._record_kill(child.pid, "child")

    def kill_worker(self) -> bool:
        """Kill a worker with its children and start it again; return whether that was done."""
        worker = self.random.choice(self.workers)
        # First, so that it can't start children while they are counted.
        worker.pause()
        if not self.may_kill(worker):
            worker.resume()
            return False
        # They do nothing any more, and it takes a second or two until all are gone.
        for pid in (worker.pid, *(child.pid for child in worker.children())):
            self._record_kill(pid, "worker")
        worker.kill()
        worker.start()
        return True

    def may_kill(self, worker: CeleryWorker) -> bool:
        """Whether a paused worker may be killed now."""
        return True

    def _record_kill(self, pid: int, what: str) -> None:
        inside = self.witness.room.clear(pid)
        self.witness.trouble.write("killed", child=pid, what=what, inside=inside)
