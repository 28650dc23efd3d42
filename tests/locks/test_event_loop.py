"""Locks and coroutines: calls that would block the loop, or end before their work, are refused."""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from pytest_django import Settings

from django_celery_safe import CacheLock, ConfigurationError, cache_lock, find_lock
from tests.locks.renewals import acquired

pytestmark = pytest.mark.usefixtures("locks_in_memory")

THE_WAY = (
    r"whole `with cache_lock\(...\) as lock:` block into one function.*sync_to_async\(function"
)


async def in_loop(action: Callable[[], Any]) -> Any:
    """Do something in the thread of an event loop."""
    return action()


ACTIONS: dict[str, Callable[[CacheLock], Any]] = {
    "acquire": CacheLock.acquire,
    "decorated": lambda lock: lock(lambda: None)(),
}
OWNERS: dict[str, Callable[[CacheLock], Any]] = {
    "ensure": CacheLock.ensure,
    "extend": lambda lock: lock.extend(60),
}


@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS)
def test_a_lock_is_not_acquired_in_an_event_loop(action: Callable[[CacheLock], Any]) -> None:
    """Where an event loop runs a lock is refused with the way that works, and nothing is held."""
    with pytest.raises(ConfigurationError, match=THE_WAY):
        asyncio.run(in_loop(lambda: action(cache_lock("async"))))
    assert find_lock("async") is None


@pytest.mark.parametrize("action", OWNERS.values(), ids=OWNERS)
def test_a_held_lock_is_not_asked_for_in_an_event_loop(action: Callable[[CacheLock], Any]) -> None:
    """ensure() and extend() are refused where an event loop runs; release() works and ends it."""
    lock = acquired("async")
    with pytest.raises(ConfigurationError, match=THE_WAY):
        asyncio.run(in_loop(lambda: action(lock)))
    assert lock.held
    assert asyncio.run(in_loop(lock.release)) is True


def test_a_lock_in_a_database_is_not_released_in_an_event_loop(
    settings: Settings, sqlite_alias: str
) -> None:
    """Where Django refuses to ask a database, the lock is held still, and can be released later."""
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": sqlite_alias}
    lock = acquired("async")
    with pytest.raises(ConfigurationError, match=THE_WAY):
        asyncio.run(in_loop(lock.release))
    assert lock.held
    assert lock.release() is True


def test_a_coroutine_is_not_told_that_its_lock_is_free() -> None:
    """In a coroutine `held` of what a helper thread acquired is an error, and not False."""

    async def work() -> None:
        lock = cache_lock("async")
        assert await sync_to_async(lock.acquire)()
        with pytest.raises(ConfigurationError, match=THE_WAY):
            bool(lock)
        assert repr(lock) == "<CacheLock 'async': not held by this thread>"
        assert await sync_to_async(lock.release)()

    asyncio.run(work())


def test_a_notebook_may_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """With DJANGO_ALLOW_ASYNC_UNSAFE, as Django's documentation has it for Jupyter, locks work."""
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "true")
    guarded = cache_lock("async")(lambda: find_lock("async") is not None)
    assert asyncio.run(in_loop(guarded)) is True


def test_another_greenlet_may_lock() -> None:
    """With gevent the thread's running loop is not that of the greenlet that asks for a lock."""

    def look_as_a_greenlet_does() -> None:
        # Between two turns of the loop, where another greenlet would run: no task runs.
        assert asyncio.get_running_loop()
        outcomes.append(cache_lock("elsewhere").acquire())

    async def wait_for_io() -> None:
        asyncio.get_running_loop().call_soon(look_as_a_greenlet_does)
        await asyncio.sleep(0.01)

    outcomes: list[bool] = []
    asyncio.run(wait_for_io())
    assert outcomes == [True]


# Callables that the decorator guards, and its errors for the others.


async def coroutine(value: int = 0) -> int:
    """Return the value, some time."""
    return value


async def async_generator(value: int = 0) -> AsyncIterator[int]:
    """Yield the value, some time."""
    yield value


def generator(value: int = 0) -> Iterator[int]:
    """Yield the value."""
    yield value


class Asynchronous:
    """Objects that are called, and return before their work is done."""

    async def __call__(self) -> None:
        """Do nothing."""


def plain(value: int = 0) -> int:
    """Return the value, under the lock."""
    assert find_lock("guarded") is not None
    return value


LATE = "@cache_lock can't decorate .* returns before its body runs"
NO_FUNCTION = "@cache_lock got .* instead of a function. Put it right above"

REFUSED: dict[str, tuple[Any, str]] = {
    "coroutine function": (coroutine, LATE),
    "async generator function": (async_generator, LATE),
    "generator function": (generator, LATE),
    "callable object": (Asynchronous(), LATE),
    "class": (dict, NO_FUNCTION),
    "staticmethod": (staticmethod(plain), NO_FUNCTION),
    "no callable": (42, NO_FUNCTION),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_call_does_not_do_is_refused(kind: str) -> None:
    """Work that outlasts its call is refused, with what to do instead."""
    function, words = REFUSED[kind]
    error = ConfigurationError if words == LATE else TypeError
    with pytest.raises(error, match=words):
        cache_lock("guarded")(function)


def test_what_a_call_does_is_guarded() -> None:
    """Work that is done when the call returns is guarded."""
    functions: list[Callable[..., int]] = [functools.partial(plain, 1), async_to_sync(coroutine)]
    for function in functions:
        assert cache_lock("guarded")(function)() in (0, 1)
