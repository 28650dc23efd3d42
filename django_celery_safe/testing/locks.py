"""Locks in memory, and locks that someone else holds."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from django.conf import settings
from django.test import override_settings

from .. import conf
from ..concurrency.guard import find_guarded, name_lock
from ..leases.holder import Holder
from ..leases.renewer import renewer
from ..locks import CacheLock
from ..locks.stores import local
from .messages import check_task, shown

#: Alias of the cache that :func:`locks_in_memory` adds.
MEMORY: Final = "django_celery_safe_testing"


@contextmanager
def locks_in_memory() -> Iterator[None]:
    """
    Keep locks in this process's memory, and begin and end with none held.

    Whatever ``LOCK_CACHE`` and ``LOCK_DATABASE`` say is left alone meanwhile.
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
    # First, so that no lock that a test did not release is reported as lost.
    renewer.forget(local.LocalStore)
    local.clear()


def lock_name(task: Any, /, *args: Any, **kwargs: Any) -> str:
    """
    Return the name of the lock under which a single-instance task runs with these arguments.

    Raises:
        ConfigurationError: The task has no ``@single_instance``, and so no lock.
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
    Let someone else hold a lock during the block.

    It is held where the tested code looks for it, under a token of its own, and renewed.

    Args:
        of: The name of the lock; or a single-instance task, whose lock for the arguments
            that follow is held.
        args, kwargs: The task's. After a name there is only ``cache``, the alias of the cache
            that holds the lock, for a lock that has one of its own.
        task_id: Id of the task that holds it. A message with this id is not skipped, since
            it may be the holder's own: it comes back. None: for a task's lock that of another
            run, made up; for a name, no task.

    Returns:
        The lock; its ``release()`` frees it before the block ends.

    Raises:
        LockNotAcquired: Someone holds it already.
        ConfigurationError: The task has no ``@single_instance``.
    """
    with _find_lock(of, args, kwargs, task_id) as lock:
        if not lock:
            raise lock.not_acquired()
        yield lock


class _SomeoneElses(CacheLock):
    """A lock whose holder is said to be another task."""

    def __init__(
        self, name: str, cache: str | conf.Unset, task: str | None, task_id: str | None
    ) -> None:
        super().__init__(name, cache=cache)
        self._task, self._task_id = task, task_id

    def _describe_holder(self, *args: Any) -> Holder:
        return super()._describe_holder(*args)._replace(task=self._task, task_id=self._task_id)


def _find_lock(
    of: Any, args: tuple[Any, ...], kwargs: dict[str, Any], task_id: str | None
) -> CacheLock:
    if not isinstance(of, str):
        name = lock_name(of, *args, **kwargs)
        guarded = find_guarded(_resolved(of))
        cache = conf.UNSET if guarded is None else guarded.options.cache
        holder = str(uuid.uuid4()) if task_id is None else task_id
        return _SomeoneElses(name, cache, of.name, holder)
    cache = kwargs.pop("cache", conf.UNSET)
    if args or kwargs:
        raise TypeError(
            f"hold_lock({of!r}) got {shown('', args, kwargs)} beside the name of a lock. For the "
            f"lock of a task pass the task itself: hold_lock(import_feed, ...)."
        )
    return _SomeoneElses(of, cache, None, task_id)


def _resolved(task: Any) -> Any:
    return getattr(task, "_get_current_object", lambda: task)()
