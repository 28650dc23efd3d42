"""Locks in a Redis Cluster: slots that move, nodes that go away, and each client for clusters."""

import contextlib
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest
from pytest_django import Settings

from django_celery_safe import LockBackendError, cache_lock, find_lock, iter_locks
from django_celery_safe.locks.stores import get_store
from django_celery_safe.locks.stores.redis import TAG
from tests.caches import CacheSettings, caches_of_cluster
from tests.clock import HeldClock
from tests.docs.pages import page
from tests.locks.renewals import acquired, is_answered, wait_and_release
from tests.processes import wait_for
from tests.servers import RedisClusterServer

#: The socket timeout of clients of a cluster in which nodes fall silent, s.
SOCKET_TIMEOUT = 1.0


@pytest.fixture(params=["django-redis", "django"])
def cluster(
    request: pytest.FixtureRequest,
    redis_cluster: RedisClusterServer,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> RedisClusterServer:
    """The cluster, emptied, with the locks in it by each client; django-redis as in the docs."""
    redis_cluster.flush()
    blocks = [block.code for block in page("docs/how-to/choose-where-locks-live.md").blocks()]
    module, code = (code for code in blocks if "ClusterConnectionFactory" in code)
    monkeypatch.setitem(sys.modules, "shop.caches", shop_caches := ModuleType("shop.caches"))
    exec(module, vars(shop_caches))
    exec(code, names := {"CACHES": CacheSettings()})
    shown = names["CACHES"]["locks"]
    options = shown["OPTIONS"]["REDIS_CLIENT_KWARGS"]
    django = {"BACKEND": "tests.cluster_caches.ClusterCache", "OPTIONS": options}
    cache = shown if request.param == "django-redis" else django
    settings.CACHES = {"default": {**cache, "LOCATION": redis_cluster.url}}
    return redis_cluster


@pytest.fixture
def fragile(settings: Settings) -> Iterator[RedisClusterServer]:
    """A cluster of this test alone, with which clients have a short socket timeout."""
    with RedisClusterServer() as server:
        timeouts = {"socket_timeout": SOCKET_TIMEOUT, "socket_connect_timeout": SOCKET_TIMEOUT}
        settings.CACHES = caches_of_cluster(server, **timeouts)
        yield server


@pytest.fixture(scope="module")
def loose_cluster() -> Iterator[RedisClusterServer]:
    """A cluster of this module, in which each test moves slots of its own."""
    with RedisClusterServer() as server:
        yield server


@pytest.fixture
def movable(loose_cluster: RedisClusterServer, settings: Settings) -> RedisClusterServer:
    """The cluster whose slots may move, emptied; locks live in it."""
    loose_cluster.flush()
    settings.CACHES = caches_of_cluster(loose_cluster)
    return loose_cluster


@contextlib.contextmanager
def waiting_for(name: str, cluster: RedisClusterServer) -> Iterator[None]:
    """Have another thread wait for a lock, which the block frees."""
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(wait_and_release, name)
        cluster.node_of(TAG).wait_for_waiters()
        yield
        assert waiting.result(30)


@pytest.mark.repository
def test_each_client(cluster: RedisClusterServer, clock: HeldClock) -> None:
    """By each client for clusters locks exclude, wait, are listed, renewed and freed."""
    assert "redis cluster" in get_store().where
    assert get_store().ask_eviction() == ("noeviction", 0)
    locks = [cache_lock(f"lock:{number}", timeout=30) for number in range(10)]
    for lock in locks:
        assert lock.acquire()
        assert not cache_lock(lock.name).acquire()
    assert sorted(held.name for held in iter_locks()) == sorted(lock.name for lock in locks)
    clock.advance(11)
    assert all(lock.remaining > 25 for lock in locks)
    locks[0].extend(60)
    with waiting_for("lock:0", cluster):
        assert locks[0].release()
    with cache_lock("few", limit=2) as one, cache_lock("few", limit=2) as two:
        assert one
        assert two
        assert not cache_lock("few", limit=2).acquire()
    assert all(lock.release() for lock in locks[1:])
    assert not list(iter_locks())


def test_a_slot_that_is_moving(movable: RedisClusterServer) -> None:
    """A lock stays held before and after its keys have moved; a new lock is an error."""
    lock = acquired("moving", timeout=60)
    with movable.moving(TAG) as move:
        for send in (lambda: None, move.send_keys):
            send()
            lock.ensure()
            lock.extend(60)
            assert find_lock("moving") is not None
            assert not cache_lock("moving").acquire()
            assert [held.name for held in iter_locks()] == ["moving"]
            with pytest.raises(LockBackendError, match=r"is moving the slot of the.*Try again"):
                cache_lock("new").acquire()
    assert lock.held
    with cache_lock("new") as other:
        assert other
    assert lock.release()


def test_a_waiter_outlives_a_move(movable: RedisClusterServer) -> None:
    """A waiter goes on waiting at the node that its lock has moved to, and gets the lock."""
    lock = acquired("waited for", timeout=60)
    with waiting_for("waited for", movable):
        movable.move(TAG)
        assert lock.release()


def test_nodes_that_are_gone(fragile: RedisClusterServer) -> None:
    """Without the node of the locks each is an error; when it is back, there are new ones."""
    gone = fragile.node_of(TAG)
    lock = acquired("lost", timeout=60)
    for other in fragile.nodes:
        if other is not gone:
            other.kill()
            lock.ensure()
            other.start()
    gone.kill()
    with pytest.raises(LockBackendError):
        lock.release()
    for ask in (cache_lock("lost").acquire, lambda: find_lock("lost"), lambda: list(iter_locks())):
        with pytest.raises(LockBackendError):
            ask()
    with pytest.raises(LockBackendError):
        cache_lock("lost", blocking_timeout=None).acquire()
    gone.start()
    wait_for(lambda: is_answered(lock.acquire), 30, "the node did not come back")
    assert [held.name for held in iter_locks()] == ["lost"]
    assert lock.release()
