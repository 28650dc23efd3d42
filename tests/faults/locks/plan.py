"""The plan of a run, and the stores that it can use."""

import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.scenario import AnyPlan, option

#: The state of a process at this moment, as the nemesis sees it.
IDLE, ASKING, HOLDING = 0, 1, 2

#: Uses of a lock that is held, step by step (``holders.LockUser``): the common one asks nothing
#: between the acquisition and the write; one goes on beyond the lease, as one who never asks, and
#: comes back when it is over; and one leaves without a release.
WRITE = "write release"
OUTSTAY = "look outstay look write extend look write release"
ABANDON = "write leave"

#: How often of a hundred times.
OFTEN = {
    WRITE: 40,
    "look write look release": 22,
    "ensure write look release": 15,
    "extend look write release": 15,
    "linger look linger look write release": 5,
    OUTSTAY: 1,
    "stay look ensure stay look ensure stay look ensure stay look ensure release": 1,
    ABANDON: 1,
}

#: In which state a process is to be stopped, and how often of a hundred times.
WHEN = {HOLDING: 65, ASKING: 30, IDLE: 5}


#: The stores, and the shortest and longest lease that suits the speed of each, s; tests/contract
#: has all others.
STORES = {"django-redis": (0.05, 0.3), "postgres": (0.1, 0.5)}


@dataclass(frozen=True, kw_only=True)
class Plan(AnyPlan):
    """
    The plan of one recording.

    Args:
        locks: Number of names; None: as many as give three places to each four processes.
        ways: Uses of a lock, and how often of a hundred times.
        at_least: The run lasts this long even if it has its operations before, s.
        make_lock: Dotted path of what is called as ``cache_lock`` is.
        backend: The faulty cache backend; empty: that of django-redis.
        guarded: Whether the resource refuses writes with older fences.
    """

    operations: int = option(
        200_000, "requests that the store must have answered, by all processes together"
    )
    processes: int = option(8, "how many use the locks")
    nemesis: str = option("pause", "restart also restarts a Redis", ("pause", "restart"))
    store: str = option("django-redis", "what holds the locks", tuple(STORES))
    limit: int = option(1, "how many may hold a lock at once")
    at_most: float = option(1800.0, "the run fails when it takes longer, s")
    locks: int | None = None
    ways: Mapping[str, int] = field(default_factory=lambda: OFTEN)
    at_least: float = 0.0
    make_lock: str = "django_celery_safe.cache_lock"
    backend: str = ""
    guarded: bool = True

    @property
    def leases(self) -> tuple[float, float]:
        """Shortest and longest lease, s."""
        return STORES[self.store]

    @property
    def names(self) -> list[str]:
        """The locks' names."""
        number = self.processes * 3 // 4 // self.limit if self.locks is None else self.locks
        return [f"lock-{index}" for index in range(max(1, number))]


def open_board(folder: Path, processes: int) -> mmap.mmap:
    """Return what each process does at this moment: one byte for each, in shared memory."""
    with (folder / "board").open("r+b") as file:
        return mmap.mmap(file.fileno(), processes)
