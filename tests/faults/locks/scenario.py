"""How a run of the scenario ``locks`` is recorded, and its broken variants."""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tests.faults.lab import Lab
from tests.faults.locks.history import History
from tests.faults.locks.holders import use_locks
from tests.faults.locks.nemesis import Troublemaker
from tests.faults.locks.plan import ABANDON, OUTSTAY, WRITE, Board, Plan
from tests.faults.locks.records import iter_records
from tests.servers import RedisServer, Server

#: How late a renewal that is under way may be sent on a busy machine, s.
SLOWNESS = 0.5

CONTRACT, OURS = "tests.contract.broken.", "tests.faults.locks.broken."

#: Holders that go on beyond their leases while others come and go.
OUTSTAYING = {OUTSTAY: 40, WRITE: 60}

#: One lock with places for half of the processes.
PLACES = {"limit": 2, "locks": 1}

#: Each fault: the changes of the plan, and the check that must find it.
FAULTS: Mapping[str, tuple[dict[str, Any], str]] = {
    "release-any": ({"backend": CONTRACT + "NoOwnerCheckCache"}, "two holders"),
    "endless-lease": (
        {
            "backend": CONTRACT + "NoExpiryCache",
            "ways": {ABANDON: 1, WRITE: 9},
            "at_least": 3.0,
        },
        "refusals without a holder",
    ),
    "fence-per-process": ({"backend": CONTRACT + "FencePerProcessCache"}, "unordered fences"),
    "read-then-write": ({"backend": CONTRACT + "ReadThenWriteCache"}, "two holders"),
    "extend-any": ({"backend": OURS + "ExtendsAnyCache", "ways": OUTSTAYING}, "two holders"),
    "reviving": ({"backend": OURS + "RevivingCache", "ways": OUTSTAYING}, "two holders"),
    "short-lease": ({"backend": OURS + "ShortLeaseCache"}, "two holders"),
    "forgotten-fence": (
        {"backend": OURS + "ForgetfulFenceCache", "nemesis": "restart"},
        "unordered fences",
    ),
    "endless-trust": ({"make_lock": OURS + "EndlessLock"}, "two holders"),
    "late-clock": ({"make_lock": OURS + "LateClockLock", "ways": OUTSTAYING}, "two holders"),
    "unguarded": ({"guarded": False}, "older writes"),
    "one-too-many": ({"backend": CONTRACT + "OneTooManyCache", **PLACES}, "too many holders"),
    "counted-place": ({"backend": OURS + "CountsPlacesCache", **PLACES}, "two holders"),
    "other-place": ({"backend": OURS + "ReleasesLastPlaceCache", **PLACES}, "two holders"),
}

#: The checks that must find each.
VARIANTS = {fault: (check,) for fault, (_, check) in FAULTS.items()}


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
    Board(lab.folder, plan.processes)
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
    return History(
        records=list(iter_records(lab.folder)),
        processes=plan.processes,
        nemesis=plan.nemesis,
        limit=plan.limit,
        grace=plan.leases[1] * 2 + SLOWNESS,
        pauses=trouble.pauses,
        losses=trouble.losses,
    )


def use_store(plan: Plan, lab: Lab) -> Server | None:
    """Let all processes have their locks in the plan's store; return its Redis, if it is that."""
    if plan.store == "postgres":
        lab.settings["DJANGO_CELERY_SAFE"] = {"LOCK_DATABASE": lab.database("postgres")}
        return None
    server: RedisServer = lab.server(RedisServer)
    cache = {"BACKEND": plan.backend, "LOCATION": server.url}
    lab.settings["CACHES"] = {"default": cache}
    return server
