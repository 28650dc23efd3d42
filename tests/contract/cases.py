"""
The contract of a lock in any store, as functions that raise AssertionError if it is broken.

Each uses the store that the settings of the running test name, and waits by the clock of leases.
Functions whose names end in ``_by_processes`` need a store that processes share. With a limit,
each case is about one place of a lock, and others hold all its other places.
"""

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from django.db import connections

from django_celery_safe import (
    CacheLock,
    ConfigurationError,
    HeldLock,
    LockLost,
    cache_lock,
    find_lock,
    iter_locks,
    release_lock,
)
from django_celery_safe.leases.holder import Holder, place_name, place_names
from django_celery_safe.leases.lease import Renewal, clock
from django_celery_safe.locks.stores import get_store as store
from django_celery_safe.locks.stores.local import LocalStore
from django_celery_safe.locks.stores.memcached import MemcachedStore
from django_celery_safe.locks.stores.portable import NO_DELETE, PortableStore
from tests.locks.renewals import get_lock, get_remaining, stop_renewing, take_lock
from tests.processes import Journal, meet, run_in_processes, start_in_process, tell, wait_for

PROCESSES = 8

#: By how much a store may hold a lock for longer than asked, s.
TICK = 0.002

Case = Callable[[Path], None]

#: A lease that ends while a case waits, s.
LEASE = 10

#: Names the environment variable with the limit of the locks; unset: 1.
LIMIT = "SAFE_CONTRACT_LIMIT"
#: The host of those who hold the other places.
OTHERS = "others"


def limit() -> int:
    """Return how many may hold each lock of this test."""
    return int(os.environ.get(LIMIT, "1"))


def make_lock(name: str, **options: Any) -> CacheLock:
    """Return a lock of which one place is left."""
    hold_other_places(name)
    return cache_lock(name, limit=limit(), **options)


def place(name: str) -> str:
    """Return the name of the place that is left: the second, if there are several."""
    return place_name(name, min(2, limit()))


def find(name: str) -> HeldLock | None:
    """Return who holds the place that is left."""
    return find_lock(place(name))


@cache
def hold_other_places(name: str) -> None:
    """Let others hold all places of a lock but one; again in each process, with equal tokens."""
    for other in place_names(name, limit()):
        if other != place(name):
            token = hashlib.md5(other.encode(), usedforsecurity=False).hexdigest()
            take_lock(other, token, 3600, Holder(OTHERS, 1))


def _wait_until_free(name: str) -> None:
    give_up_at = clock.now() + 30
    while find(name) is not None:
        assert clock.now() < give_up_at, f"the lease of {name} did not end"
        clock.sleep(0.1)


def _listed() -> list[str] | None:
    """Return the names of all locks that are held; None: the store can't list."""
    if not isinstance(store(), PortableStore | MemcachedStore):
        return [held.name for held in iter_locks() if held.holder.host != OTHERS]
    with pytest.raises(ConfigurationError, match="can't list its locks"):
        list(iter_locks())
    return None


def one_winner_for_each_new_key_by_processes(folder: Path, keys: int = 100) -> None:
    """Exactly one of 8 processes that race for a new key gets it."""
    names = [f"new:{number}" for number in range(keys)]
    _race(folder, names)


def one_winner_for_each_expired_key_by_processes(folder: Path, keys: int = 60) -> None:
    """Exactly one of 8 processes that race for a key whose lease has ended gets it."""
    names = [f"expired:{number}" for number in range(keys)]
    for name in names:
        lock = make_lock(name, timeout=LEASE)
        assert lock.acquire()
        stop_renewing(lock)
    _wait_until_free(names[-1])
    _race(folder, names)


def _race(folder: Path, names: list[str]) -> None:
    journal = Journal(folder / "winners.jsonl")
    for name in names:
        hold_other_places(name)
    run_in_processes(race, PROCESSES, journal, names)
    winners = journal.tally("name", "won")
    assert {name: winners[name] for name in names} == dict.fromkeys(names, 1)


def race(journal: Journal, names: list[str]) -> None:
    """Try each lock once, all processes at the same moment."""
    for name in names:
        meet()
        # The other places are held already.
        if cache_lock(name, limit=limit(), timeout=60).acquire():
            journal.write("won", name=name)


def fences_grow_by_processes(folder: Path) -> None:
    """Each acquisition has a larger fence than every one that ended before it began."""
    journal = Journal(folder / "fences.jsonl")
    run_in_processes(take_turns, 4, journal, 25)
    fences = [entry["fence"] for entry in journal.entries("held")]
    assert len(fences) == 100
    if isinstance(store(), PortableStore | MemcachedStore):
        assert set(fences) == {None}
        return
    assert fences == sorted(set(fences)), "fences do not grow in the order of the acquisitions"


def take_turns(journal: Journal, times: int) -> None:
    """Hold one lock ``times`` times, each time noting its fence."""
    for _ in range(times):
        with make_lock("turns", blocking_timeout=30) as lock:
            assert lock
            journal.write("held", fence=lock.fence)


def late_holder_spares_the_new_one(folder: Path) -> None:
    """An owner whose lease ended neither extends nor frees the new holder's lock."""
    late = make_lock("late", timeout=LEASE)
    assert late.acquire()
    stop_renewing(late)
    _wait_until_free("late")
    new = make_lock("late", timeout=LEASE)
    assert new.acquire()
    stop_renewing(new)
    with pytest.raises(LockLost):
        late.extend(3600)
    assert late.release() is False
    assert get_lock(place("late")).token == new.token
    # It ends by its own lease.
    _wait_until_free("late")


def renewed_lock_outlives_its_lease(folder: Path) -> None:
    """A renewed lock stays held for longer than its lease, and is then free at once."""
    with make_lock("renewed", timeout=LEASE) as lock:
        assert lock
        ends_at = clock.now() + LEASE + 2
        while clock.now() < ends_at:
            assert not make_lock("renewed").acquire(), "someone else got a lock that is renewed"
            clock.sleep(0.1)
        assert lock.held
        lock.ensure()
    if store().shortest_lease >= NO_DELETE:
        # Portable: it may have been in the last seconds of its lease.
        _wait_until_free("renewed")
    assert find("renewed") is None


def killed_and_paused_holders_lose_their_locks_by_processes(folder: Path) -> None:
    """A lock has no more than its lease left if its holder is killed; a paused one learns of it."""
    gate = folder / "gate"
    with (
        start_in_process(hold_and_ensure, "killed", gate) as killed,
        start_in_process(hold_and_ensure, "paused", gate) as paused,
    ):
        for holder, number in ((killed, signal.SIGKILL), (paused, signal.SIGSTOP)):
            holder.receive()
            os.kill(holder.pid, number)
        left = get_lock(place("killed")).remaining
        assert left is None or left <= LEASE + TICK
        try:
            locks = [make_lock(name) for name in ("killed", "paused")]
            assert all(lock.acquire(blocking_timeout=30) for lock in locks)
        finally:
            os.kill(paused.pid, signal.SIGCONT)
        gate.touch()
        assert paused.receive() == "LockLost"
        assert all(lock.release() for lock in locks)


def hold_and_ensure(name: str, gate: Path) -> None:
    """Hold a lock until the gate is there, then say what ``ensure`` says."""
    lock = make_lock(name, timeout=LEASE)
    assert lock.acquire()
    tell(lock.token)
    wait_for(gate.exists, 30, "the gate did not open")
    try:
        lock.ensure()
    except LockLost as error:
        tell(type(error).__name__)
    else:
        tell("still held")


def holder_is_shown(folder: Path) -> None:
    """A held lock is found by name and in the list, with its holder; a free one is not."""
    with make_lock("shown", timeout=20) as lock:
        found = get_lock(place("shown"))
        assert (found.name, found.token, found.fence) == (place("shown"), lock.token, lock.fence)
        assert found.holder.pid == os.getpid()
        assert found.holder.renewed is True
        assert abs(found.holder.since - time.time()) < 5
        if isinstance(store(), PortableStore | MemcachedStore):
            assert found.remaining is None
        else:
            assert 15 < get_remaining(found.name) <= 20 + TICK
        assert _listed() in ([place("shown")], None)
    assert find("shown") is None
    assert _listed() in ([], None)


def waiter_gets_the_lock_after_its_release(folder: Path) -> None:
    """A waiter has the lock soon after its release, long before the lease would have ended."""
    first, second = make_lock("handed over"), make_lock("handed over")
    waits = threading.Event()

    def wait() -> bool:
        try:
            assert not second.acquire()
            waits.set()
            return second.acquire(blocking_timeout=None) and second.release()
        finally:
            connections.close_all()

    assert first.acquire()
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(wait)
        assert waits.wait(30)
        assert not waiting.done()
        assert first.release()
        assert waiting.result(20)


def waiting_ends_in_time(folder: Path) -> None:
    """A waiter that does not get the lock gives up after its blocking_timeout, and not before."""
    with make_lock("not for you", timeout=3600) as lock:
        assert lock
        began_at = clock.now()
        assert make_lock("not for you").acquire(blocking_timeout=0.25) is False
        assert 0.25 <= clock.now() - began_at < 10


def operator_frees_only_what_was_seen(folder: Path) -> None:
    """An operator frees the acquisition that was seen, and no later one; nor does its holder."""
    first = make_lock("operated", timeout=60)
    assert first.acquire()
    seen = get_lock(place("operated"))
    assert release_lock(seen) is True
    assert find("operated") is None
    with make_lock("operated") as second:
        assert second
        assert release_lock(seen) is False
        with pytest.raises(LockLost):
            first.extend(3600)
        with pytest.raises(LockLost):
            first.ensure()
        assert first.release() is False
        second.ensure()


def odd_names_are_locks_of_their_own(folder: Path) -> None:
    """Very long names and names with spaces, control or other characters work like any."""
    long = "x" * 10_000
    names = [long, long + "y", "with space", "tab\tnewline\n", "\x00", "žluťoučký", "%s:{}"]
    locks = [make_lock(name) for name in names]
    assert all(lock.acquire() for lock in locks)
    assert not any(make_lock(name).acquire() for name in names)
    assert set(_listed() or map(place, names)) == set(map(place, names))
    assert all(lock.release() for lock in locks)


def extend_sets_the_lease(folder: Path) -> None:
    """extend() makes the lease as long as asked, longer or shorter."""
    with make_lock("extended", timeout=LEASE) as lock:
        for seconds in (100, LEASE):
            lock.extend(seconds)
            trusted = seconds - store().early
            assert trusted - 1 < lock.remaining <= trusted + TICK
            assert find("extended")
            if not isinstance(store(), PortableStore | MemcachedStore):
                assert seconds - 2 < get_remaining(place("extended")) <= seconds + TICK
        # Ended by its lease, not by a release.
        stop_renewing(lock)
        _wait_until_free("extended")
        assert not lock.held


def too_short_a_lease_is_refused(folder: Path) -> None:
    """A lease that the store can't keep is an error that says which ones it can."""
    shortest = store().shortest_lease
    with pytest.raises(ConfigurationError, match=f"from {shortest:g} s"):
        store().check(shortest / 2)
    if shortest < 1:
        return
    with pytest.raises(ConfigurationError, match=f"from {shortest:g} s"):
        make_lock("short", timeout=shortest / 2).acquire()
    with make_lock("short") as lock:
        with pytest.raises(ConfigurationError, match=f"from {shortest:g} s"):
            lock.extend(shortest / 2)
        lock.ensure()


def acquiring_again_with_the_same_token_is_no_conflict(folder: Path) -> None:
    """A request that a client repeats because the answer got lost still acquires."""

    token = "0123456789abcdef" * 2
    hold_other_places("repeated")
    first, again = (take_lock("repeated", token, limit=limit()) for _ in range(2))
    assert again == first
    assert store().release(place("repeated"), token) is True


def many_are_extended_together(folder: Path) -> None:
    """One extend() of several leases extends those that are ours and says which are not."""

    ours, theirs = "a" * 32, "b" * 32
    for name, token in (("one", ours), ("two", theirs)):
        hold_other_places(name)
        take_lock(name, token, LEASE, limit=limit())
    renewals = [Renewal(place(name), ours, 50) for name in ("one", "two", "three")]
    assert store().extend(renewals) == [True, False, False]
    assert store().peek(place("three")) is None
    _wait_until_free("two")
    assert store().peek(place("one")) is not None
    assert store().release(place("one"), ours) is True


def each_lease_has_its_own_length(folder: Path) -> None:
    """Leases of different lengths, extended together, each get theirs, whatever their order."""
    tokens = {f"length:{number}": number * 32 for number in "123"}
    for name, token in tokens.items():
        hold_other_places(name)
        take_lock(name, token, 10, limit=limit())
    for lengths in ([50, 50, 50], [30, 50, 50], [50, 50, 30], [30, 40, 50]):
        asked = dict(zip(tokens, lengths, strict=True))
        renewals = [Renewal(place(name), tokens[name], asked[name]) for name in tokens]
        assert store().extend(renewals) == [True] * 3
        for name, length in asked.items():
            left = get_lock(place(name)).remaining
            # None: this store does not report it.
            assert left is None or length - 5 < left <= length + 1
    assert all(store().release(place(name), token) for name, token in tokens.items())


def the_clock_is_told(folder: Path) -> None:
    """A store that has a clock tells it, as exactly as it counts its leases."""
    if isinstance(store(), PortableStore | LocalStore):
        assert store().ask_time() is None
        return

    def is_right() -> bool:
        told = store().ask_time()
        return told is not None and abs(told - time.time()) < store().early + 0.5

    # A server that had no processor for a moment (memcached counts by a timer) catches up.
    assert wait_for(is_right)


#: Cases that take a moment.
QUICK: list[Case] = [
    the_clock_is_told,
    holder_is_shown,
    waiter_gets_the_lock_after_its_release,
    waiting_ends_in_time,
    operator_frees_only_what_was_seen,
    odd_names_are_locks_of_their_own,
    acquiring_again_with_the_same_token_is_no_conflict,
    each_lease_has_its_own_length,
    too_short_a_lease_is_refused,
]

#: Cases that wait for leases to end. They can run at the same time.
PATIENT: list[Case] = [
    late_holder_spares_the_new_one,
    renewed_lock_outlives_its_lease,
    extend_sets_the_lease,
    many_are_extended_together,
]

#: Cases for stores that processes share.
BY_PROCESSES: list[Case] = [
    one_winner_for_each_new_key_by_processes,
    one_winner_for_each_expired_key_by_processes,
    fences_grow_by_processes,
    killed_and_paused_holders_lose_their_locks_by_processes,
]
