"""Locks after a soft time limit, an error or a change of settings in between."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from django.core.cache.backends.locmem import LocMemCache
from django.test import override_settings
from pytest_django import Settings

from django_celery_safe import CacheLock, cache_lock, find_lock
from django_celery_safe.leases import renewer
from django_celery_safe.locks import stores
from django_celery_safe.locks.stores import local
from django_celery_safe.locks.stores.base import LockRequest
from django_celery_safe.locks.stores.local import LocalStore
from tests.caches import cache_at
from tests.clock import HeldClock
from tests.locks.renewals import acquired, get_lock, get_remaining
from tests.servers import RedisServer
from tests.statements import raising


class InterruptedCache(LocMemCache):
    """Chooses InterruptedStore."""


class InterruptedStore(LocalStore):
    """Does what it is asked, or does not, and then raises: once for each method named."""

    before: dict[str, BaseException] = {}
    after: dict[str, BaseException] = {}

    def take(self, request: LockRequest) -> Any:
        """Acquire."""
        return self._interrupted("acquire", lambda: LocalStore.take(self, request))

    def release(self, *args: Any, **options: Any) -> Any:
        """Release."""
        return self._interrupted("release", lambda: LocalStore.release(self, *args, **options))

    def extend(self, *args: Any, **options: Any) -> Any:
        """Extend."""
        return self._interrupted("extend", lambda: LocalStore.extend(self, *args, **options))

    def _interrupted(self, name: str, do: Callable[[], Any]) -> Any:
        if (error := self.before.pop(name, None)) is not None:
            raise error
        answer = do()
        if (error := self.after.pop(name, None)) is not None:
            raise error
        return answer


@pytest.fixture
def store(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[InterruptedStore]]:
    """The store in which the locks of this test live."""
    path = f"{__name__}.InterruptedCache"

    monkeypatch.setitem(stores._STORES, path, f"{__name__}.InterruptedStore")
    settings.CACHES = cache_at("interrupted", path)
    settings.DJANGO_CELERY_SAFE = {}
    yield InterruptedStore
    InterruptedStore.before.clear()
    InterruptedStore.after.clear()
    local.clear()


def test_an_interrupted_acquisition_is_given_back(store: type[InterruptedStore]) -> None:
    """A time limit that hits when the store has the lock already leaves it free."""
    store.after["acquire"] = SoftTimeLimitExceeded()
    with pytest.raises(SoftTimeLimitExceeded):
        cache_lock("free").acquire()
    assert find_lock("free") is None


def test_an_interrupted_block_begins_with_nothing_held(
    store: type[InterruptedStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error between the acquisition and the block gives the lock back."""
    acquire = CacheLock.acquire

    def acquire_and_interrupt(lock: CacheLock) -> bool:
        assert acquire(lock)
        raise KeyboardInterrupt

    monkeypatch.setattr(CacheLock, "acquire", acquire_and_interrupt)
    with pytest.raises(KeyboardInterrupt), cache_lock("free"):
        pytest.fail("the block ran")
    assert find_lock("free") is None


def test_an_interrupted_release_is_repeated(store: type[InterruptedStore]) -> None:
    """A time limit that hits before the store got the release does not keep the lock."""
    lock = acquired("free")
    store.before["release"] = SoftTimeLimitExceeded()
    with pytest.raises(SoftTimeLimitExceeded):
        lock.release()
    assert find_lock("free") is None


def test_the_thread_outlives_a_log_filter_that_raises(
    store: type[InterruptedStore], clock: HeldClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where not even the error can be logged, locks are renewed nevertheless."""
    refuse = raising(RuntimeError("no logs today"))
    take_turn, met = renewer.Lane._take_turn, threading.Event()

    def stumble(self: renewer.Lane) -> bool:
        if not met.is_set():
            met.set()
            raise RuntimeError("a fault")
        return take_turn(self)

    renewer.logger.addFilter(refuse)
    try:
        with cache_lock("kept", timeout=30) as lock:
            monkeypatch.setattr(renewer.Lane, "_take_turn", stumble)
            clock.advance(11)
            assert met.is_set()
            clock.advance(100)
            assert lock.held
    finally:
        renewer.logger.removeFilter(refuse)


def test_a_lock_stays_where_it_was_taken(fragile_redis: RedisServer) -> None:
    """Settings that change while a lock is held change nothing for that lock."""
    memory = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}
    lock = acquired("moved", timeout=10)
    with override_settings(CACHES=memory):
        assert find_lock("moved") is None
        lock.ensure()
        lock.extend(60)
    assert get_lock("moved").token == lock.token
    assert get_remaining("moved") > 30
    with override_settings(CACHES=memory):
        assert lock.release()
    assert find_lock("moved") is None
