"""Locks that several may hold, in every store that can count them."""

import pickle
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from django_celery_safe import (
    ConfigurationError,
    HeldLock,
    LockBackendError,
    LockLost,
    LockNotAcquired,
    cache_lock,
    iter_locks,
    release_lock,
)
from django_celery_safe.leases.holder import Holder
from django_celery_safe.locks.stores import get_store
from django_celery_safe.locks.stores.base import Acquired, LockRequest
from tests.contract.conftest import params
from tests.locks.renewals import get_lock
from tests.processes import wait_for

UseStore = Callable[[str], None]


@pytest.fixture(params=params("django-redis", "cluster", "database", "local"))
def store(request: pytest.FixtureRequest, use_store: UseStore) -> str:
    """Every store of another kind that counts holders."""
    use_store(request.param)
    return str(request.param)


def names_held() -> set[str]:
    """Return the names of all locks that are held."""
    return {lock.name for lock in iter_locks()}


def take(
    limit: int, task_id: str | None = None, name: str = "few", patience: float | None = None
) -> Any:
    """Try to take a place for a task of this id; return what the store says."""
    holder = Holder("here", 1, task="a.b" if task_id else None, task_id=task_id)
    token = uuid.uuid4().hex
    return get_store().take(LockRequest(name, token, 60, holder, patience, limit))


def test_as_many_as_the_limit_hold_it(store: str) -> None:
    """Each holder has its own place and fence; the next caller learns who holds a place."""
    locks = [cache_lock("few", limit=3) for _ in range(4)]
    assert [lock.acquire() for lock in locks] == [True, True, True, False]
    assert names_held() == {"few", "few:place:2", "few:place:3"}
    assert {lock.limit for lock in iter_locks()} == {3}
    fences = [lock.fence for lock in locks[:3]]
    assert fences == sorted(set(fences))  # type: ignore[type-var]
    assert locks[3].contender.token in {lock.token for lock in locks[:3]}
    for lock in locks[:3]:
        lock.ensure()
    # The place of the second holder is free at once.
    assert locks[1].release() is True
    assert locks[3].acquire() is True
    assert locks[3].fence > max(fences)  # type: ignore[operator, type-var]
    place = get_lock("few:place:2")
    assert place.token == locks[3].token
    locks[3].extend(100)
    # An operator frees one place; its holder learns of that, and the others keep theirs.
    assert release_lock(place) is True
    assert release_lock(place) is False
    with pytest.raises(LockLost):
        locks[3].ensure()
    assert locks[0].release() is True
    assert locks[2].release() is True
    assert names_held() == set()


def test_a_task_takes_one_place(store: str) -> None:
    """A message that is delivered twice meets itself, also where places are free."""
    assert take(limit=1000, task_id="id-1").place == 1
    assert take(limit=3, task_id="id-2").place == 2
    meets = take(limit=3, task_id="id-2")
    assert (meets.name, meets.holder.task_id) == ("few:place:2", "id-2")
    assert take(limit=3).place == 3
    meets = take(limit=1000, task_id="id-1")
    assert (meets.name, meets.holder.task_id) == ("few", "id-1")
    # Only the id of a task counts: not its host, its name, or a text that looks like one.
    for task_id in ("here", "a.b", 'é", 1,"a'):
        assert take(limit=3, name=task_id, task_id="id-1").place == 1
        assert take(limit=3, name=task_id, task_id=task_id).place == 2
        assert take(limit=3, name=task_id, task_id=task_id).holder.task_id == task_id


@pytest.mark.parametrize("store", ["django-redis", "cluster", "local"], indirect=True)
def test_each_release_lets_one_waiter_in(store: str) -> None:
    """Three waiters get as many places as were freed."""
    locks = [cache_lock("few", limit=3) for _ in range(3)]
    waiters = [cache_lock("few", limit=3) for _ in range(3)]
    assert all(lock.acquire() for lock in locks)
    threads = [ThreadPoolExecutor(1) for _ in waiters]
    each = list(zip(threads, waiters, strict=True))
    assert not any(thread.submit(waiter.acquire).result(30) for thread, waiter in each)
    entered = [thread.submit(waiter.acquire, None) for thread, waiter in each]
    assert not any(one.done() for one in entered)
    for number, lock in enumerate(locks, 1):
        assert lock.release()
        wait_for(lambda number=number: sum(one.done() for one in entered) == number)  # type: ignore[misc]
    for thread, waiter in each:
        assert thread.submit(waiter.release).result(30)
        thread.shutdown()
    assert names_held() == set()


def test_the_message_that_meets_itself_is_woken_by_its_own_run(use_store: UseStore) -> None:
    """A retry without delay waits for the end of the run that sent it, and no longer."""
    use_store("django-redis")
    assert isinstance(take(limit=3, task_id="id-1"), Acquired)
    meets = take(limit=3, task_id="id-1", patience=0.0)
    assert isinstance(meets, HeldLock)
    with ThreadPoolExecutor(1) as thread:
        again = thread.submit(take, 3, "id-1", patience=60.0)
        assert release_lock(meets)
        assert isinstance(again.result(30), Acquired)


@pytest.mark.parametrize("store", ["django-redis", "local"], indirect=True)
def test_interrupted_on_the_way_it_leaves_no_place(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An acquisition that a time limit cuts off gives back what it may have, and asks once."""
    assert isinstance(take(limit=3), Acquired)
    there = type(get_store())
    take_place, asked = there.take, list[str]()

    def cut_off(*args: Any) -> None:
        take_place(*args)
        raise KeyboardInterrupt

    def fail(self: Any, name: str, *args: Any, **kwargs: Any) -> None:
        asked.append(name)
        raise LockBackendError("here", "release", "no answer")

    monkeypatch.setattr(there, "take", cut_off)
    with pytest.raises(KeyboardInterrupt):
        cache_lock("few", limit=3).acquire()
    assert names_held() == {"few"}
    # If the store does not answer, it is not asked for each place in turn.
    monkeypatch.setattr(there, "release", fail)
    with pytest.raises(KeyboardInterrupt):
        cache_lock("other", limit=1000).acquire()
    assert asked == ["other"]


@pytest.mark.parametrize("name", ["memcached", "portable"])
def test_other_caches_say_what_they_lack(name: str, use_store: UseStore) -> None:
    """They refuse a lock of several, and hold one of one."""
    use_store(name)
    with pytest.raises(ConfigurationError, match=r"hold a lock with limit=3.*Redis or a database"):
        cache_lock("few", limit=3).acquire()
    with cache_lock("few", limit=1) as lock:
        assert lock


def test_a_limit_that_means_nothing() -> None:
    """A lock with it is refused where it is made."""
    nothing: list[Any] = [0, -1, 1001, 2.0, "3", None, True]
    for limit in nothing:
        with pytest.raises(ConfigurationError, match="whole number from 1 to 1000"):
            cache_lock("few", limit=limit)


def test_the_limit_is_kept_by_copies(locks_in_memory: None) -> None:
    """A pickled lock, and each call of a decorated function, takes one of as many places."""
    lock = cache_lock("few", limit=2)
    copy = pickle.loads(pickle.dumps(lock))
    held: list[set[str]] = []

    @lock
    def guarded() -> None:
        held.append(names_held())

    with copy:
        guarded()
        with lock, pytest.raises(LockNotAcquired):
            guarded()
    assert held == [{"few", "few:place:2"}]
