"""
The processes of a run: each takes a lock, uses it in some way, and takes the next.

Everything asked of a lock is written down with the clock read before and after.
"""

import json
import logging
import random
import time
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path

from django.utils.module_loading import import_string

from django_celery_safe.exceptions import CelerySafeError
from django_celery_safe.leases.renewer import renewer
from django_celery_safe.locks.lock import CacheLock
from tests.faults.locks import resource
from tests.faults.locks.plan import ASKING, HOLDING, IDLE, Plan, open_board
from tests.faults.locks.records import NO, YES, Record, is_operation
from tests.processes import tell, wait_for

#: Pause after a request that the store did not answer, s.
PAUSE_AFTER_ERROR = 0.005

#: Longest pause after a lock that someone else held, s.
PAUSE_AFTER_REFUSAL = 0.002

#: How often of a hundred times a process waits for a lock instead of trying once.
WAITS = 20


def use_locks(plan: Plan, number: int, folder: Path) -> None:
    """Use locks until this process has its share of the operations."""
    logging.disable()  # a lost lock is an ERROR, and here it is wanted
    with (folder / f"process-{number}.jsonl").open("w", buffering=1 << 20) as file:
        user = LockUser(plan, number, folder, file)
        tell("ready")
        wait_for((folder / "go").exists, 60, "the run did not begin")
        user.run()


class LockUser:
    """One process: draws what to do by its seed, does it, writes it down."""

    def __init__(self, plan: Plan, number: int, folder: Path, file: TextIOWrapper) -> None:
        self.plan = plan
        self.number = number
        self.random = random.Random(f"{plan.seed}:{number}")
        self.make_lock: Callable[..., CacheLock] = import_string(plan.make_lock)
        self.folder = folder
        self.states = open_board(folder, plan.processes)
        self.file = file
        self.names = plan.names
        self.operations = 0

    def run(self) -> None:
        """Take turns until both the operations and the time are reached."""
        began = time.monotonic()
        share = -(-self.plan.operations // self.plan.processes)
        while self.operations < share or time.monotonic() < began + self.plan.at_least:
            self.take_turn()

    def take_turn(self) -> None:
        """Try to take a lock, and use it if that succeeds."""
        seconds = self.draw_lease()
        ways = self.plan.ways
        (way,) = self.random.choices(list(ways), list(ways.values()))
        wait = seconds * self.random.random() if self.random.random() * 100 < WAITS else 0
        name = self.random.choice(self.names)
        more = {} if self.plan.limit == 1 else {"limit": self.plan.limit}
        lock = self.make_lock(name, timeout=seconds, blocking_timeout=wait, **more)
        self.show(ASKING)
        outcome = self.ask("acquire", lock, lock.acquire, seconds)
        if outcome == YES:
            self.show(HOLDING)
            if self.random.random() < 0.5:
                self.stop_renewing(lock)
            for step in way.split():
                self.take_step(step, lock)
        self.show(IDLE)
        if outcome == NO:
            time.sleep(self.random.uniform(0, PAUSE_AFTER_REFUSAL))

    def take_step(self, step: str, lock: CacheLock) -> None:
        """Do one step of a way to use a lock that is held."""
        chance, left = self.random.uniform, lock.remaining
        match step:
            case "linger":
                time.sleep(left * chance(0, 0.1))
            case "stay":
                time.sleep(left * chance(0.3, 0.6))
            case "outstay":
                # A renewed one lasts, so this is where it is watched from renewal to renewal.
                time.sleep(left * chance(0.9, 1.2))
                self.look(lock)
                time.sleep(self.plan.leases[0] * chance(0, 2))
            case "ensure":
                self.ask("ensure", lock, lock.ensure)
            case "release":
                self.ask("release", lock, lock.release)
            case _:
                getattr(self, step)(lock)

    def stop_renewing(self, lock: CacheLock) -> None:
        """Let the lease end, as if the thread that renews it hung."""
        if lock.lease is not None:
            renewer.remove(lock.lease)

    def leave(self, lock: CacheLock) -> None:
        """Be gone like one who was killed: the lock is neither released nor renewed."""
        self.stop_renewing(lock)
        now = time.monotonic_ns()
        about = (YES, lock.token, lock.fence)
        self.note(Record(self.number, "leave", place_of(lock), now, now, *about))

    def extend(self, lock: CacheLock) -> None:
        """Ask for a lease of another length."""
        seconds = self.draw_lease()
        self.ask("extend", lock, lambda: lock.extend(seconds), seconds)

    def look(self, lock: CacheLock) -> None:
        """Read ``held`` between two readings of the clock."""
        self.ask("look", lock, lambda: lock.held)

    def write(self, lock: CacheLock) -> None:
        """Write to what the lock protects, without looking whether it is still ours."""
        if lock.fence is None:
            return
        sent = time.monotonic_ns()
        place = place_of(lock)
        number, accepted = resource.write(self.folder / f"resource-{place}", lock.fence)
        returned = time.monotonic_ns()
        outcome = YES if accepted or not self.plan.guarded else NO
        about = (outcome, lock.token, lock.fence, 0.0, 0, number)
        self.note(Record(self.number, "write", place, sent, returned, *about))

    def ask(
        self, action: str, lock: CacheLock, call: Callable[[], object], seconds: float = 0.0
    ) -> str:
        """Do one thing with the lock and write it down; return the outcome."""
        token, place = lock.token, place_of(lock)
        sent = time.monotonic_ns()
        try:
            outcome = NO if call() is False else YES
        except CelerySafeError as error:
            outcome = type(error).__name__
        returned = time.monotonic_ns()
        left = int(lock.remaining * 1e9)
        if token is None:
            token, place = lock.token, place_of(lock)
        about = (outcome, token, lock.fence, seconds, left)
        self.note(Record(self.number, action, place, sent, returned, *about))
        if outcome == "LockBackendError":
            time.sleep(PAUSE_AFTER_ERROR)
        return outcome

    def note(self, record: Record) -> None:
        """Write a record down."""
        self.operations += is_operation(record)
        self.file.write(json.dumps(record) + "\n")

    def draw_lease(self) -> float:
        """Return some length of a lease."""
        return self.random.uniform(*self.plan.leases)

    def show(self, state: int) -> None:
        """Let the nemesis see what this process does."""
        self.states[self.number] = state


def place_of(lock: CacheLock) -> str:
    """Return the name of the place that a lock holds; its own name while it holds none."""
    return lock.name if lock.lease is None else str(lock.lease.name)
