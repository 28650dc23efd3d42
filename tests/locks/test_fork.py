"""Locks belong to the process and the thread that took them."""

import contextlib
import gc
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from django.core.cache import caches
from django.db import connections

from django_celery_safe import CacheLock, LockNotAcquired, cache_lock, find_lock
from django_celery_safe.leases.renewer import renewer
from django_celery_safe.locks.stores import get_store
from tests.clock import held_clock
from tests.locks.renewals import acquired, get_remaining
from tests.processes import run_in_processes


def test_a_child_leaves_its_parents_lock_alone(in_redis: None) -> None:
    """A child renews its own lock, is refused its parent's, and closes nothing of the parent's."""
    (seen,) = run_in_processes(fork_and_go_on, 1)
    assert seen == {
        "child": [False, 0.0, "renewed its own", "left its parent's to its end"],
        "same token": True,
        "connection open": True,
        "renewed": True,
        "released": True,
    }


def fork_and_go_on() -> dict[str, Any]:
    """Hold a lock beside a child that closes all it can reach; return what is left."""
    with held_clock() as clock:
        lock = acquired("parent's", timeout=30)
        store: Any = get_store()
        connection = store._connections.ask(("CLIENT", "ID"))[0]
        seen: dict[str, Any] = {"child": in_child(lambda: use_and_close(lock))}
        clock.advance(100)
        found = find_lock("parent's")
        seen["same token"] = found is not None and found.token == lock.token
        # Not the one that is used next: a renewal under way may have it just then.
        clients = store._connections.ask(("CLIENT", "LIST"))[0]
        seen["connection open"] = f"id={connection} ".encode() in clients
        seen["renewed"] = lock.held
        seen["released"] = lock.release()
    return seen


def use_and_close(lock: CacheLock) -> list[Any]:
    """In a child: try what its parent's lock does here, and end like a process that cleans up."""
    seen: list[Any] = [lock.held, lock.remaining]
    for of_its_owner in (CacheLock.release, CacheLock.ensure, lambda own: own.extend(60)):
        with pytest.raises(LockNotAcquired):
            of_its_owner(lock)
    before = get_remaining("parent's")
    with held_clock() as clock, cache_lock("child's", timeout=30) as own:
        clock.advance(100)
        seen.append("renewed its own" if own.held else "lost its own")
    seen.append(
        "left its parent's to its end" if get_remaining("parent's") <= before else "renewed it"
    )
    del lock
    caches.close_all()
    connections.close_all()
    gc.collect()
    return seen


def test_a_child_forked_at_any_moment_can_lock(in_redis: None) -> None:
    """The child of a fork can lock, whatever other threads do with leases at that moment."""
    assert run_in_processes(fork_amid_leases, 1) == [["child's"] * 40]


def fork_amid_leases() -> list[str]:
    """Fork again and again while two threads begin and end to renew leases all the time."""
    ended = threading.Event()

    def work(lock: CacheLock) -> None:
        # Not acquire() and release(): Django's caches, and imports, have locks of their
        # own, which are not made anew in a child.
        lease: Any = lock.lease
        while not ended.is_set():
            renewer.remove(lease)
            renewer.add(lease)

    def lock_once() -> str:
        with cache_lock("child's") as lock:
            lock.ensure()
            return lock.name

    assert lock_once() == "child's"
    locks = [acquired(name) for name in ("one", "other")]
    threads = [threading.Thread(target=work, args=(lock,)) for lock in locks]
    # They are stopped wherever they are, within critical sections too.
    sys.setswitchinterval(1e-6)
    for thread in threads:
        thread.start()
    try:
        return [in_child(lock_once) for _ in range(40)]
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def in_child(function: Callable[[], Any]) -> Any:
    """Return what a function returns in a fork of this process; "hung" after a minute."""
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            theirs.send(function())
        os._exit(0)
    theirs.close()
    answer = "hung"
    try:
        if ours.poll(60):
            answer = ours.recv()
        else:
            os.kill(child, 9)
    except EOFError:
        answer = "raised"
    os.waitpid(child, 0)
    return answer
