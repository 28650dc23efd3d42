"""
Locks in this process's own memory, for tests and for single-process use.

Chosen when the lock cache is LocMemCache. The locks are kept outside that cache,
because LocMemCache drops entries at random once it is full.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import ClassVar

from billiard import current_process
from django.conf import settings

from ...exceptions import ConfigurationError
from ...leases.holder import HeldLock, place_names
from ...leases.lease import Renewals, clock
from .base import Acquired, LockRequest, Store, choose_place


class _Memory:
    """The locks of one LocMemCache location, each with the time at which its lease ends."""

    def __init__(self) -> None:
        self.mutex = threading.Lock()
        self.locks: dict[str, tuple[HeldLock, float]] = {}
        self.fence = 0

    def put(self, lock: HeldLock, seconds: float) -> None:
        self.locks[lock.name] = lock, clock.now() + seconds

    def find(self, name: str, token: str | None = None) -> HeldLock | None:
        """Return the lock if it is held (if a token is passed: by that token); otherwise None."""
        lock, ends_at = self.locks.get(name, (HeldLock(name), 0.0))
        left = ends_at - clock.now()
        if left <= 0:
            self.locks.pop(name, None)
            return None
        return lock._replace(remaining=left) if token in (None, lock.token) else None


#: One memory for each LOCATION, as LocMemCache itself has.
_memories: dict[str, _Memory] = {}


def clear() -> None:
    """Delete every lock in this process's memory."""
    for memory in _memories.values():
        with memory.mutex:
            memory.locks.clear()


# A forked child does not own its parent's locks, and would wait for ever for a mutex that
# another thread of the parent held.
os.register_at_fork(after_in_child=_memories.clear)


class LocalStore(Store):
    """Locks that only the threads of this process see."""

    shared: ClassVar[bool] = False
    limits: ClassVar[bool] = True
    may_hang: ClassVar[bool] = False

    def __init__(self, alias: str, cache: object) -> None:
        self.where = f'CACHES["{alias}"] (LocMemCache)'
        location = str(settings.CACHES[alias].get("LOCATION", ""))
        # setdefault is atomic, so two threads get the same memory.
        self._memory = _memories.setdefault(location, _Memory())

    def take(self, request: LockRequest) -> Acquired | HeldLock:
        if current_process().daemon:
            raise ConfigurationError(
                f"{self.where} can't hold locks: this is a process of a worker's pool, and each "
                f"has a memory of its own. Use Redis, or set LOCK_DATABASE, or run the worker with "
                f"--pool=threads."
            )
        memory = self._memory
        with memory.mutex:
            _, token, seconds, holder, _, limit, _ = request
            name, place = request.name, 1
            if limit > 1 or memory.find(name) is not None:
                names = place_names(name, limit)
                chosen = choose_place(list(map(memory.find, names)), request)
                if not isinstance(chosen, int):
                    return chosen
                name, place = names[chosen - 1], chosen
            memory.fence = max(memory.fence + 1, time.time_ns() // 1000)
            memory.put(HeldLock(name, token, None, memory.fence, holder, limit), seconds)
            return Acquired(memory.fence, place)

    def release(self, name: str, token: str, remaining: float | None = None) -> bool:
        with self._memory.mutex:
            return bool(self._memory.find(name, token) and self._memory.locks.pop(name))

    def extend(self, renewals: Renewals, within: float | None = None) -> list[bool]:
        with self._memory.mutex:
            held = [self._memory.find(name, token) for name, token, _ in renewals]
            for lock, (_, _, seconds) in zip(held, renewals, strict=True):
                if lock is not None:
                    self._memory.put(lock, seconds)
        return [lock is not None for lock in held]

    def peek(self, name: str) -> HeldLock | None:
        with self._memory.mutex:
            return self._memory.find(name)

    def iter_locks(self) -> Iterator[HeldLock]:
        with self._memory.mutex:
            locks = [self._memory.find(name) for name in list(self._memory.locks)]
        yield from filter(None, locks)
