"""The plan of a run, and the stores that it can use."""

import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tests.faults.scenario import Plan as AnyPlan
from tests.faults.scenario import option

#: The state of a process at this moment, as the nemesis sees it.
IDLE, ASKING, HOLDING = 0, 1, 2

#: Uses of a lock that is held (methods of ``holders.LockUser``), and how often
#: of a hundred times.
OFTEN = {
    "write_and_release": 40,
    "look_around_and_release": 22,
    "ensure_and_release": 15,
    "extend_and_release": 15,
    "linger_and_release": 5,
    "outstay_and_write": 1,
    "outlive_a_lease_and_release": 1,
    "abandon": 1,
}

#: In which state a process is to be stopped, and how often of a hundred times.
WHEN = {HOLDING: 65, ASKING: 30, IDLE: 5}


class Store(NamedTuple):
    """
    A store of locks.

    Attributes:
        backend: Its cache backend; None: locks are rows of a database.
        leases: Shortest and longest lease that suits its speed, s.
        whole: Its leases are whole seconds.
        forgetful: It loses its memory with a restart.
        fences: It numbers its acquisitions.
    """

    backend: str | None
    leases: tuple[float, float]
    whole: bool = False
    forgetful: bool = False
    fences: bool = True


STORES = {
    "django-redis": Store("django_redis.cache.RedisCache", (0.05, 0.3), forgetful=True),
    "redis-cache": Store(
        "django.core.cache.backends.redis.RedisCache", (0.05, 0.3), forgetful=True
    ),
    "postgres": Store(None, (0.1, 0.5)),
    "sqlite-immediate": Store(None, (0.1, 0.5)),
    "memcached": Store(
        "django.core.cache.backends.memcached.PyMemcacheCache",
        (2, 4),
        whole=True,
        forgetful=True,
        fences=False,
    ),
    "portable": Store("diskcache.DjangoCache", (6, 9), whole=True, fences=False),
}


@dataclass(frozen=True, kw_only=True)
class Plan(AnyPlan):
    """
    The plan of one recording.

    Args:
        locks: Number of names; None: as many as give three places to each four processes.
        ways: Uses of a lock, and how often of a hundred times.
        at_least: The run lasts this long even if it has its operations before, s.
        make_lock: Dotted path of what is called as ``cache_lock`` is.
        backend: Cache backend instead of the store's own; None: the store's own.
        guarded: Whether the resource refuses writes with older fences.
    """

    operations: int = option(
        200_000, "requests that the store must have answered, by all processes together"
    )
    processes: int = option(8, "how many use the locks")
    nemesis: str = option("pause", "restart also restarts the server", ("pause", "restart"))
    store: str = option("django-redis", "what holds the locks", tuple(STORES))
    limit: int = option(1, "how many may hold a lock at once")
    at_most: float = option(1800.0, "the run fails when it takes longer, s")
    locks: int | None = None
    ways: Mapping[str, int] = field(default_factory=lambda: OFTEN)
    at_least: float = 0.0
    make_lock: str = "django_celery_safe.cache_lock"
    backend: str | None = None
    guarded: bool = True

    def objection(self) -> str | None:
        if self.nemesis == "restart" and not STORES[self.store].forgetful:
            return f"{self.store} does not lose its memory with a restart: use pause."
        return None

    @property
    def leases(self) -> tuple[float, float]:
        """Shortest and longest lease, s."""
        return STORES[self.store].leases

    @property
    def names(self) -> list[str]:
        """The locks' names."""
        number = self.processes * 3 // 4 // self.limit if self.locks is None else self.locks
        return [f"lock-{index}" for index in range(max(1, number))]


class Board:
    """Shows what each process does at this moment: one byte for each, in shared memory."""

    def __init__(self, folder: Path, processes: int) -> None:
        path = folder / "board"
        if not path.exists():
            path.write_bytes(bytes(processes))
        with path.open("r+b") as file:
            self.states = mmap.mmap(file.fileno(), processes)
