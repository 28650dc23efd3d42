"""Locks that several may hold, in every store that can count them."""

import pickle
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.db import connections

from django_celery_safe import (
    BackendNotSupported,
    CacheLock,
    ConfigurationError,
    HeldLock,
    LockBackendError,
    LockLost,
    LockNotAcquired,
    cache_lock,
    find_lock,
    iter_locks,
    release_lock,
)
from django_celery_safe.leases.holder import Holder
from django_celery_safe.locks.stores import locate
from django_celery_safe.locks.stores.base import Acquired
from tests.contract.cases import race_for_places
from tests.kinds import LATER_MARIADB
from tests.processes import Gauge, run_in_processes

STORES = ["django-redis", "cluster", "postgres", LATER_MARIADB, "sqlite", "local"]


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, use_store: Callable[[str], None]) -> str:
    """Every store of another kind that counts holders."""
    use_store(request.param)
    return str(request.param)


def names_held() -> set[str]:
    """Return the names of all locks that are held."""
    return {lock.name for lock in iter_locks()}


def take(limit: int, task_id: str | None = None, name: str = "few") -> Any:
    """Try to take a place for a task of this id; return what the store says."""
    holder = Holder("here", 1, task="a.b" if task_id else None, task_id=task_id)
    return locate().store().acquire(name, uuid.uuid4().hex, 60, holder, limit=limit)


def test_as_many_as_the_limit_hold_it(store: str) -> None:
    """Each holder has its own place and fence; the next caller learns who holds a place."""
    locks = [cache_lock("few", limit=3) for _ in range(4)]
    assert [lock.acquire() for lock in locks] == [True, True, True, False]
    assert names_held() == {"few", "few:place:2", "few:place:3"}
    assert {lock.limit for lock in iter_locks()} == {3}
    fences = [lock.fence for lock in locks[:3]]
    assert fences == sorted(set(fences))  # type: ignore[type-var]
    contender = locks[3].contender
    assert contender is not None
    assert contender.token in {lock.token for lock in locks[:3]}
    for lock in locks[:3]:
        lock.ensure()
    # The place of the second holder is free at once.
    assert locks[1].release() is True
    assert locks[3].acquire() is True
    assert locks[3].fence > max(fences)  # type: ignore[operator, type-var]
    assert find_lock("few:place:2").token == locks[3].token  # type: ignore[union-attr]
    locks[3].extend(100)
    for lock in (locks[0], locks[2], locks[3]):
        assert lock.release() is True
    assert names_held() == set()


def test_an_operator_frees_one_place(store: str) -> None:
    """Its holder learns of that, and the others keep theirs."""
    first, second = (cache_lock("few", limit=2) for _ in range(2))
    assert first.acquire()
    assert second.acquire()
    place = find_lock("few:place:2")
    assert place is not None
    assert release_lock(place) is True
    first.ensure()
    with pytest.raises(LockLost):
        second.ensure()
    assert release_lock(place) is False
    assert first.release() is True


def test_the_limit_of_an_acquisition_is_its_own(store: str) -> None:
    """Where releases differ, each counts as far as its own limit goes."""
    assert isinstance(take(limit=1), Acquired)
    second = take(limit=3)
    assert second == Acquired(find_lock("few:place:2").fence, 2)  # type: ignore[union-attr]
    assert not isinstance(take(limit=1), Acquired)
    assert not isinstance(take(limit=2), Acquired)
    assert take(limit=3).place == 3
    assert not isinstance(take(limit=3), Acquired)
    assert take(limit=4).place == 4


def test_a_task_takes_one_place(store: str) -> None:
    """A message that is delivered twice meets itself, also where places are free."""
    assert take(limit=3, task_id="id-1").place == 1
    assert take(limit=3, task_id="id-2").place == 2
    meets = take(limit=3, task_id="id-2")
    assert (meets.name, meets.holder.task_id) == ("few:place:2", "id-2")
    assert take(limit=3).place == 3
    meets = take(limit=3, task_id="id-1")
    assert (meets.name, meets.holder.task_id) == ("few", "id-1")


@pytest.mark.parametrize("task_id", ["here", "a.b", 'é", 1,"a'])
def test_only_the_id_of_a_task_is_its_own(store: str, task_id: str) -> None:
    """A task takes another place than one whose host or name is called like its id."""
    assert take(limit=3, task_id="id-1").place == 1
    assert take(limit=3, task_id=task_id).place == 2
    assert take(limit=3, task_id=task_id).holder.task_id == task_id


def test_the_message_that_meets_itself_is_woken_by_its_own_run(
    use_store: Callable[[str], None],
) -> None:
    """A retry without delay waits for the end of the run that sent it, and no longer."""
    use_store("django-redis")
    there, token, holder = locate().store(), uuid.uuid4().hex, Holder("here", 1, task_id="id-1")
    assert isinstance(there.acquire("few", token, 60, holder, limit=3), Acquired)
    began = time.monotonic()
    meets = there.acquire("few", uuid.uuid4().hex, 60, holder, patience=0.0, limit=3)
    assert isinstance(meets, HeldLock)
    assert there.release("few", token)
    again = there.acquire("few", uuid.uuid4().hex, 60, holder, patience=60.0, limit=3)
    assert isinstance(again, Acquired)
    assert time.monotonic() - began < 30


def test_the_place_whose_lease_ends_first_is_told(store: str) -> None:
    """A waiter knows by that when a place may be free at the latest."""
    leases = {"few": 50.0, "few:place:2": 20.0, "few:place:3": 80.0}
    for name, lease in leases.items():
        locate().store().acquire(name, uuid.uuid4().hex, lease, Holder("here", 1))
    lock = cache_lock("few", limit=3)
    assert not lock.acquire()
    assert lock.contender is not None
    assert lock.contender.name == "few:place:2"


@pytest.mark.quarantine("2026-11-26", "sleep of 0.5 s; nobody in 0.2 s")
def test_each_release_lets_one_waiter_in(store: str) -> None:
    """Three waiters get as many places as were freed, and soon."""
    locks = [cache_lock("few", limit=3) for _ in range(3)]
    assert all(lock.acquire() for lock in locks)
    entered, leave = threading.Semaphore(0), threading.Event()

    def wait() -> None:
        with cache_lock("few", limit=3, blocking_timeout=30) as lock:
            assert lock
            entered.release()
            leave.wait(30)
        connections.close_all()

    waiters = [threading.Thread(target=wait) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    time.sleep(0.5)
    assert not entered.acquire(blocking=False)
    for lock in locks[:2]:
        lock.release()
    assert entered.acquire(timeout=10)
    assert entered.acquire(timeout=10)
    assert not entered.acquire(timeout=0.2)
    leave.set()
    locks[2].release()
    assert entered.acquire(timeout=10)
    for waiter in waiters:
        waiter.join(30)
    assert names_held() == set()


@pytest.mark.quarantine("2026-11-26", "woken within 0.55 s")
@pytest.mark.parametrize("limit", [1, 3])
@pytest.mark.parametrize(
    "name", ["geo:place:17", "geo:place:2", ":place:3", "x" * 175, "é :place:2"]
)
def test_any_name_will_do(store: str, name: str, limit: int) -> None:
    """A lock whose name ends like that of a place, or is long, is a lock as any other."""
    locks = [cache_lock(name, limit=limit) for _ in range(limit)]
    for lock in locks:
        assert lock.acquire()
    for lock in locks:
        lock.ensure()
    for _ in range(8):
        took = _time_until_taken(locks.pop(), name, limit)
        # Without being woken, the waiter would ask again after 0.6 s at the earliest. A busy
        # machine may delay a woken waiter too, but not eight times in a row.
        if is_woken := took < 0.55 or not locate().store().wakes:
            break
        locks.append(cache_lock(name, limit=limit))
        assert locks[-1].acquire()
    assert is_woken
    assert [lock.release() for lock in locks] == [True] * (limit - 1)
    assert names_held() == set()


def _time_until_taken(lock: CacheLock, name: str, limit: int) -> float:
    """Release a lock; return the seconds until another thread has taken and released it."""
    waiter = threading.Thread(target=_take_and_release, args=(name, limit))
    waiter.start()
    time.sleep(0.1)
    released_at = time.monotonic()
    assert lock.release() is True
    waiter.join(30)
    assert not waiter.is_alive()
    return time.monotonic() - released_at


def _take_and_release(name: str, limit: int) -> None:
    with cache_lock(name, limit=limit, blocking_timeout=30) as lock:
        assert lock
    connections.close_all()


def test_the_highest_limit(store: str) -> None:
    """A thousand places are looked at in one step."""
    assert [take(limit=1000).place for _ in range(3)] == [1, 2, 3]
    assert take(limit=1000, task_id="id-1").place == 4
    assert take(limit=1000, task_id="id-1").name == "few:place:4"


@pytest.mark.parametrize("store", STORES[:-1], indirect=True)
def test_never_more_of_many_processes(store: str, tmp_path: Path) -> None:
    """At most 3 of 6 processes are inside that take and free places as fast as they can."""
    gauge = Gauge(tmp_path / "gauge")
    run_in_processes(race_for_places, 6, gauge, 10)
    assert gauge.entered() == 6 * 10
    assert gauge.highest() <= 3
    assert names_held() == set()


def test_interrupted_on_the_way_it_leaves_no_place(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An acquisition whose answer a soft time limit cuts off gives back what it may have."""
    assert isinstance(take(limit=3), Acquired)
    there = locate().store()
    take_place = type(there).take

    def cut_off(*args: Any) -> None:
        take_place(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(type(there), "take", cut_off)
        with pytest.raises(KeyboardInterrupt):
            cache_lock("few", limit=3).acquire()
    assert names_held() == {"few"}


def test_a_store_that_does_not_answer_is_asked_once(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted acquisition does not wait for the timeout of each place in turn."""
    there, asked = type(locate().store()), []

    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    def fail(self: Any, name: str, *args: Any, **kwargs: Any) -> None:
        asked.append(name)
        raise LockBackendError("here", "release", "no answer")

    monkeypatch.setattr(there, "take", interrupt)
    monkeypatch.setattr(there, "release", fail)
    with pytest.raises(KeyboardInterrupt):
        cache_lock("few", limit=1000).acquire()
    assert asked == ["few"]


@pytest.mark.parametrize("name", ["memcached", "portable"])
def test_other_caches_say_what_they_lack(name: str, use_store: Callable[[str], None]) -> None:
    """They refuse a lock of several, and hold one of one."""
    use_store(name)
    with pytest.raises(BackendNotSupported, match=r"hold a lock with limit=3.*Redis or a database"):
        cache_lock("few", limit=3).acquire()
    with cache_lock("few", limit=1) as lock:
        assert lock


@pytest.mark.parametrize("limit", [0, -1, 1001, 2.0, "3", None, True])
def test_a_limit_that_means_nothing(limit: Any) -> None:
    """A lock with it is refused where it is made."""
    with pytest.raises(ConfigurationError, match="whole number from 1 to 1000"):
        cache_lock("few", limit=limit)


def test_the_limit_is_kept_by_copies(store: str) -> None:
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
