"""The thread that renews leases: its renewals, and the leases and connections that it drops."""

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import ref

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from pytest_django import Settings

from django_celery_safe import LockBackendError, cache_lock, find_lock
from django_celery_safe.leases import renewer as renewing
from django_celery_safe.leases.lease import Lease, Renewal
from django_celery_safe.leases.renewer import renewer
from django_celery_safe.locks import CacheLock
from django_celery_safe.locks.stores import get_store
from django_celery_safe.locks.stores.local import LocalStore
from tests.caches import cache_at
from tests.clock import HeldClock
from tests.locks.hanging import hanging, in_background
from tests.locks.renewals import acquired, free, get_remaining
from tests.processes import wait_for
from tests.statements import raising

LEASE = 30


def thread_of(lock: CacheLock) -> threading.Thread:
    """Return the thread that renews a lock."""
    lease: Any = lock.lease
    thread: threading.Thread = lease.lane._thread
    return thread


def has_ended(thread: threading.Thread, clock: HeldClock) -> bool:
    """Let time pass; return whether a thread that renews nothing any more has ended."""
    clock.advance(LEASE)
    return not thread.is_alive()


def test_one_thread_renews_all(
    locks_in_memory: None, clock: HeldClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many locks are renewed in one request, when a third of a lease has passed."""
    extend, asked = LocalStore.extend, list[tuple[int, float | None]]()

    def count(store: LocalStore, renewals: Sequence[Renewal], within: float | None) -> list[bool]:
        asked.append((len(renewals), within))
        return extend(store, renewals, within)

    monkeypatch.setattr(LocalStore, "extend", count)
    locks = [acquired(f"many:{number}", timeout=LEASE) for number in range(50)]
    assert len({thread_of(lock) for lock in locks}) == 1
    clock.advance(9.9)
    assert asked == []
    clock.advance(0.2)
    assert asked == [(50, 10)]
    clock.advance(60)
    assert len(asked) == 7
    assert all(lock.held and get_remaining(lock.name) > 19 for lock in locks)
    assert all(lock.release() for lock in locks)
    clock.advance(60)
    assert len(asked) == 7


def test_a_thread_that_renews_nothing_ends(locks_in_memory: None, clock: HeldClock) -> None:
    """A thread whose locks are released ends after a while; the next lock begins another."""
    threads = []
    for _ in range(2):
        with cache_lock("short work", timeout=LEASE) as lock:
            threads.append(thread_of(lock))
        wait_for(partial(has_ended, threads[-1], clock), 30, "it goes on")
    assert threads[0] is not threads[1]


@pytest.mark.parametrize("begins", [False, True], ids=["before", "after"])
def test_after_an_interrupted_start_another_thread_renews(
    begins: bool, locks_in_memory: None, clock: HeldClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time limit may hit before or after the thread has begun; one thread remains."""
    start, begun = threading.Thread.start, list[threading.Thread]()

    def interrupted(thread: threading.Thread) -> None:
        if begins:
            start(thread)
            begun.append(thread)
        raise SoftTimeLimitExceeded

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(SoftTimeLimitExceeded):
            cache_lock("first", timeout=LEASE).acquire()
    assert find_lock("first") is None
    for thread in begun:
        thread.join(10)
        assert not thread.is_alive()
    with cache_lock("second", timeout=LEASE) as lock:
        clock.advance(11)
        assert lock.remaining > 25


@pytest.mark.parametrize("seconds", [31, 600], ids=["the same thread", "another thread"])
def test_a_renewal_under_way_does_not_undo_an_extension(
    seconds: float, locks_in_memory: None, clock: HeldClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """extend() waits for its end, so the new length lasts, from the request on."""
    extend, sent, late = LocalStore.extend, list[Any](), threading.Event()

    def send(store: LocalStore, renewals: Any, within: float | None = None) -> list[bool]:
        if not in_background() or sent:
            clock.jump(1, settle=False)
            return extend(store, renewals)
        # The length of the lease that it had when the request was sent.
        sent.extend(renewals)
        assert late.wait(30)
        return extend(store, sent, within)

    def answer(lease: Lease[Any]) -> None:
        wait_for(lambda: lease.lane is None, message="extend() has not begun")
        late.set()

    with cache_lock("moved", timeout=20) as lock:
        monkeypatch.setattr(LocalStore, "extend", send)
        clock.jump(7, settle=False)
        wait_for(lambda: sent)
        threading.Thread(target=answer, args=[lock.lease]).start()
        lock.extend(seconds)
        clock.advance(3)
        assert 20 < lock.remaining <= seconds - 4
        assert get_remaining("moved") > 20


def test_an_answer_counts_though_its_thread_was_replaced(
    locks_in_memory: None, clock: HeldClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that takes longer than a thread may hang renews its leases nevertheless."""
    extend, asked, failed = LocalStore.extend, list[float](), threading.Event()

    def last(store: LocalStore, *request: Any) -> list[bool]:
        asked.append(clock.now())
        if len(asked) > 1:
            failed.set()
            raise LockBackendError("here", "extend", "gone")
        clock.jump(LEASE * renewing.HANGS_AFTER + 1, settle=False)
        assert failed.wait(30)
        return extend(store, *request)

    monkeypatch.setattr(LocalStore, "may_hang", True)
    monkeypatch.setattr(LocalStore, "extend", last)
    with cache_lock("slow", timeout=LEASE) as lock:
        clock.jump(10.5, settle=False)
        assert failed.wait(30)
        wait_for(lambda: lock.lease is not None and lock.lease.asked_at == asked[0])
        # The next thread asked at once.
        assert asked[1] == asked[0] + 13
        assert lock.held


def test_a_lost_lease_is_lost_at_once(locks_in_memory: None, clock: HeldClock) -> None:
    """When the store says no, the lock is not held, before anybody asks for its new holder."""
    with cache_lock("freed", timeout=LEASE) as lock:
        free("freed")
        with hanging("peek", in_background) as asked:
            clock.jump(11, settle=False)
            assert asked.wait(30)
            assert not lock.held


@pytest.mark.parametrize("fails", [False, True], ids=["an answer", "an error"])
def test_a_lease_that_is_removed_while_it_is_renewed_is_not_lost(
    fails: bool, locks_in_memory: None, clock: HeldClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store says that it has no such lock any more, or nothing: its holder wants none."""
    told: list[Any] = []
    monkeypatch.setattr(renewing, "emit_in_background", lambda *report: told.append(report))
    if fails:
        error = LockBackendError("here", "extend", "no answer")
        monkeypatch.setattr(LocalStore, "extend", raising(error))
    with hanging("extend") as extending:
        facts = ("released", "token", LEASE, clock.now() - LEASE, print)
        lease = Lease(get_store(), *facts, lock=ref(extending))
        renewer.add(lease)
        thread: Any = lease.lane._thread  # type: ignore[union-attr]
        assert extending.wait(30)
        renewer.remove(lease)
        # The thread of an hour's lease may hang for as long; finish() has a transaction open.
        monkeypatch.setattr(renewing, "LONGEST_FINISH", 0.1)
        lease.seconds = 3600.0
        renewer.finish_renewal(lease)
        assert renewer.renewing
    wait_for(partial(has_ended, thread, clock), 30, "it goes on")
    # An earlier test's lock may be reported only now.
    assert (lease.lost, [one for one in told if "'released'" in repr(one)]) == (False, [])


@pytest.mark.parametrize(
    ("cache", "seconds"), [("second", LEASE), ("default", 1000)], ids=["store", "length"]
)
def test_a_renewal_that_hangs_holds_up_no_other(
    cache: str, seconds: float, clock: HeldClock, settings: Settings
) -> None:
    """While a store does not answer, leases elsewhere are renewed, and much longer ones there."""
    settings.CACHES = cache_at("first", "memory") | cache_at("second", "memory", "second")
    hangs, other = cache_lock("hangs", timeout=LEASE), cache_lock("other", timeout=seconds)
    with hangs:
        settings.DJANGO_CELERY_SAFE = {"LOCK_CACHE": cache}
        hang = hanging("extend", lambda renewals, *within: renewals[0][0] == "hangs")
        with other, hang as extending:
            for _ in range(4):
                clock.jump(seconds / 2, settle=False)
                assert extending.wait(30)
                wait_for(lambda: other.remaining == seconds, 30, "it is not renewed")
