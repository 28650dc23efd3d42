"""
The doctor of the store that holds the locks: what the checks find, measurements, and a race.

Two processes compete for one lock, and must never both hold it. ``manage.py celery_locks doctor``
prints the findings.
"""

from __future__ import annotations

import multiprocessing
import random
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Final, NamedTuple, TypeAlias

from django.core.checks import CheckMessage

from .. import conf
from ..exceptions import LockBackendError
from ..leases.holder import Holder
from ..locks.stores import get_store
from ..locks.stores.base import SPARES_LOCKS, Acquired, LockRequest, Store
from .lock_store import check_place, check_server, explain, try_lock

#: By how much the clocks may differ, s.
CLOCK_OFFSET: Final = 1.0
#: How many pairs of acquire and release are timed.
PAIRS: Final = 20
#: Lease of the lock of the race, and how long a process holds it before it releases it, s.
LEASE: Final = 0.5
HOLD: Final = 0.004
#: How long the race takes, besides the two leases that have to end, s.
RACE: Final = 2.0
#: A race without a fault is evidence if each process got the lock so often.
FEWEST: Final = 5

#: When a process certainly held the lock: since and until, by the monotonic clock.
Holding: TypeAlias = tuple[float, float]


class Finding(NamedTuple):
    """
    What a check found.

    Attributes:
        verdict: ``ok``; ``warning``; ``unsafe``, because two processes can hold one lock; or
            ``unknown``, because the check had no result.
    """

    verdict: str
    check: str
    text: str


def examine() -> Iterator[Finding]:
    """Yield each finding as soon as it is made; the race, which takes some seconds, comes last."""
    for ask in (check_place, check_server):
        messages = ask()
        yield from map(_of_check, messages)
        if any(message.is_serious() for message in messages):
            return  # no lock can be taken
    try:
        yield from _measure(get_store())
    except Exception as error:  # noqa: BLE001 - a doctor must say what it is, whatever it is
        yield _of_check(explain(error))._replace(verdict="unknown")


def _of_check(message: CheckMessage) -> Finding:
    check = str(message.id).rpartition(".")[2]
    verdict = "unsafe" if message.is_serious() else "unknown" if check == "W010" else "warning"
    return Finding(verdict, check, f"{message.msg} {message.hint}")


def _measure(store: Store) -> Iterator[Finding]:
    asked_at = time.time()
    if (store_time := store.ask_time()) is not None:
        offset = (asked_at + time.time()) / 2 - store_time
        # If the store's leases are whole seconds, its clock is, too.
        is_far = abs(offset) > CLOCK_OFFSET + store.early
        text = f"The clock here is {offset:+.3f} s from the store's; ages of locks depend on that."
        yield Finding("warning" if is_far else "ok", "clock", text)
    began_at = time.monotonic()
    for _ in range(PAIRS):
        try_lock(store)
    took, lease = (time.monotonic() - began_at) / PAIRS, conf.get("LOCK_TIMEOUT")
    text = f"To take and release a lock takes {took * 1000:.1f} ms, and LOCK_TIMEOUT is {lease} s."
    yield Finding("warning" if took > lease / 10 else "ok", "round_trip", text)
    yield _judge(*_race(store))
    if (eviction := store.ask_eviction()) is not None:
        text = f"maxmemory-policy is {eviction[0]}; any but {SPARES_LOCKS} can delete locks."
        yield Finding("ok" if eviction[0] == SPARES_LOCKS else "unsafe", "eviction", text)


def _judge(first: list[Holding], second: list[Holding]) -> Finding:
    in_order = pairwise(sorted([*first, *second]))
    overlaps = sum(since < until for (_, until), (since, _) in in_order)
    text = f"Two processes got one lock {len(first)} and {len(second)} times"
    if overlaps:
        return Finding("unsafe", "race", f"{text}, {overlaps} times both at once.")
    if min(len(first), len(second)) < FEWEST:
        return Finding("unknown", "race", f"{text}, too seldom to know if never both at once.")
    return Finding("ok", "race", f"{text}, never both at once.")


def _race(store: Store) -> list[list[Holding]]:
    """Let two processes compete for a lock; return when each of them held it."""
    store.close()  # a connection must not be forked
    name, lease = f"doctor:{uuid.uuid4().hex}", store.nearest_lease(LEASE)
    # Ctrl-C reaches this process, which ends the others; if it is killed, they end by themselves.
    fork = multiprocessing.get_context("fork")
    try:
        with fork.Pool(2, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
            racing = pool.starmap_async(_compete, [(name, lease)] * 2, chunksize=1)
            return racing.get(10 * (lease + RACE))  # longer only if one of them hangs
    finally:
        if (held := store.peek(name)) is not None:
            store.release(name, held.token)


def _compete(name: str, lease: float) -> list[Holding]:
    """Take the lock again and again; the first time let its lease end, as if killed."""
    store, holdings = get_store(), list[Holding]()
    ends_at = time.monotonic() + 2 * lease + RACE
    while time.monotonic() < ends_at:
        time.sleep(random.uniform(0, HOLD))  # noqa: S311 - so that both try at the same moment
        asked_at, token = time.monotonic(), uuid.uuid4().hex
        with suppress(LockBackendError):  # it must not hide that both held the lock before
            if not isinstance(
                store.take(LockRequest(name, token, lease, Holder(lease=lease))), Acquired
            ):
                continue
            since, until = time.monotonic(), asked_at + lease - store.early
            time.sleep(HOLD)
            if holdings:
                until = min(until, time.monotonic())
                store.release(name, token)
            holdings.append((since, until))
    return holdings
