"""Locks in Redis, however the cache is configured: keys, serializers, sockets, users, pools."""

import hashlib
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.core.cache import caches
from pytest_django import Settings

from django_celery_safe import (
    ConfigurationError,
    LockBackendError,
    cache_lock,
    find_lock,
    iter_locks,
    release_lock,
)
from django_celery_safe.inspection import lock_store
from django_celery_safe.leases.holder import Holder
from django_celery_safe.leases.store import Renewal
from django_celery_safe.locks.stores import get_store
from django_celery_safe.locks.stores import redis as redis_store
from django_celery_safe.locks.stores.base import Acquired, LockRequest
from tests.clock import HeldClock
from tests.conftest import REDIS_BACKENDS, MakeRedisCache, RedisCacheKind
from tests.processes import dead_port, wait_for
from tests.servers import RedisServer

#: The names that each variant locks.
NAMES = ["feed:42", "ein Name mit Ümlaut\n", "x" * 300]


def surround(key: str, prefix: str, version: int) -> str:
    """Make a key that ends in what Django's own begins with."""
    return f"{key}|{version}|{prefix}|é"


def digest(key: str, prefix: str, version: int) -> str:
    """Make a key that tells nothing."""
    return hashlib.sha256(f"{prefix}:{version}:{key}".encode()).hexdigest()


def options(**given: Any) -> dict[str, Any]:
    """Return the entry OPTIONS."""
    return {"OPTIONS": given}


def client(**given: Any) -> dict[str, Any]:
    """Return django-redis' OPTIONS for its connections."""
    return options(CONNECTION_POOL_KWARGS=given)


KEYS: dict[str, dict[str, Any]] = {
    "key function": {"KEY_FUNCTION": f"{__name__}.surround", "KEY_PREFIX": "shop"},
    "hashed keys": {"KEY_FUNCTION": f"{__name__}.digest"},
}

DJANGO_REDIS: dict[str, dict[str, Any]] = {
    "herd": options(CLIENT_CLASS="django_redis.client.HerdClient"),
    "decoded": client(decode_responses=True),
    "python parser": options(PARSER_CLASS="redis.connection._RESP2Parser"),
    "blocking pool": options(
        CONNECTION_POOL_CLASS="redis.BlockingConnectionPool",
        CONNECTION_POOL_KWARGS={"max_connections": 1, "timeout": 1},
    ),
}

DJANGO: dict[str, dict[str, Any]] = {
    "decoded": options(decode_responses=True),
    "resp2": options(protocol=2),
}

VARIANTS: dict[str, tuple[RedisCacheKind, dict[str, Any]]] = {
    **{f"django-redis: {name}": ("django-redis", e) for name, e in DJANGO_REDIS.items()},
    **{f"django: {name}": ("django", e) for name, e in (KEYS | DJANGO).items()},
}


@pytest.fixture
def cut(redis_server: RedisServer, request: pytest.FixtureRequest) -> Iterator["Cut"]:
    """A way to break this test's connections, which are known by the name in their URL."""
    with redis_server.client() as admin:
        yield Cut(admin, f"variant-{abs(hash(request.node.name))}")


class Cut:
    """Breaks the connections that have a name, and no others."""

    def __init__(self, admin: Any, name: str) -> None:
        self.admin = admin
        self.name = name

    def url(self, url: str) -> str:
        """Return the URL with the name, which also makes it a pool of its own in django-redis."""
        return f"{url}{'&' if '?' in url else '?'}client_name={self.name}"

    def __call__(self) -> int:
        """Break them all, from the server's side, and return how many there were."""
        found = [one for one in self.admin.client_list() if one["name"] == self.name]
        return sum(self.admin.client_kill_filter(_id=one["id"]) for one in found)


@pytest.mark.parametrize(("kind", "entry"), VARIANTS.values(), ids=VARIANTS)
def test_locks_work(
    kind: RedisCacheKind,
    entry: dict[str, Any],
    settings: Settings,
    redis_cache_settings: MakeRedisCache,
    redis_server: RedisServer,
    cut: Cut,
    clock: HeldClock,
) -> None:
    """However the cache is configured, locks exclude, are shown, live on, and end."""
    settings.CACHES = redis_cache_settings(kind, LOCATION=cut.url(redis_server.url), **entry)
    check_exclusion()
    check_life(cut, clock)


def check_exclusion() -> None:
    """Take locks, and see that they exclude and that they are shown as they are."""
    locks = [cache_lock(name) for name in NAMES]
    assert all(lock.acquire() for lock in locks)
    assert not any(cache_lock(name).acquire() for name in NAMES)
    listed = {one.name: one for one in iter_locks()}
    assert sorted(listed) == sorted(NAMES)
    for lock in locks:
        for found in (find_lock(lock.name), listed[lock.name]):
            assert found is not None
            assert (found.name, found.token, found.fence) == (lock.name, lock.token, lock.fence)
            assert found.holder.pid
            assert found.holder.renewed
            assert found.remaining is not None
            # The page's clock may be a millisecond ahead of the lease's.
            assert 28 < found.remaining <= 30.001
    fences = [lock.fence or 0 for lock in locks]
    assert fences == sorted(set(fences))
    assert all(lock.release() for lock in locks)
    assert not list(iter_locks())
    assert find_lock(NAMES[0]) is None
    with cache_lock(NAMES[0]) as again:
        assert again


def check_life(cut: Cut, clock: HeldClock) -> None:
    """Use a lock in each way, each time as the first on a broken connection."""
    lock = cache_lock("life", timeout=30)
    assert lock.acquire()

    def renew() -> bool:
        clock.advance(11)
        return lock.remaining > 25

    asks: list[tuple[Callable[[], object], object]] = [
        (lock.ensure, None),
        (renew, True),
        (lambda: lock.extend(60), None),
        (lambda: find_lock("life").token == lock.token, True),  # type: ignore[union-attr]
        (lambda: [one.token == lock.token for one in iter_locks()], [True]),
        (cache_lock("life").acquire, False),
        (lock.release, True),
        (lock.acquire, True),
    ]
    for ask, answer in asks:
        assert cut()
        assert ask() == answer
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait_and_release, "life")
        wait_for(lambda: cut.admin.info("clients")["blocked_clients"], 20, "nobody waits")
        assert lock.release()
        assert waiting.result(30)


def wait_and_release(name: str) -> bool:
    """Take a lock when it is free, and give it back."""
    lock = cache_lock(name, blocking_timeout=10)
    return lock.acquire() and lock.release()


@pytest.mark.parametrize(
    ("kind", "other"),
    [
        ("django-redis", {"KEY_PREFIX": "two"}),
        ("django", {"VERSION": 2}),
        ("django", {"KEY_FUNCTION": f"{__name__}.digest"}),
    ],
    ids=["prefix", "version", "key function"],
)
def test_aliases_with_other_keys_are_other_lock_spaces(
    kind: RedisCacheKind,
    other: dict[str, Any],
    settings: Settings,
    redis_cache_settings: MakeRedisCache,
) -> None:
    """Two aliases that differ in what makes their keys, and only that, share no lock."""
    settings.CACHES = {
        **redis_cache_settings(kind, "default", KEY_PREFIX="one"),
        **redis_cache_settings(kind, "other", **{"KEY_PREFIX": "one", **other}),
    }
    ours, theirs = cache_lock("x"), cache_lock("x")
    assert ours.acquire()
    settings.DJANGO_CELERY_SAFE = {"LOCK_CACHE": "other"}
    assert find_lock("x") is None
    assert theirs.acquire()
    for lock, alias in ((theirs, "other"), (ours, "default")):
        settings.DJANGO_CELERY_SAFE = {"LOCK_CACHE": alias}
        (found,) = iter_locks()
        assert (found.name, found.token) == ("x", lock.token)
    settings.DJANGO_CELERY_SAFE = {"LOCK_CACHE": "other"}
    assert release_lock(found) is False
    assert ours.release()
    theirs.ensure()
    assert theirs.release()


@pytest.fixture
def index(in_redis: None, redis_server: RedisServer) -> Iterator["Index"]:
    """The list of the locks in the default cache."""
    with redis_server.client() as admin:
        yield Index(admin, caches["default"].make_key("celery_safe:locks"))


class Index:
    """The sorted set that lists the locks, as the server has it."""

    def __init__(self, admin: Any, key: str) -> None:
        self.admin = admin
        self.key = key

    def __len__(self) -> int:
        return int(self.admin.zcard(self.key))


def abandon(names: list[str], seconds: float) -> None:
    """Take locks that nobody will renew nor release."""
    store = get_store()
    for number, name in enumerate(names):
        outcome = store.take(LockRequest(name, f"{number:032}", seconds, Holder("here", 1)))
        assert isinstance(outcome, Acquired)


def test_the_list_forgets_abandoned_locks(index: Index) -> None:
    """Locks that ended by their lease are never shown, and leave the list as others are taken."""
    abandon([f"abandoned:{number}" for number in range(200)], 0.001)
    assert len(index) > 0
    wait_for(lambda: not list(iter_locks()), 20, "an expired lock is shown")
    # One acquisition in a hundred trims, so the chance of a failure is one in 10^13.
    wait_for(lambda: take_others(100) and not len(index), 10, "they are in the list still")


def take_others(number: int) -> bool:
    """Take and free a lock, over and over."""
    store = get_store()
    for _ in range(number):
        assert isinstance(store.take(LockRequest("other", "t" * 32, 30, Holder())), Acquired)
        assert store.release("other", "t" * 32)
    return True


def test_the_list_holds_still_for_what_stays(index: Index) -> None:
    """Locks that stay are all listed, and the list ends, while others come and go between pages."""
    store, renew = get_store(), get_store().extend
    staying, going = ([f"{kind}:{number}" for number in range(2500)] for kind in ("stays", "goes"))
    abandon(going[:2000], 3600)
    abandon(staying, 3600)
    listed: list[str] = []
    for lock in iter_locks():
        listed.append(lock.name)
        # More come than are listed meanwhile: a list that follows them would never end.
        if len(listed) % 200 == 0:
            assert len(listed) < 20_000
            came = [f"came:{len(listed)}:{number}" for number in range(250)]
            abandon(came, 3600)
            for number in range(len(listed) - 200, min(len(listed), 2000)):
                assert store.release(going[number], f"{number:032}")
            some = range(len(listed) % 2500, 2500, 3)
            assert all(renew([Renewal(staying[one], f"{one:032}", 3600) for one in some]))
    assert set(staying) <= set(listed)
    assert len(index) > 2500


# Servers that answer, and refuse: the errors' texts, and no lock left behind.


@pytest.fixture
def admin(
    redis_server: RedisServer, redis_cache_settings: MakeRedisCache, settings: Settings
) -> Iterator[Any]:
    """Restricts the user of the docs, who has the locks and may do just what locks need."""
    url = f"redis://locks:secret@{redis_server.host}:{redis_server.port}/0"
    settings.CACHES = redis_cache_settings("django", LOCATION=url)
    with redis_server.client() as admin:
        admin.execute_command(*documented_acl())
        yield admin
        get_store().close()
        admin.acl_deluser("locks")


def documented_acl() -> list[str]:
    """Return the command by which the docs make a user for locks."""
    page = Path(__file__).parents[2] / "docs/how-to/choose-where-locks-live.md"
    found = re.search(r"^ACL SETUSER [^`]+", page.read_text(), re.MULTILINE)
    assert found is not None
    return found[0].split()


def find_refused() -> list[str]:
    """Return the commands that the check names as refused, with the server's errors."""
    parts = [
        message.msg.split("refuses to this user what locks need: ")
        for message in lock_store.check_server()
    ]
    return [part[1] for part in parts if len(part) == 2]


def test_the_commands_that_are_listed_are_enough(admin: Any) -> None:
    """A user that may run the listed commands alone can lock, wait, renew, list and release."""
    with cache_lock("listed", timeout=60) as lock:
        assert not cache_lock("listed", blocking_timeout=0.4).acquire()
        lock.ensure()
        (held,) = get_store().iter_locks()
        assert held.name == "listed"
    assert find_refused() == []


@contextmanager
def refusing_by_acl() -> Iterator[None]:
    """Let the block end in an error that says what to do about the ACL, or in none."""
    error: LockBackendError | None = None
    try:
        yield
    except LockBackendError as caught:
        error = caught
    assert error is None or re.search("ACL does not let.*celery_locks doctor", str(error))


def test_a_refused_command_leaves_no_lock_of_nobody(admin: Any) -> None:
    """An acquisition that the ACL refuses holds nothing; the check names the command."""
    for command in redis_store.COMMANDS:
        admin.execute_command("ACL", "SETUSER", "locks", f"-{command}")
        for _ in range(150 if command == "zremrangebyscore" else 1):
            lock = cache_lock("refused")
            acquired = False
            with refusing_by_acl():
                acquired = lock.acquire()
            assert admin.exists(":1:celery_safe:lock:refused") == acquired
            if acquired:
                with refusing_by_acl():
                    lock.release()
            admin.delete(":1:celery_safe:lock:refused")
        (refused,) = find_refused()
        assert refused.startswith(f"{command} ")
        assert ";" not in refused  # no other command
        admin.execute_command("ACL", "SETUSER", "locks", f"+{command}")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("REPLICAOF", "127.0.0.1", dead_port()), "is a replica.*read.only replica.*the primary"),
        (("CONFIG", "SET", "maxmemory", 1), "memory is full.*used memory.*maxmemory"),
        (("CONFIG", "SET", "min-replicas-to-write", 1), "takes no writes while.*NOREPLICAS"),
        (("CONFIG", "SET", "requirepass", "secret"), "user and password.*settings"),
    ],
    ids=["replica", "memory", "replicas", "password"],
)
def test_a_refusal_is_not_called_silence(
    command: tuple[Any, ...], said: str, fragile_redis: RedisServer
) -> None:
    """A server that refuses is told apart from one that does not answer, with what to do."""
    with fragile_redis.client() as admin:
        admin.execute_command(*command)
    with pytest.raises(LockBackendError, match=f"refused to acquire.*{said}") as caught:
        cache_lock("refused").acquire()
    assert "is up" not in str(caught.value)


@pytest.fixture
def node() -> Iterator[RedisServer]:
    """The only node of a Redis Cluster."""
    with RedisServer(cluster=True) as server:
        yield server


def test_a_plain_client_of_a_cluster_is_refused(node: RedisServer, settings: Settings) -> None:
    """With a client for one server, the first lock and the check say that it needs another."""
    settings.CACHES = {"default": {"BACKEND": REDIS_BACKENDS["django"], "LOCATION": node.url}}
    with pytest.raises(ConfigurationError, match=r"node of Redis Cluster.*a client for Redis Clu"):
        cache_lock("x").acquire()
    texts = [message.msg for message in lock_store.check_server()]
    assert any("is a node of Redis Cluster" in text for text in texts)
