"""The nemesis of locks: it stops processes for a while, and empties the server's memory."""

import contextlib
import random
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.faults.locks.plan import WHEN, Plan, open_board
from tests.faults.locks.records import MemoryLoss, Pause
from tests.processes import FunctionProcess, wait_for
from tests.servers import Server

#: How often of a hundred strikes the server is restarted, where it is at all.
RESTARTS = 35

#: Tries to stop a process in the state that is wanted.
TRIES = 30


class Troublemaker:
    """
    Stops processes for longer than any lease, one to three at a time, and restarts servers.

    Args:
        server: The server with the locks; None: it is never restarted.
    """

    def __init__(
        self, plan: Plan, folder: Path, processes: Sequence[FunctionProcess], server: Server | None
    ) -> None:
        self.random = random.Random(f"{plan.seed}:nemesis")
        self.plan = plan
        self.processes = processes
        self.server = server
        self.states = open_board(folder, plan.processes)
        self.pauses: list[Pause] = []
        self.losses: list[MemoryLoss] = []

    @property
    def alive(self) -> list[int]:
        """Numbers of the processes that still work."""
        return [number for number, one in enumerate(self.processes) if not one.pipe.poll()]

    def strike(self) -> None:
        """Restart the server, or pause some of the processes that still work."""
        longest = self.plan.leases[1]
        time.sleep(longest * self.random.uniform(0.2, 0.7))
        if self.server is not None and self._restarts_now():
            took = self._restart(self.server)
            # So that most of the run is outside of the windows of memory loss.
            time.sleep((longest + took) * 1.5)
        else:
            self._pause(self.alive)

    def _restarts_now(self) -> bool:
        # After the first pause, so that every run has both.
        return bool(self.pauses) and (not self.losses or self.random.random() * 100 < RESTARTS)

    def _restart(self, server: Server) -> float:
        """Restart the server; return how long that took, s."""
        since = time.monotonic_ns()
        self.random.choice([server.stop, server.kill])()
        gone = time.monotonic_ns()
        server.start()
        self.losses.append(MemoryLoss(since, gone))
        return (time.monotonic_ns() - since) / 1e9

    def _pause(self, alive: list[int]) -> None:
        count = min(len(alive), self.random.randint(1, 3))
        stopped: dict[int, int] = {}
        try:
            for number in self.random.sample(alive, count):
                with contextlib.suppress(psutil.NoSuchProcess):
                    stopped[number] = self._stop(number)
            time.sleep(self.random.uniform(1.2, 2.0) * self.plan.leases[1])
        finally:
            for number in stopped:
                # It may have ended just before it was to be stopped.
                with contextlib.suppress(psutil.NoSuchProcess):
                    self.processes[number].resume()
        now = time.monotonic_ns()
        self.pauses += [Pause(number, since, now) for number, since in stopped.items()]

    def _stop(self, number: int) -> int:
        """Stop a process, in the state that is wanted if that can be had; return when."""
        process = self.processes[number]
        (wanted,) = self.random.choices(list(WHEN), list(WHEN.values()))
        handle = psutil.Process(process.pid)
        for tries_left in reversed(range(TRIES)):
            since = time.monotonic_ns()
            process.pause()
            wait_for(lambda: _stands_still(handle), 10, "a process did not stop")
            if self.states[number] == wanted or not tries_left:
                break
            process.resume()
            time.sleep(0.001)
        return since


def _stands_still(handle: psutil.Process) -> bool:
    return handle.status() in {psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
