"""Keeping locks in memory, and holding the lock of a task as another run would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from django.conf import settings
from django.test import override_settings

from .. import conf
from ..concurrency.guard import find_guarded, name_lock
from ..leases.renewer import renewer
from ..locks import CacheLock, cache_lock
from ..locks.stores import local
from .messages import check_task

#: Alias of the cache that :func:`locks_in_memory` adds.
MEMORY: Final = "django_celery_safe_testing"


@contextmanager
def locks_in_memory() -> Iterator[None]:
    """
    Keep locks in this process's memory, and clear them before and after the block.

    Inside the block, ``LOCK_CACHE`` and ``LOCK_DATABASE`` are not used. The pytest fixture of
    the same name covers a whole test; ``-p no:django_celery_safe`` turns its plugin off.
    """
    backend = {"BACKEND": "django.core.cache.backends.locmem.LocMemCache", "LOCATION": MEMORY}
    ours = {**conf.given(), "LOCK_CACHE": MEMORY, "LOCK_DATABASE": None}
    caches = {**settings.CACHES, MEMORY: backend}
    with override_settings(CACHES=caches, **{conf.NAME: ours}):
        _clear()
        try:
            yield
        finally:
            _clear()


def _clear() -> None:
    # First, so a lock that a test did not release is not reported as lost.
    renewer.forget(local.LocalStore)
    local.clear()


@contextmanager
def hold_lock(task: Any, /, *args: Any, **kwargs: Any) -> Iterator[CacheLock]:
    """
    Hold the lock of a single-instance task during the block, as another run of it would.

    The lock is the one that the task takes when it runs with these arguments. If the task has a
    ``limit``, all of its places are held.

    Returns:
        The lock. Its ``release()`` frees the lock, or its first place, before the block ends.

    Raises:
        LockNotAcquired: The lock, or one of its places, is already held.
        ConfigurationError: The task has no ``@single_instance``, so it has no lock.
        TypeError: It is not a task, or the arguments don't fit it.
    """
    check_task(task, "hold_lock")
    name, guarded = name_lock(task, args, kwargs), find_guarded(task)
    assert guarded is not None  # name_lock has found it
    limit = guarded.options.limit
    with ExitStack() as stack:
        places = [stack.enter_context(cache_lock(name, limit=limit)) for _ in range(limit)]
        for lock in places:
            if not lock:
                raise lock.not_acquired()
        yield places[0]
