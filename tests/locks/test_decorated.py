"""The callables that the decorator guards, and its errors for the others."""

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from asgiref.sync import async_to_sync

from django_celery_safe import ConfigurationError, cache_lock, find_lock

pytestmark = pytest.mark.usefixtures("locks_in_memory")


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


GUARDED: dict[str, Callable[..., int]] = {
    "partial": functools.partial(plain, 1),
    "async_to_sync": async_to_sync(coroutine),
}


def test_what_a_call_does_is_guarded() -> None:
    """Work that is done when the call returns is guarded."""
    for function in GUARDED.values():
        assert cache_lock("guarded")(function)() in (0, 1)
