"""Keeping locks in memory, and holding locks as another task would."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from django.conf import settings
from django.test import override_settings

from .. import conf
from ..concurrency.guard import find_guarded, name_lock
from ..leases.holder import Holder
from ..leases.renewer import renewer
from ..locks import CacheLock
from ..locks.lock import LockOptions
from ..locks.stores import local
from .messages import check_task, shown

#: Alias of the cache that :func:`locks_in_memory` adds.
MEMORY: Final = "django_celery_safe_testing"


@contextmanager
def locks_in_memory() -> Iterator[None]:
    """
    Keep locks in this process's memory, and clear them before and after the block.

    Inside the block, ``LOCK_CACHE`` and ``LOCK_DATABASE`` are not used.
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


def lock_name(task: Any, /, *args: Any, **kwargs: Any) -> str:
    """
    Return the name of the lock under which a single-instance task runs with these arguments.

    Raises:
        ConfigurationError: The task has no ``@single_instance``, so it has no lock.
        TypeError: The arguments don't fit the task.
    """
    check_task(task, "lock_name")
    try:
        return name_lock(_resolved(task), args, kwargs)
    except TypeError as error:
        raise TypeError(f"{shown(task.name, args, kwargs)} has no lock: {error}.") from None


@contextmanager
def hold_lock(
    of: Any, /, *args: Any, task_id: str | None = None, **kwargs: Any
) -> Iterator[CacheLock]:
    """
    Hold a lock during the block, as another task or process would.

    The lock is held in the store where the tested code looks for it, under a separate token,
    and is renewed. If the lock has a ``limit``, all of its places are held, so the tested code
    always finds it taken.

    Args:
        of: The name of the lock; or a single-instance task, to hold its lock for the arguments
            that follow.
        args, kwargs: The task's arguments. After a name, only ``cache`` (the alias of the cache
            that holds the lock, if the lock has its own) and ``limit`` (if several may hold the
            lock) are allowed.
        task_id: Id of the task that holds the lock. A message with this id is not skipped,
            because it may be the holder's own message: it is re-sent for later. None: for a
            task's lock, a made-up id of another run; for a name, no task.

    Returns:
        The lock. Its ``release()`` frees the lock, or its first place, before the block ends.

    Raises:
        LockNotAcquired: The lock, or one of its places, is already held.
        ConfigurationError: The task has no ``@single_instance``.
    """
    with ExitStack() as stack:
        locks = [stack.enter_context(lock) for lock in _make_locks(of, args, kwargs, task_id)]
        for lock in locks:
            if not lock:
                raise lock.not_acquired()
        yield locks[0]


class _SomeoneElses(CacheLock):
    """A lock that names another task as its holder."""

    def __init__(
        self, name: str, cache: str | conf.Unset, limit: int, task: str | None, task_id: str | None
    ) -> None:
        super().__init__(name, LockOptions(cache=cache, limit=limit))
        self._task, self._task_id = task, task_id

    def _describe_holder(self, *args: Any) -> Holder:
        return super()._describe_holder(*args)._replace(task=self._task, task_id=self._task_id)


def _make_locks(
    of: Any, args: tuple[Any, ...], kwargs: dict[str, Any], task_id: str | None
) -> list[CacheLock]:
    """Return a lock for each place; ``task_id`` holds the first place."""
    if not isinstance(of, str):
        name = lock_name(of, *args, **kwargs)
        guarded = find_guarded(_resolved(of))
        assert guarded is not None  # lock_name has found it
        # A task id can have only one place.
        others = [str(uuid.uuid4()) for _ in range(guarded.options.limit)]
        ids = others if task_id is None else [task_id, *others[1:]]
        where = guarded.options.cache, guarded.options.limit
        return [_SomeoneElses(name, *where, of.name, each) for each in ids]
    cache, limit = kwargs.pop("cache", conf.UNSET), conf.lock_limit(kwargs.pop("limit", 1))
    if args or kwargs:
        raise TypeError(
            f"hold_lock({of!r}) got {shown('', args, kwargs)} beside the name of a lock. For the "
            f"lock of a task pass the task itself: hold_lock(import_feed, ...)."
        )
    first = _SomeoneElses(of, cache, limit, None, task_id)
    return [first, *(_SomeoneElses(of, cache, limit, None, None) for _ in range(1, limit))]


def _resolved(task: Any) -> Any:
    return getattr(task, "_get_current_object", lambda: task)()
