"""Errors for a lock object that is used where it can't be, which say what to do instead."""

from __future__ import annotations

import asyncio
import os
import threading
import warnings
from typing import Final, NoReturn

from ..exceptions import ConfigurationError, LockError
from ..leases.holder import Holder

#: The way to use a lock from a coroutine.
IN_A_COROUTINE: Final = (
    "Put the whole `with cache_lock(...) as lock:` block into one function without async, and call "
    "that by `await asgiref.sync.sync_to_async(function)()`."
)


def not_a_name(name: object) -> ConfigurationError:
    """Return the error of a lock whose name is not a text, or is empty."""
    return ConfigurationError(
        f"{name!r} is not a valid name for a lock: give a non-empty str. All locks with one name "
        f"in one cache exclude each other."
    )


def held_already(name: str) -> LockError:
    """Return the error of an object that holds the lock, and is to acquire it again."""
    return LockError(
        f"The lock {name!r} is held by this very object already; it is not reentrant. Release it "
        f"first, or make another cache_lock for another owner."
    )


def used_elsewhere(name: str) -> LockError:
    """Return the error of an object that another thread uses, and this one is to acquire."""
    return LockError(
        f"The lock {name!r} is being used by another thread than this one, "
        f"{threading.current_thread().name!r}, through this very object, which is not reentrant. "
        f"Make another cache_lock in each thread."
    )


def of_another_process(name: str, pid: int) -> LockError:
    """Return the error of a lock that the process acquired which forked this one."""
    return LockError(
        f"The lock {name!r} was acquired by process {pid}, this is process {os.getpid()}: a lock "
        f"does not come along in a fork; acquire it here."
    )


def of_another_thread(name: str) -> LockError:
    """Return the error of a lock that another thread acquired."""
    return LockError(
        f"The lock {name!r} was acquired by another thread than this one, "
        f"{threading.current_thread().name!r}: only the thread that took a lock knows when its "
        f"work is done. Make another cache_lock here."
    )


class NotAsync:
    """A context manager without ``async with``."""

    name: str

    def __aenter__(self) -> NoReturn:
        raise LockError(
            f"The lock {self.name!r} has no `async with`: it is acquired and released by calls "
            f"that block. {IN_A_COROUTINE}"
        )

    async def __aexit__(self, *error: object) -> None:
        """Be there, since Python looks for it first."""


def warn_not_asked(name: str, holder: Holder) -> None:
    """Warn, with the line of its ``with``, of a block that ran although another holds the lock."""
    warnings.warn(
        f"A block ran without the lock {name!r}, which {holder} held, and did "
        f"not ask. Write: with cache_lock(...) as lock: if lock: ...",
        RuntimeWarning,
        stacklevel=3,
    )


def refuse_question(name: str) -> None:
    """
    Refuse to answer, in a coroutine, whether the lock is held that its helper thread acquired.

    Raises:
        LockError: An event loop runs in this thread.
    """
    if runs_event_loop():
        raise LockError(
            f"The lock {name!r} was acquired by another thread than that of this event loop, as "
            f"by `await sync_to_async(lock.acquire)()`, and belongs to that thread: whether it is "
            f"held can't be asked here. {IN_A_COROUTINE}"
        )


def runs_event_loop() -> bool:
    """Return whether this is a coroutine's code, so that its event loop is not to be blocked."""
    try:
        # Not the running loop: with gevent it is that of all greenlets of the thread.
        task = asyncio.current_task()
    except RuntimeError:
        return False
    return task is not None and not os.environ.get("DJANGO_ALLOW_ASYNC_UNSAFE")


def refuse_event_loop(name: str, action: str) -> None:
    """
    Refuse to block the event loop that runs in this thread, as Django's database calls do.

    Raises:
        LockError: One runs, and ``DJANGO_ALLOW_ASYNC_UNSAFE`` is not set.
    """
    if not runs_event_loop():
        return
    raise LockError(
        f"An event loop runs in this thread, so it can't {action} the lock {name!r}: a call that "
        f"blocks would hold up every coroutine, and a lock belongs to the thread that took it. "
        f"{IN_A_COROUTINE} In a notebook, set DJANGO_ALLOW_ASYNC_UNSAFE=true, as for Django's ORM."
    )
