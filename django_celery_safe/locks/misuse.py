"""Errors for a lock object that is used in the wrong way; each says what to do instead."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import warnings
from collections.abc import Callable
from typing import Any, Final, NoReturn

from ..exceptions import ConfigurationError
from ..leases.holder import Holder
from ..texts import get_logger
from ..usage import calling_line

logger = get_logger(__name__)

#: Advice for using a lock from a coroutine.
IN_A_COROUTINE: Final = (
    "Put the whole `with cache_lock(...) as lock:` block into one function without async, and call "
    "that by `await asgiref.sync.sync_to_async(function)()`."
)


def not_a_name(name: object) -> ConfigurationError:
    """Return the error for a lock name that is not a str, or is empty."""
    return ConfigurationError(
        f"{name!r} is not a valid name for a lock: give a non-empty str. All locks with one name "
        f"in one cache exclude each other."
    )


def held_already(name: str) -> ConfigurationError:
    """Return the error for acquiring a lock again through the object that holds it."""
    return ConfigurationError(
        f"The lock {name!r} is held by this very object already; it is not reentrant. Release it "
        f"first, or make another cache_lock for another owner."
    )


def held_by_this_thread(name: str) -> ConfigurationError:
    """Return the error for waiting without end for a lock that the waiting thread holds itself."""
    return ConfigurationError(
        f"The lock {name!r} is held by this very thread, {threading.current_thread().name!r}, "
        f"through another object, so waiting for it would never end: locks are not reentrant. "
        f"Take it once, in the outermost function that needs it."
    )


def used_elsewhere(name: str) -> ConfigurationError:
    """Return the error for acquiring a lock through an object that another thread is using."""
    return ConfigurationError(
        f"The lock {name!r} is being used by another thread than this one, "
        f"{threading.current_thread().name!r}, through this very object, which is not reentrant. "
        f"Make another cache_lock in each thread."
    )


def of_another_process(name: str, pid: int) -> ConfigurationError:
    """Return the error for using a lock that was acquired before this process was forked."""
    return ConfigurationError(
        f"The lock {name!r} was acquired by process {pid}, this is process {os.getpid()}: a lock "
        f"does not come along in a fork; acquire it here."
    )


def of_another_thread(name: str) -> ConfigurationError:
    """Return the error for using a lock that another thread acquired."""
    return ConfigurationError(
        f"The lock {name!r} was acquired by another thread; this is "
        f"{threading.current_thread().name!r}. Only the thread that took a lock knows when its "
        f"work is done. Make another cache_lock here."
    )


class NotAsync:
    """A context manager that refuses ``async with``."""

    name: str

    def __aenter__(self) -> NoReturn:
        raise ConfigurationError(
            f"The lock {self.name!r} has no `async with`: it is acquired and released by calls "
            f"that block. {IN_A_COROUTINE}"
        )

    async def __aexit__(self, *error: object) -> None:
        """Exist: without it, ``async with`` would fail before ``__aenter__`` is called."""


def warn_not_asked(name: str, holder: Holder) -> None:
    """Warn, at the line of its ``with``, about a block that ran while another held the lock."""
    warnings.warn(
        f"A block ran without the lock {name!r}, which {holder} held, and did "
        f"not ask. Write: with cache_lock(...) as lock: if lock: ...",
        RuntimeWarning,
        stacklevel=3,
    )


#: The places that a warning has named, each once in a process.
_warned: set[str] = set()


def warn_in_atomic(name: str, alias: str, function: Callable[..., Any] | None) -> None:
    """
    Log, once for each place, that a lock ends before the transaction around it commits.

    Args:
        function: The decorated function that the lock guards; None: a block.
    """
    place = calling_line()
    code = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
    if code is not None:
        place = f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"
    if place not in _warned:
        _warned.add(place)
        logger.warning(
            "The lock %r was released inside atomic() of %r, by %s: it was free before the commit, "
            "so the next holder may have read what this one had not committed yet. Take the lock "
            "first: `with cache_lock(...) as lock:` around `with transaction.atomic():`, and "
            "@transaction.atomic below @single_instance or @cache_lock.",
            name,
            alias,
            place,
        )


def refuse_question(name: str) -> None:
    """
    Refuse to say, in a coroutine, whether a lock that its helper thread acquired is held.

    Raises:
        ConfigurationError: An event loop runs in this thread.
    """
    if runs_event_loop():
        raise ConfigurationError(
            f"The lock {name!r} was acquired by another thread than that of this event loop, as "
            f"by `await sync_to_async(lock.acquire)()`, and belongs to that thread: whether it is "
            f"held can't be asked here. {IN_A_COROUTINE}"
        )


def runs_event_loop() -> bool:
    """Return whether this code runs in a coroutine, whose event loop must not be blocked."""
    # Asked first, because an error costs more than all other checks of an acquisition.
    if asyncio._get_running_loop() is None:
        return False
    # With gevent, all greenlets of the thread share that loop.
    return asyncio.current_task() is not None and not os.environ.get("DJANGO_ALLOW_ASYNC_UNSAFE")


def refuse_event_loop(name: str, action: str) -> None:
    """
    Refuse to block the event loop that runs in this thread, as Django's database calls do.

    Raises:
        ConfigurationError: An event loop runs, and ``DJANGO_ALLOW_ASYNC_UNSAFE`` is not set.
    """
    if not runs_event_loop():
        return
    raise ConfigurationError(
        f"An event loop runs in this thread, so it can't {action} the lock {name!r}: a call that "
        f"blocks would hold up every coroutine, and a lock belongs to the thread that took it. "
        f"{IN_A_COROUTINE} In a notebook, set DJANGO_ALLOW_ASYNC_UNSAFE=true, as for Django's ORM."
    )
