"""Whose a lock is, and for how long: its thread's, by one object, until that or its task ends."""

import copy
import gc
import logging
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from celery import Celery

from django_celery_safe import CacheLock, ConfigurationError, cache_lock, find_lock, release_lock
from tests.clock import HeldClock
from tests.locks.hanging import hanging
from tests.locks.renewals import get_lock
from tests.processes import wait_for

pytestmark = pytest.mark.usefixtures("locks_in_memory", "clock")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what the threads that renew warned of."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING and record.name.endswith("leases.renewer")
    ]


# One object


def test_a_block_that_is_refused_leaves_the_lock_of_another_thread_alone() -> None:
    """A `with` that fails since another thread holds the lock by this object frees nothing."""
    lock = cache_lock("shared")
    with ThreadPoolExecutor(1) as other, lock:
        with pytest.raises(
            ConfigurationError, match=r"another thread.*Make another cache_lock in each"
        ):
            other.submit(lock.__enter__).result()
        assert lock.held
        assert cache_lock("shared").acquire() is False
    assert find_lock("shared") is None


def test_a_block_that_is_refused_leaves_the_outer_block_alone() -> None:
    """A `with` inside a `with` of the same lock is refused, and the outer one holds it still."""
    lock = cache_lock("nested")
    with lock:
        with pytest.raises(ConfigurationError, match="not reentrant"), lock:
            pytest.fail("it was entered twice")
        assert lock.held
        lock.ensure()
    assert find_lock("nested") is None


def test_threads_that_race_for_one_object_get_one_lock() -> None:
    """If two threads acquire with one object at once, one is refused and no lock is lost."""
    lock = cache_lock("raced")
    with ThreadPoolExecutor(1) as other:
        with hanging("take") as take:
            first = other.submit(lock.acquire)
            assert take.began.wait(10)
            with pytest.raises(ConfigurationError, match="another thread"):
                lock.acquire()
        assert first.result() is True
        assert other.submit(lambda: lock.held).result()
        assert other.submit(lock.release).result() is True
    assert lock.acquire()
    assert lock.release()


def test_a_block_that_fails_after_its_lease_leaves_the_next_thread_alone(clock: HeldClock) -> None:
    """The object is another thread's by then, which goes on to hold and to release its lock."""
    lock = cache_lock("shared", timeout=30, renew=False)
    with ThreadPoolExecutor(1) as other:
        with pytest.raises(KeyError), lock:
            clock.advance(30)
            assert other.submit(lock.acquire).result()
            raise KeyError
        assert cache_lock("shared").acquire() is False
        assert other.submit(lock.release).result() is True


def test_a_block_without_the_lock_ends_well_beside_one_that_has_it() -> None:
    """A block that did not get the lock ends in peace when another thread has got it since."""
    lock = cache_lock("given up")
    with ThreadPoolExecutor(1) as other:
        with cache_lock("given up"):
            assert not lock.__enter__()
        assert other.submit(lock.acquire).result()
        lock.__exit__(None, None, None)
        assert other.submit(lambda: lock.held).result()
        assert other.submit(lock.release).result() is True


@pytest.mark.parametrize(
    "make", [copy.copy, copy.deepcopy, lambda lock: pickle.loads(pickle.dumps(lock))]
)
def test_a_copy_is_not_held(make: Callable[[CacheLock], CacheLock]) -> None:
    """A copy of a held lock holds nothing, and releases nothing; it is a lock of that name."""
    with cache_lock("copied", timeout=7, blocking_timeout=0.01) as lock:
        twin = make(lock)
        assert not twin.held
        assert twin.token is None
        assert twin.acquire() is False
        assert lock.held
    with twin:
        assert 6 < twin.remaining <= 7.001


# Renewal


def test_a_lock_whose_object_is_gone_is_renewed(
    clock: HeldClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A lock that nobody keeps has one leader still, and one WARNING names it and what to do."""
    assert cache_lock("leader", timeout=30).acquire()
    gc.collect()
    clock.advance(100)
    assert find_lock("leader") is not None
    wait_for(lambda: warnings_of(caplog), 30, "nobody was warned")
    (warned,) = warnings_of(caplog)
    assert "'leader' is held, but the object that acquired it is gone" in warned
    assert "renewed until its thread ends" in warned
    assert "with cache_lock(...) as lock:" in warned


def test_renewal_ends_with_the_thread(clock: HeldClock, caplog: pytest.LogCaptureFixture) -> None:
    """A thread that ends without releasing holds for one lease and no longer; a WARNING tells."""
    lock = cache_lock("left behind", timeout=30)
    thread = threading.Thread(target=lock.acquire)
    thread.start()
    thread.join()
    clock.advance(29)
    assert find_lock("left behind") is not None
    clock.advance(1.1)
    assert find_lock("left behind") is None
    wait_for(lambda: warnings_of(caplog), 30, "nobody was warned")
    (warned,) = warnings_of(caplog)
    assert "Stopped renewing 'left behind'" in warned
    assert "the thread that took it ended without releasing it" in warned
    assert lock.acquire()
    assert lock.release()


def test_renewal_of_a_forgotten_lock_ends_with_its_task(
    clock: HeldClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A lock that a task takes and forgets is renewed while the task runs, and then ends."""
    app = Celery(set_as_current=False)

    @app.task(shared=False)
    def forget() -> None:
        assert cache_lock("forgotten", timeout=30).acquire()
        clock.advance(100)
        assert find_lock("forgotten") is not None

    forget.apply(throw=True)
    clock.advance(30)
    assert find_lock("forgotten") is None
    wait_for(lambda: len(warnings_of(caplog)) == 2, 30, "nobody was warned")
    assert "the task that took it ended without releasing it" in warnings_of(caplog)[1]


def test_a_thread_that_would_wait_for_ever_for_its_own_lock_gets_an_error() -> None:
    """At once, and only that thread: others wait, as do those that wait for a limited time."""
    with cache_lock("mine"):
        with pytest.raises(ConfigurationError, match=r"held by this very thread.*would never end"):
            cache_lock("mine", blocking_timeout=None).acquire()
        assert cache_lock("mine").acquire(blocking_timeout=100) is False
        with ThreadPoolExecutor(1) as other:
            waiting = cache_lock("mine")
            waiter = other.submit(waiting.acquire, None)
            wait_for(lambda: waiting.contender is not None, 30, "nobody waits")
            assert not waiter.done()
            found = get_lock("mine")
            assert release_lock(found)
            assert waiter.result(30)


def test_a_thread_may_wait_for_ever_for_the_end_of_a_lease_of_its_own() -> None:
    """A lock that is not renewed ends by itself, and one of several places may become free."""
    assert cache_lock("debounce", timeout=30, renew=False).acquire()
    assert cache_lock("debounce", blocking_timeout=None).acquire()
    with ThreadPoolExecutor(1) as other, cache_lock("places", limit=2):
        theirs = cache_lock("places", limit=2)
        assert other.submit(theirs.acquire).result(30)
        mine = cache_lock("places", limit=2)

        def free() -> bool:
            wait_for(lambda: mine.contender is not None, 30, "nobody waits")
            return theirs.release()

        freed = other.submit(free)
        assert mine.acquire(blocking_timeout=None)
        assert freed.result(30)
        assert mine.release()
