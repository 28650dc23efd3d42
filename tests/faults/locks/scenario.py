"""How a run of the scenario ``locks`` is recorded, and its broken variants."""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from django_celery_safe import cache_lock
from django_celery_safe.locks.lock import CacheLock
from tests.faults.lab import DJANGO_REDIS, Lab
from tests.faults.locks.history import History
from tests.faults.locks.holders import use_locks
from tests.faults.locks.nemesis import Troublemaker
from tests.faults.locks.plan import ABANDON, OUTSTAY, WRITE, Plan
from tests.faults.locks.records import iter_records
from tests.servers import RedisServer, Server

#: How late a renewal that is under way may be sent on a busy machine, s.
SLOWNESS = 0.5

#: Holders that go on beyond their leases while others come and go.
OUTSTAYING = {OUTSTAY: 40, WRITE: 60}

#: Each fault: the changes of the plan, and the check that must find it.
FAULTS: Mapping[str, tuple[dict[str, Any], str]] = {
    "release-any": ({"backend": "NoOwnerCheckCache"}, "two holders"),
    "endless-lease": (
        {"backend": "NoExpiryCache", "ways": {ABANDON: 1, WRITE: 9}, "at_least": 3.0},
        "refusals without a holder",
    ),
    "fence-per-process": ({"backend": "FencePerProcessCache"}, "unordered fences"),
    "read-then-write": ({"backend": "ReadThenWriteCache"}, "two holders"),
    "reviving": ({"backend": "RevivingCache", "ways": OUTSTAYING}, "two holders"),
    "short-lease": ({"backend": "HastyCache"}, "two holders"),
    "forgotten-fence": (
        {"backend": "ForgetfulFenceCache", "nemesis": "restart"},
        "unordered fences",
    ),
    "endless-trust": ({"make_lock": f"{__name__}.EndlessLock"}, "two holders"),
    "unguarded": ({"guarded": False}, "older writes"),
    "one-too-many": ({"backend": "OneTooManyCache", "limit": 2, "locks": 1}, "too many holders"),
}

#: The checks that must find each.
VARIANTS = {fault: (check,) for fault, (_, check) in FAULTS.items()}


class EndlessLock(CacheLock):
    """Trusts itself until it is released."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(name, cache_lock(name, **options)._options)

    @property
    def held(self) -> bool:
        """Whether it was acquired."""
        return self.lease is not None

    @property
    def remaining(self) -> float:
        """The whole lease, always."""
        return 0.0 if self.lease is None else self.lease.seconds


def record(plan: Plan, lab: Lab) -> History:
    """
    Let processes use locks while they are stopped; return what they did.

    Raises:
        FunctionFailed: A process met an error that is not of this package.
        TimeoutError: The run took too long.
    """
    if plan.broken:
        plan = replace(plan, **FAULTS[plan.broken][0])
    server = use_store(plan, lab)
    (lab.folder / "board").write_bytes(bytes(plan.processes))
    processes = [lab.start(use_locks, plan, number, lab.folder) for number in range(plan.processes)]
    restarted = server if plan.nemesis == "restart" else None
    trouble = Troublemaker(plan, lab.folder, processes, restarted)
    for process in processes:
        assert process.receive() == "ready"
    (lab.folder / "go").touch()
    deadline = time.monotonic() + plan.at_most
    while trouble.alive:
        if time.monotonic() > deadline:
            raise TimeoutError(f"The history is not complete after {plan.at_most:g} s.")
        trouble.strike()
    for process in processes:
        process.result(timeout=10)
    grace = plan.leases[1] * 2 + SLOWNESS
    return History(list(iter_records(lab.folder)), plan, grace, trouble.pauses, trouble.losses)


def use_store(plan: Plan, lab: Lab) -> Server | None:
    """Let all processes have their locks in the plan's store; return its Redis, if it is that."""
    if plan.store == "postgres":
        lab.settings["DJANGO_CELERY_SAFE"] = {"LOCK_DATABASE": lab.database("postgres")}
        return None
    server: RedisServer = lab.server(RedisServer)
    lab.use_store(server, f"tests.faulty.{plan.backend}" if plan.backend else DJANGO_REDIS)
    return server
