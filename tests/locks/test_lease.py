"""The thread that renews leases: its renewals, and the leases and connections that it drops."""

import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from django.db import connections
from pytest_django import Settings

from django_celery_safe import HeldLock, LockBackendError, cache_lock, find_lock, release_lock
from django_celery_safe.leases import renewer as renewing
from django_celery_safe.leases.clock import boottime
from django_celery_safe.leases.lease import Lease
from django_celery_safe.leases.renewer import renewer
from django_celery_safe.leases.store import Renewal
from django_celery_safe.locks.stores import locate
from django_celery_safe.locks.stores.local import LocalStore
from django_celery_safe.signals import lock_backend_failed, lock_lost
from tests.conftest import MakeDatabase, MakeRedisCache
from tests.locks.renewals import wait_for_renewal, wait_for_renewals
from tests.processes import wait_for
from tests.servers import PostgresServer, RedisServer


def renewing_threads() -> list[threading.Thread]:
    """Return the threads that renew leases."""
    return [one for one in threading.enumerate() if one.name == "django_celery_safe leases"]


@pytest.mark.quarantine("2026-11-26", "exact number of threads; 2 s leases")
def test_one_thread_renews_all(locks_in_memory: None) -> None:
    """Many locks are renewed by one thread, each in time."""
    before = set(renewing_threads())
    locks = [cache_lock(f"many:{number}", timeout=2) for number in range(50)]
    assert all(lock.acquire() for lock in locks)
    assert len(set(renewing_threads()) - before) == 1
    wait_for_renewal("many:0")
    wait_for_renewal("many:49")
    assert all(lock.held for lock in locks)
    assert all(lock.release() for lock in locks)


def test_a_thread_that_renews_nothing_ends(
    locks_in_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread whose locks are released ends after a while; the next lock begins another."""
    monkeypatch.setattr(renewing, "LINGER", 0.05)
    for _ in range(2):
        before = set(renewing_threads())
        with cache_lock("short work", timeout=1):
            (thread,) = set(renewing_threads()) - before
        thread.join(10)
        assert not thread.is_alive()


def test_a_connection_closes_though_other_locks_are_held(
    settings: Settings,
    make_database: MakeDatabase,
    postgres_server: PostgresServer,
    redis_cache_settings: MakeRedisCache,
) -> None:
    """With the last lock in one store the thread's connection there closes; others go on."""
    alias = make_database("postgres")
    settings.CACHES = redis_cache_settings("django-redis")
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": alias}
    with cache_lock("in Redis", cache="default", timeout=3) as other:
        with cache_lock("in PostgreSQL", timeout=3) as lock:
            wait_for_renewals(lock, other)
            name = settings.DATABASES[alias]["NAME"]
            assert len(postgres_server.sessions(name)) == 2
        # A server's session ends a moment after its connection.
        wait_for(lambda: len(postgres_server.sessions(name)) == 1)
        wait_for_renewals(other)


def test_a_store_that_is_gone_for_a_while_costs_no_lock(fragile_redis: RedisServer) -> None:
    """A renewal that fails is told, tried again, and the lease goes on if that was in time."""
    told: list[str] = []

    def listen(reason: str, **fields: object) -> None:
        told.append(reason)

    lock_backend_failed.connect(listen)
    try:
        with cache_lock("paused", timeout=9) as lock, fragile_redis.client() as admin:
            assert lock
            admin.config_set("maxclients", "1")
            admin.client_kill_filter(_type="normal", skipme=True)
            wait_for(lambda: told, 30, "no renewal failed")
            admin.config_set("maxclients", "100")
            wait_for(lambda: lock.remaining > 6, 30, "the lease was not renewed again")
            lock.ensure()
    finally:
        lock_backend_failed.disconnect(listen)
    assert "did not answer to extend" in told[0]


def test_a_broken_connection_of_the_thread_is_replaced(
    settings: Settings, make_database: MakeDatabase, postgres_server: PostgresServer
) -> None:
    """A renewing thread whose database connection was cut goes on with another."""
    alias = make_database("postgres")
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": alias}
    with cache_lock("cut", timeout=6) as lock:
        name = settings.DATABASES[alias]["NAME"]
        wait_for(lambda: len(postgres_server.sessions(name)) == 2, 6, "nothing was renewed")
        with postgres_server.connect("postgres") as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s",
                [name],
            )
        trusted_until = time.monotonic() + lock.remaining
        wait_for(
            lambda: time.monotonic() + lock.remaining > trusted_until + 0.5,
            6,
            "the lease was not renewed again",
        )
        connections[alias].close()
        lock.ensure()


def test_a_shorter_lease_is_renewed_in_time(locks_in_memory: None) -> None:
    """A lease that extend() made shorter is renewed by its new length."""
    with cache_lock("shorter", timeout=30) as lock:
        lock.extend(2)
        wait_for_renewal("shorter")
        lock.ensure()


@pytest.mark.quarantine("2026-11-26", "exact number of threads; 1.9 s leases")
@pytest.mark.parametrize("begins", [False, True], ids=["before", "after"])
def test_after_an_interrupted_start_another_thread_renews(
    begins: bool, locks_in_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time limit may hit before or after the thread has begun; one thread remains."""
    start, before = threading.Thread.start, set(renewing_threads())

    def interrupted(thread: threading.Thread) -> None:
        if begins:
            start(thread)
        raise SoftTimeLimitExceeded

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(SoftTimeLimitExceeded):
            cache_lock("first", timeout=1.9).acquire()
    assert find_lock("first") is None
    with cache_lock("second", timeout=1.9) as lock:
        assert lock
        wait_for_renewal("second")
        wait_for(lambda: len(set(renewing_threads()) - before) == 1)


@pytest.mark.parametrize("seconds", [3.9, 60], ids=["the same thread", "another thread"])
def test_a_renewal_under_way_does_not_undo_an_extension(
    seconds: float, locks_in_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """extend() does not wait for it; what the lock shows was true, and the new length lasts."""
    asked, may_go_on, done = threading.Event(), threading.Event(), threading.Event()
    extend = LocalStore.extend

    def late(
        self: LocalStore, renewals: Sequence[Renewal], within: float | None = None
    ) -> list[bool]:
        if threading.current_thread() not in renewing_threads() or asked.is_set():
            return extend(self, renewals)
        sent = [Renewal(each.name, each.token, each.seconds) for each in renewals]
        asked.set()
        assert may_go_on.wait(30)
        outcomes = extend(self, sent, within)
        done.set()
        return outcomes

    def left() -> float:
        found = find_lock("moved")
        assert found is not None
        assert found.remaining is not None
        return found.remaining

    with cache_lock("moved", timeout=2.5) as lock:
        monkeypatch.setattr(LocalStore, "extend", late)
        assert asked.wait(30)
        lock.extend(seconds)
        assert lock.remaining <= 2.5
        may_go_on.set()
        assert done.wait(30)
        wait_for(lambda: lock.remaining > 2.5, 30, "the new length is not trusted")
        assert left() > 2.5


def test_a_request_that_lasts_is_an_answer_though_its_thread_was_replaced(
    locks_in_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many leases, or a slow store, take longer than a thread may hang: the locks stay held."""
    seconds, extend = 6.0, LocalStore.extend

    def last(*request: Any) -> list[bool]:
        time.sleep(seconds * renewing.HANGS_AFTER + 0.2)
        return extend(*request)

    monkeypatch.setattr(LocalStore, "may_hang", True)
    monkeypatch.setattr(LocalStore, "extend", last)
    with cache_lock("slow", timeout=seconds) as lock:
        for _ in range(2):
            wait_for_renewals(lock)


def test_a_lost_lease_is_lost_at_once(
    locks_in_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the store says no, the lock is not held, before anybody asks for its new holder."""
    peek = LocalStore.peek
    asks, may_ask = threading.Event(), threading.Event()

    def late(self: LocalStore, name: str) -> HeldLock | None:
        if threading.current_thread() in renewing_threads():
            asks.set()
            assert may_ask.wait(60)
        return peek(self, name)

    with cache_lock("freed", timeout=12) as lock:
        seen = find_lock("freed")
        assert seen is not None
        assert release_lock(seen)
        monkeypatch.setattr(LocalStore, "peek", late)
        try:
            assert asks.wait(30)
            assert not lock.held
            # The lock is lost because the store said so, and not because its lease expired.
            assert lock.lease is None or lock.lease.lost
        finally:
            may_ask.set()


def test_the_thread_outlives_what_its_receivers_do(locks_in_memory: None) -> None:
    """A receiver of lock_lost that exits takes neither the thread nor other locks along."""

    def leave(**fields: object) -> None:
        raise SystemExit

    lock_lost.connect(leave)
    try:
        # Of one length, so that one thread renews both.
        with cache_lock("other", timeout=2) as other, cache_lock("lost", timeout=2) as lost:
            seen = find_lock("lost")
            assert seen is not None
            assert release_lock(seen)
            wait_for(lambda: not lost.held, 30, "the loss was not noticed")
            wait_for_renewal("other")
            assert other.held
            lock_lost.disconnect(leave)
    finally:
        lock_lost.disconnect(leave)


def test_the_thread_outlives_leases_that_vanish(locks_in_memory: None) -> None:
    """Leases that are dropped while the thread looks at them do it no harm."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    store = locate().store()
    try:
        ends_at = time.monotonic() + 1
        while time.monotonic() < ends_at:
            # The lease of a claim, which is renewed while something refers to it.
            own = Lease(store, "vanishing", "token", 0.3, boottime() - 1, print)
            renewer.add(own)
            del own
    finally:
        sys.setswitchinterval(before)
    with cache_lock("stays", timeout=2) as lock:
        wait_for_renewal("stays")
        assert lock.held


@pytest.mark.parametrize("fails", [False, True], ids=["an answer", "an error"])
def test_a_lease_that_is_removed_while_it_is_renewed_is_not_lost(
    fails: bool, locks_in_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store says that it has no such lock any more, or nothing: its holder wants none."""
    asked, may_go_on = threading.Event(), threading.Event()
    extend = LocalStore.extend

    def hang(
        self: LocalStore, renewals: Sequence[Renewal], within: float | None = None
    ) -> list[bool]:
        asked.set()
        assert may_go_on.wait(60)
        if fails:
            raise LockBackendError("no answer")
        return extend(self, renewals, within)

    monkeypatch.setattr(renewing, "LINGER", 0.05)
    monkeypatch.setattr(renewing, "emit_in_background", lambda *report: told.append(report))
    told: list[Any] = []
    monkeypatch.setattr(LocalStore, "extend", hang)
    before = set(renewing_threads())
    now = boottime()
    lease = Lease(locate().store(), "released", "token", 0.06, now - 1, print)
    renewer.add(lease)
    (thread,) = set(renewing_threads()) - before
    assert asked.wait(30)
    renewer.remove(lease)
    # The thread of an hour's lease may hang for as long; finish() has a transaction open.
    monkeypatch.setattr(renewing, "LONGEST_FINISH", 0.1)
    lease.seconds = 3600.0
    renewer.finish_renewal(lease)
    assert boottime() - now < 50
    may_go_on.set()
    thread.join(30)
    assert not thread.is_alive()
    assert (lease.lost, told) == (False, [])


def test_a_store_that_hangs_holds_up_no_other(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one store does not answer at all, locks elsewhere are renewed."""
    memory = "django.core.cache.backends.locmem.LocMemCache"
    aliases = ["default", "second"]
    settings.CACHES = {alias: {"BACKEND": memory, "LOCATION": alias} for alias in aliases}
    hangs, may_go_on = threading.Event(), threading.Event()
    extend = LocalStore.extend

    def hang(
        self: LocalStore, renewals: Sequence[Renewal], within: float | None = None
    ) -> list[bool]:
        if renewals[0].name == "default":
            hangs.set()
            assert may_go_on.wait(60)
        return extend(self, renewals, within)

    monkeypatch.setattr(LocalStore, "extend", hang)
    with (
        cache_lock("default", timeout=3),
        cache_lock("second", cache="second", timeout=3) as second,
    ):
        try:
            assert hangs.wait(30)
            token = second.token
            wait_for_renewal("second", cache="second")
            wait_for_renewal("second", cache="second")
            assert second.held
            assert second.token == token
        finally:
            may_go_on.set()
