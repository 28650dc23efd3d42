"""Locks in any other cache: their promises there, and caches that break in some way."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from django.core.cache import caches
from django.core.cache.backends.base import DEFAULT_TIMEOUT, BaseCache
from django.core.cache.backends.locmem import LocMemCache
from pytest_django import Settings

from django_celery_safe import cache_lock, find_lock
from django_celery_safe.exceptions import LockBackendError, LockLost
from django_celery_safe.locks import stores
from django_celery_safe.locks.stores import get_store
from tests.caches import cache_at
from tests.clock import HeldClock
from tests.locks.renewals import acquired, get_lock, stop_renewing, take_lock


class UnknownCache(LocMemCache):
    """A cache that works, and of which the package knows nothing; those below break it."""


stores._STORES[f"{__name__}.UnknownCache"] = stores._PORTABLE


class ForgetfulCache(UnknownCache):
    """Says that it added a value, and keeps none."""

    def add(self, key: str, value: Any, *args: Any, **kwargs: Any) -> bool:
        """Do nothing, with success."""
        return True


class RefusingCache(UnknownCache):
    """Adds nothing, though the key is free: some clients do so when the server is gone."""

    def add(self, key: str, value: Any, *args: Any, **kwargs: Any) -> bool:
        """Do nothing."""
        return False


class RaisingCache(UnknownCache):
    """Raises what it likes in the methods that a test names."""

    raising: ClassVar[set[str]] = set()

    def __getattribute__(self, name: str) -> Any:
        if name in RaisingCache.raising:
            raise RuntimeError(f"{name}() is broken")
        return super().__getattribute__(name)


class LateTouchCache(UnknownCache):
    """Lets someone else take what it touches, as when the lease ends in between."""

    def touch(self, key: str, timeout: Any = DEFAULT_TIMEOUT, version: int | None = None) -> bool:
        """Touch what is someone else's by now."""
        self.set(key, "b" * 32 + '["x","other host",2,1,true,null,null,null,1]', 60, version)
        return super().touch(key, timeout, version)


UseCache = Callable[[type[BaseCache]], None]


@pytest.fixture
def use(settings: Settings) -> Iterator[UseCache]:
    """Let locks live in a cache of this module."""

    def use(cache_class: type[BaseCache]) -> None:
        settings.CACHES = cache_at("unknown", f"{__name__}.{cache_class.__name__}")
        caches["default"].clear()

    yield use
    RaisingCache.raising.clear()


@pytest.fixture
def diskcache(settings: Settings, tmp_path: Path) -> None:
    """Let locks live in a diskcache.DjangoCache."""
    settings.CACHES = cache_at(str(tmp_path / "cache"), "diskcache")


# Promises


@pytest.mark.parametrize(("seconds", "trusted"), [(5.5, 4.5), (60, 59.0)])
def test_a_lease_is_trusted_for_a_second_less(
    seconds: float, trusted: float, diskcache: None, clock: HeldClock
) -> None:
    """The last second of a lease is not trusted, since caches count whole seconds."""
    with cache_lock("trusted", timeout=seconds) as lock:
        assert lock.remaining == trusted
        clock.jump(1)
        assert lock.remaining == trusted - 1
        lock.ensure()
        assert lock.remaining == trusted
        assert get_lock("trusted").remaining is None


def test_a_lock_in_the_end_of_its_lease_is_left_to_end(diskcache: None, clock: HeldClock) -> None:
    """In the last 3 s of a lease a release deletes nothing: it might be someone else's by then."""
    store, token = get_store(), "a" * 32
    for remaining, deleted in ((3.1, True), (None, True), (2.9, False), (0.0, False)):
        take_lock("x", token)
        assert store.release("x", token, remaining) is True
        assert (store.peek("x") is None) is deleted
    with cache_lock("short", timeout=60) as lock:
        stop_renewing(lock)
        clock.advance(57)
    assert find_lock("short") is not None
    assert not cache_lock("short").acquire()


# Caches that break


@pytest.mark.parametrize("broken", [ForgetfulCache, RefusingCache])
def test_a_cache_that_keeps_nothing_is_an_error(broken: type[BaseCache], use: UseCache) -> None:
    """A cache that keeps no value is an error at acquire, neither a lock nor a held one."""
    use(broken)
    lock = cache_lock("x", blocking_timeout=5)
    with pytest.raises(LockBackendError, match=r"acquire.*neither keeps .* nor shows"):
        lock.acquire()
    assert not lock.held


def test_what_a_cache_raises_is_told(use: UseCache) -> None:
    """Any error of a cache becomes the lock's own error, with its text."""
    use(RaisingCache)
    requests: dict[str, tuple[str, Callable[[Any], object]]] = {
        "add": ("acquire", lambda lock: cache_lock("new").acquire()),
        "get": ("extend", lambda lock: lock.ensure()),
        "touch": ("extend", lambda lock: lock.extend(60)),
        "delete": ("release", lambda lock: lock.release()),
    }
    for method, (action, request) in requests.items():
        lock = acquired(f"held {method}")
        RaisingCache.raising.add(method)
        try:
            with pytest.raises(LockBackendError, match=rf"to {action} .*{method}\(\) is broken"):
                request(lock)
        finally:
            RaisingCache.raising.clear()
    with pytest.raises(LockBackendError, match="peek"):
        RaisingCache.raising.add("get")
        find_lock("x")


def test_a_body_keeps_its_result_when_the_cache_breaks(
    use: UseCache, caplog: pytest.LogCaptureFixture
) -> None:
    """A release that raises does not hide what the body did; it is logged."""
    use(RaisingCache)
    with pytest.raises(ZeroDivisionError), cache_lock("x"):
        RaisingCache.raising.add("get")
        raise ZeroDivisionError
    with caplog.at_level(logging.WARNING):
        RaisingCache.raising.clear()
        with cache_lock("y"):
            RaisingCache.raising.add("delete")
    assert "The lock 'y' could not be released or extended and ends by its lease" in caplog.text


def test_an_extension_never_makes_two_trust(use: UseCache) -> None:
    """When the lock becomes someone else's while it is extended, its old holder learns that."""
    use(LateTouchCache)
    with cache_lock("x") as lock:
        with pytest.raises(LockLost, match="other host"):
            lock.ensure()
        assert not lock.held
        assert lock.release() is False
    assert get_lock("x").token == "b" * 32
