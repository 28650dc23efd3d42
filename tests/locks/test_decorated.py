"""The callables that the decorator guards, and its errors for the others."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from celery import Celery

from django_celery_safe import ConfigurationError, cache_lock, find_lock

pytestmark = pytest.mark.usefixtures("locks_in_memory")

app = Celery(set_as_current=False)


async def coroutine(value: int = 0) -> int:
    """Return the value, some time."""
    return value


async def async_generator(value: int = 0) -> AsyncIterator[int]:
    """Yield the value, some time."""
    yield value


def generator(value: int = 0) -> Iterator[int]:
    """Yield the value."""
    yield value


def plain(value: int = 0) -> int:
    """Return the value, under the lock."""
    assert find_lock("guarded") is not None
    return value


class Asynchronous:
    """Objects that are called, and return before their work is done."""

    async def __call__(self) -> None:
        """Do nothing."""

    @classmethod
    async def method(cls) -> None:
        """Do nothing."""


@app.task(shared=False)
def task() -> None:
    """Do nothing."""


IN_SYNC = "function without async"
INSIDE = "Write `with cache_lock"

REFUSED: dict[str, tuple[Any, str]] = {
    "coroutine function": (coroutine, IN_SYNC),
    "async generator function": (async_generator, IN_SYNC),
    "generator function": (generator, INSIDE),
    "partial of a coroutine function": (functools.partial(coroutine, 1), IN_SYNC),
    "bound method": (Asynchronous.method, IN_SYNC),
    "callable object": (Asynchronous(), IN_SYNC),
    "sync_to_async": (sync_to_async(plain), IN_SYNC),
    "class": (dict, "Decorate the methods"),
    "staticmethod": (staticmethod(plain), "below @staticmethod"),
    "classmethod": (classmethod(plain), "below @classmethod"),
    "property": (property(plain), "below @property"),
    "task": (task, "below the task's decorator"),
    "no callable": (42, "Decorate a function"),
}


def test_what_a_call_does_not_do_is_refused() -> None:
    """Work that outlasts its call is refused, with the way that works."""
    for function, instead in REFUSED.values():
        with pytest.raises(ConfigurationError, match=f"cache_lock can't decorate .*{instead}"):
            cache_lock("guarded")(function)


GUARDED: dict[str, Callable[..., int]] = {
    "function": plain,
    "partial": functools.partial(plain, 1),
    "lambda": lambda: plain(1),
    "async_to_sync": async_to_sync(coroutine),
}


def test_what_a_call_does_is_guarded() -> None:
    """Work that is done when the call returns is guarded."""
    for function in GUARDED.values():
        assert cache_lock("guarded")(function)() in (0, 1)


LATE: dict[str, Callable[[], object]] = {
    "coroutine": lambda: coroutine(),
    "generator": lambda: generator(),
    "async generator": lambda: async_generator(),
    "context manager": contextlib.contextmanager(generator),
    "async context manager": contextlib.asynccontextmanager(async_generator),
}


def test_work_that_has_yet_to_be_done_is_refused() -> None:
    """A function that returns what would do its work after the release is refused at the call."""
    for function in LATE.values():
        with pytest.raises(ConfigurationError, match="would be done after the lock is released"):
            cache_lock("guarded")(function)()
        assert find_lock("guarded") is None


def test_work_on_the_way_is_refused() -> None:
    """A function that returns a future is refused, too, where it may lock at all."""

    def begin() -> object:
        loop = asyncio.new_event_loop()
        try:
            return loop.create_future()
        finally:
            loop.close()

    with pytest.raises(ConfigurationError, match="returned a Future"):
        cache_lock("guarded")(begin)()
