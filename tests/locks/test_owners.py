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

from django_celery_safe import CacheLock, ConfigurationError, LockNotAcquired, cache_lock, find_lock
from tests.clock import HeldClock
from tests.locks.renewals import stop_renewing
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


def test_threads_that_share_an_object_exclude_each_other() -> None:
    """Each has a lock of its own: only the thread that took it holds it, and can release it."""
    lock = cache_lock("shared")
    with ThreadPoolExecutor(1) as other, lock:
        assert other.submit(lock.acquire).result() is False
        assert other.submit(lambda: (lock.held, lock.remaining, lock.token)).result() == (
            (False, 0.0, None)
        )
        with pytest.raises(LockNotAcquired):
            other.submit(lock.release).result()
        assert lock.held
        lock.ensure()
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


def test_a_block_that_fails_after_its_lease_leaves_the_next_thread_alone(clock: HeldClock) -> None:
    """The object is another thread's by then, which goes on to hold and to release its lock."""
    lock = cache_lock("shared", timeout=30)
    with ThreadPoolExecutor(1) as other:
        with pytest.raises(KeyError), lock:
            stop_renewing(lock)
            clock.advance(30)
            assert other.submit(lock.acquire).result()
            raise KeyError
        assert cache_lock("shared").acquire() is False
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


def test_a_lock_whose_object_is_gone_is_renewed(clock: HeldClock) -> None:
    """A lock that nobody keeps has one leader still."""
    assert cache_lock("leader", timeout=30).acquire()
    gc.collect()
    clock.advance(100)
    assert find_lock("leader") is not None


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
    wait_for(lambda: warnings_of(caplog), 30, "nobody was warned")
    assert "the task that took it ended without releasing it" in warnings_of(caplog)[0]
