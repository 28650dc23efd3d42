"""
Locks in this process's own memory, for tests and for single-process use.

Chosen when the lock cache is LocMemCache. The locks are kept beside that cache,
not in it: LocMemCache drops entries at random once it is full.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

from ...exceptions import BackendNotSupported
from .base import Acquired, HeldLock, Holder, Renewable, Store


@dataclass(slots=True)
class _Entry:
    lock: HeldLock
    ends_at: float


class _Memory:
    """The locks of one LocMemCache location."""

    def __init__(self) -> None:
        self.mutex = threading.Lock()
        self.entries: dict[str, _Entry] = {}
        self.fence = 0


#: One memory for each LOCATION, as LocMemCache itself has.
_memories: dict[str, _Memory] = {}

#: Processes of the worker pool that this process belongs to.
_pool_processes = 1


def set_pool_processes(count: int) -> None:
    """Note that this process, or its children, are a worker pool of ``count`` processes."""
    global _pool_processes
    _pool_processes = count


def clear() -> None:
    """Forget every lock in this process's memory."""
    for memory in _memories.values():
        with memory.mutex:
            memory.entries.clear()


# What the parent holds is not the child's, and its mutex may be taken for ever.
os.register_at_fork(after_in_child=_memories.clear)


class LocalStore(Store):
    """Locks that only the threads of this process see."""

    shared: ClassVar[bool] = False

    def __init__(self, alias: str, location: str) -> None:
        self.where = f'CACHES["{alias}"] (LocMemCache)'
        self._location = location

    def acquire(
        self, name: str, token: str, seconds: float, holder: Holder, patience: float | None = None
    ) -> Acquired | HeldLock:
        if _pool_processes > 1:
            raise BackendNotSupported(
                self.where,
                f"this worker pool has {_pool_processes} processes, and each has a memory of its "
                f"own",
                "Use Redis, or set LOCK_DATABASE, or run the worker with --pool=threads or "
                "--concurrency=1.",
            )
        memory = self._memory()
        with memory.mutex:
            now = time.monotonic()
            entry = memory.entries.get(name)
            if entry is not None and entry.ends_at > now:
                held = entry.lock._replace(remaining=entry.ends_at - now)
                return Acquired(held.fence) if held.token == token else held
            memory.fence = fence = max(memory.fence + 1, time.time_ns() // 1000)
            lock = HeldLock(name, token=token, fence=fence, holder=holder)
            memory.entries[name] = _Entry(lock, now + seconds)
            return Acquired(fence)

    def release(self, name: str, token: str, remaining: float | None = None) -> bool:
        memory = self._memory()
        with memory.mutex:
            entry = self._live(memory, name)
            if entry is None or entry.lock.token != token:
                return False
            del memory.entries[name]
            return True

    def extend(self, renewals: Sequence[Renewable], within: float | None = None) -> list[bool]:
        memory = self._memory()
        with memory.mutex:
            return [self._extend(memory, renewal) for renewal in renewals]

    def peek(self, name: str) -> HeldLock | None:
        memory = self._memory()
        with memory.mutex:
            entry = self._live(memory, name)
            if entry is None:
                return None
            return entry.lock._replace(remaining=entry.ends_at - time.monotonic())

    def iter_locks(self) -> Iterator[HeldLock]:
        memory = self._memory()
        with memory.mutex:
            names = list(memory.entries)
        for name in names:
            lock = self.peek(name)
            if lock is not None:
                yield lock

    def errors(self, action: str) -> AbstractContextManager[None]:
        return nullcontext()

    def _memory(self) -> _Memory:
        # setdefault is one step, so two threads get the same memory.
        return _memories.setdefault(self._location, _Memory())

    def _live(self, memory: _Memory, name: str) -> _Entry | None:
        entry = memory.entries.get(name)
        if entry is not None and entry.ends_at <= time.monotonic():
            del memory.entries[name]
            return None
        return entry

    def _extend(self, memory: _Memory, renewal: Renewable) -> bool:
        entry = self._live(memory, renewal.name)
        if entry is None or entry.lock.token != renewal.token:
            return False
        entry.ends_at = time.monotonic() + renewal.seconds
        return True
