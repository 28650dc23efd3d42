"""Redis in trouble, or refusing, with locks in it: errors are clear, nothing is mixed up."""

import json
import logging
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from django.core.cache import cache
from pytest_django import Settings
from redis import ResponseError

from django_celery_safe import (
    ConfigurationError,
    HeldLock,
    LockBackendError,
    LockLost,
    cache_lock,
    find_lock,
    iter_locks,
)
from django_celery_safe.events import LEASES_NOT_RENEWED
from django_celery_safe.inspection import lock_store
from django_celery_safe.locks.stores import get_store
from django_celery_safe.locks.stores import redis as redis_store
from django_celery_safe.locks.stores.redis_connections import Connections
from tests.caches import RedisCacheKind, cache_at
from tests.clock import HeldClock
from tests.conftest import MakeCaches
from tests.docs.pages import page
from tests.locks.renewals import acquired, uses_of, wait_and_release
from tests.processes import dead_port, wait_for
from tests.sending.conftest import hearing
from tests.servers import RedisServer

#: The socket timeout of these tests' clients, s.
SOCKET_TIMEOUT = 0.5


@pytest.fixture
def impatient(
    request: pytest.FixtureRequest, fragile_redis: RedisServer, settings: Settings
) -> RedisServer:
    """A Redis of this test alone, with which either class of cache has a short socket timeout."""
    timeouts = {"socket_timeout": SOCKET_TIMEOUT, "socket_connect_timeout": SOCKET_TIMEOUT}
    kind: RedisCacheKind = getattr(request, "param", "django-redis")
    options = {"CONNECTION_POOL_KWARGS": timeouts} if kind == "django-redis" else timeouts
    settings.CACHES = cache_at(fragile_redis.url, kind, OPTIONS=options)
    return fragile_redis


def key_of(name: str) -> str:
    """Return the key of a lock."""
    return str(cache.make_key(f"celery_safe:lock:{name}"))


# Scripts forgotten, connections cut


def test_forgotten_scripts_are_sent_again(
    in_redis: None, redis_server: RedisServer, clock: HeldClock
) -> None:
    """SCRIPT FLUSH harms no holder, no renewal, no waiter and no listing."""
    lock = cache_lock("flushed", timeout=30)
    with ThreadPoolExecutor(1) as pool, redis_server.client() as admin:
        admin.script_flush()
        assert lock.acquire()
        for ask, answer in uses_of(lock, clock):
            admin.script_flush()
            assert ask() == answer
        waiting = pool.submit(wait_and_release, "flushed")
        redis_server.wait_for_waiters()
        admin.script_flush()
        assert lock.release()
        assert waiting.result(10) is True


# Restarts


def test_a_restart_is_noticed_by_holders(
    fragile_redis: RedisServer,
    losses: list[str],
    caplog: pytest.LogCaptureFixture,
    clock: HeldClock,
) -> None:
    """A server that lost its memory is a loss: for ensure(), and for the renewing thread."""
    with cache_lock("asked") as asked, cache_lock("renewed", timeout=30) as renewed:
        fragile_redis.restart()
        with pytest.raises(LockLost):
            asked.ensure()
        assert not asked.held
        clock.advance(11)
        assert not renewed.held
        wait_for(lambda: "renewed" in losses, 30, "the loss was not told")
        with pytest.raises(LockLost):
            renewed.ensure()
        assert asked.release() is False
        assert renewed.release() is False
    assert sorted(losses) == ["asked", "renewed"]
    errors = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
    for name in losses:
        assert sum(f"The lock '{name}' was lost" in error for error in errors) == 1


@pytest.mark.parametrize("impatient", ["django-redis", "django"], indirect=True)
def test_a_gone_server_is_no_held_lock_for_waiters(impatient: RedisServer) -> None:
    """A waiter whose server stays away gets an error, not False."""
    with ThreadPoolExecutor(1) as pool:
        assert cache_lock("gone").acquire()
        waiting = pool.submit(wait_and_release, "gone")
        impatient.wait_for_waiters()
        impatient.kill()
        with pytest.raises(LockBackendError):
            waiting.result(60)


def test_ignored_exceptions_are_not_ignored_by_locks(settings: Settings) -> None:
    """IGNORE_EXCEPTIONS, by which a dead cache looks like an empty one, is not for locks."""
    gone = f"redis://127.0.0.1:{dead_port()}/0"
    settings.CACHES = cache_at(gone, OPTIONS={"IGNORE_EXCEPTIONS": True})
    assert cache.get("x") is None
    for ask in (cache_lock("x").acquire, lambda: find_lock("x"), lambda: list(iter_locks())):
        with pytest.raises(LockBackendError):
            ask()


# Silence


@pytest.mark.parametrize("impatient", ["django-redis", "django"], indirect=True)
def test_a_silent_server_is_an_error_and_costs_no_lock(
    impatient: RedisServer, losses: list[str], clock: HeldClock
) -> None:
    """A silent server is an error in time; its locks are still held when it answers again."""
    actions: list[Callable[[], object]] = [
        lambda: cache_lock("new").acquire(),
        lambda: kept.ensure(),
        lambda: kept.extend(60),
        lambda: other.release(),
        lambda: list(iter_locks()),
    ]
    kept, other = cache_lock("kept", timeout=60), cache_lock("other", timeout=60)
    with ThreadPoolExecutor(1) as pool, kept, hearing(LEASES_NOT_RENEWED) as failed:
        assert other.acquire()
        waiting = pool.submit(wait_and_release, "kept")
        impatient.wait_for_waiters()
        with impatient.silence():
            for action in actions:
                with pytest.raises(LockBackendError):
                    action()
            with pytest.raises(LockBackendError):
                waiting.result(30)
            clock.advance(21)
            wait_for(
                lambda: "kept" in [one["name"] for one in failed], 30, "no renewal met the silence"
            )
            assert kept.held
        clock.advance(6)
        assert kept.remaining > 50
        kept.ensure()
    assert "kept" not in losses


# No memory left


def test_locks_without_memory(
    fragile_redis: RedisServer, losses: list[str], clock: HeldClock
) -> None:
    """A server out of memory says so to who wants a lock; those who have one renew and free it."""
    locks = [acquired(f"held:{number}", timeout=30) for number in range(3)]
    with fragile_redis.client() as admin, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait_and_release, "held:0")
        fragile_redis.wait_for_waiters()
        admin.config_set("maxmemory-policy", "noeviction")
        admin.config_set("maxmemory", "1")
        with pytest.raises(LockBackendError, match=r"OutOfMemory|OOM"):
            cache_lock("new").acquire()
        assert len(list(iter_locks())) == 3
        clock.advance(11)
        for lock in locks:
            assert lock.remaining > 25
            lock.ensure()
        assert all(lock.release() for lock in locks)
        with pytest.raises(LockBackendError, match=r"OutOfMemory|OOM"):
            waiting.result(30)
        assert not losses
        admin.config_set("maxmemory", "0")
        with cache_lock("new") as new:
            assert new


# Garbled values

TOKEN = "t" * 32
FENCE = "1" * 16

GARBLED: dict[str, Any] = {
    "bytes": b"\xff\xfe\x00\x80" * 20,
    "empty": b"",
    "object for a holder": f'{TOKEN}{FENCE}{{"name": "x"}}'.encode(),
    "number for a name": f"{TOKEN}{FENCE}[5, [], {{}}, null]".encode(),
    "text for numbers": f'{TOKEN}{FENCE}["garbled", 1, "x", "y", "z", 2, [3]]'.encode(),
    "deep": f"{TOKEN}{FENCE}{'[' * 100_000}".encode(),
    "odd fence": f"{TOKEN}{'²' * 16}[]".encode(),
    "hash": {"a": "b"},
}


def spoil(admin: Any, key: str, value: Any) -> None:
    """Put something under a key that is not ours, in place of what is there."""
    admin.delete(key)
    if isinstance(value, dict):
        admin.hset(key, mapping=value)
    else:
        admin.set(key, value)


def test_a_garbled_value_is_a_lock_of_someone_unknown(
    in_redis: None, redis_server: RedisServer
) -> None:
    """A foreign value under a lock's key is an unknown holder or a clear error."""
    for value in GARBLED.values():
        with redis_server.client() as admin, cache_lock("sound") as sound:
            spoiled = acquired("garbled")
            spoil(admin, key_of("garbled"), value)
            other = cache_lock("garbled")
            assert or_error(other.acquire) in (False, "error")
            if other.contender is not None:
                check_is_text(other.contender)
            assert str(other.not_acquired())
            found = or_error(lambda: find_lock("garbled"))
            if isinstance(found, HeldLock):
                check_is_text(found)
            else:
                assert found == "error"
            listed = list(iter_locks())
            assert sound.token in [one.token for one in listed]
            for one in listed:
                check_is_text(one)
            with pytest.raises((LockLost, LockBackendError)):
                spoiled.ensure()
            sound.ensure()
            assert or_error(spoiled.release) in (False, "error")
            admin.delete(key_of("garbled"))


def or_error(ask: Callable[[], object]) -> object:
    """Return the answer, or "error" for the one that is documented."""
    try:
        return ask()
    except LockBackendError:
        return "error"


def check_is_text(lock: HeldLock) -> None:
    """See that a lock can be shown, filtered by its name, and serialised."""
    assert isinstance(lock.name, str)
    assert lock.name.startswith("")
    assert isinstance(str(lock.holder), str)
    assert json.dumps(lock.as_json())


@pytest.mark.parametrize("before", ["", "ERR Error running script: @user_script:6: -"])
def test_a_connection_to_a_primary_of_before_is_dropped(before: str, in_redis: None) -> None:
    """The next one may find another server. Redis 6.2 says it in the middle of another text."""
    connections: Any = get_store()._connections
    with pytest.raises(ResponseError, match="not here"):
        connections.ask(("EVAL", f"return redis.error_reply('{before}READONLY not here')", "0"))
    assert connections.idle == []


@pytest.mark.parametrize("answer", [b"OK", [[]], [1, b"x"], [b"a", b"b", b"c"], None])
def test_a_server_that_answers_nonsense_is_an_error(
    answer: object, in_redis: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the server is no Redis, a lock counts neither as held nor as free: it is an error."""
    monkeypatch.setattr(Connections, "ask", lambda own, *args: (answer, False))
    store, lock = get_store(), cache_lock("x")
    asks: list[Callable[[], object]] = [
        lambda: cache_lock("x", limit=2).acquire(),
        lambda: find_lock("x"),
        lambda: list(iter_locks()),
        lambda: store.release("x", "t" * 32),
        lambda: store.ask_time(),
        lock.acquire,
    ]
    assert [or_error(ask) for ask in asks] == ["error"] * len(asks)
    assert not lock.held


def test_a_lock_of_another_type_disturbs_no_other(
    in_redis: None, redis_server: RedisServer, losses: list[str], clock: HeldClock
) -> None:
    """When a lock's key is overwritten by another type, the other leases are renewed still."""
    locks = [cache_lock(f"sound:{number}", timeout=30) for number in range(2)]
    spoiled = cache_lock("spoiled", timeout=30)
    with redis_server.client() as admin:
        assert all(lock.acquire() for lock in (locks[0], spoiled, locks[1]))
        spoil(admin, key_of("spoiled"), {"a": "b"})
        clock.advance(11)
        assert not spoiled.held
        assert all(lock.remaining > 25 for lock in locks)
        assert all(lock.release() for lock in locks)
        assert set(losses) <= {"spoiled"}


# Many at once


def test_many_waiters_need_no_pool(fragile_redis: RedisServer, settings: Settings) -> None:
    """60 threads wait over a pool of 10 connections: each gets the lock, and the pool works on."""
    settings.CACHES["default"]["OPTIONS"] = {"CONNECTION_POOL_KWARGS": {"max_connections": 10}}
    lock = acquired("wanted")
    with ThreadPoolExecutor(60) as pool, fragile_redis.client() as admin:
        waiting = [pool.submit(wait_and_release, "wanted") for _ in range(60)]
        fragile_redis.wait_for_waiters(60)
        with ThreadPoolExecutor(10) as users:
            assert list(users.map(set_and_get, range(10))) == list(range(10))
        # All of them at once, as when a proxy between them and the server restarts.
        admin.client_kill_filter(_type="normal", skipme=True)
        fragile_redis.wait_for_waiters(60)
        assert lock.release()
        assert all(one.result(60) for one in waiting)
    assert set_and_get(11) == 11
    assert find_lock("wanted") is None


def set_and_get(number: int) -> int:
    """Use the cache for what it is for."""
    cache.set(f"x:{number}", number)
    return int(cache.get(f"x:{number}"))


# Servers that refuse


@pytest.fixture
def admin(
    redis_server: RedisServer, redis_cache_settings: MakeCaches, settings: Settings
) -> Iterator[Any]:
    """Restricts the user of the docs, who has the locks and may do just what locks need."""
    url = f"redis://locks:secret@{redis_server.host}:{redis_server.port}/0"
    settings.CACHES = redis_cache_settings("django", LOCATION=url)
    text = page("docs/how-to/choose-where-locks-live.md").text
    (documented,) = re.findall(r"^ACL SETUSER [^`]+", text, re.MULTILINE)
    with redis_server.client() as admin:
        admin.execute_command(*documented.split())
        yield admin
        get_store().close()
        admin.acl_deluser("locks")


def find_refused() -> list[str]:
    """Return the commands that the check names as refused, with the server's errors."""
    words = "refuses to this user what locks need: "
    texts = [message.msg for message in lock_store.check_server()]
    return [text.partition(words)[2] for text in texts if words in text]


@pytest.mark.repository
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


@pytest.mark.repository
def test_a_refused_command_leaves_no_lock_of_nobody(admin: Any) -> None:
    """An acquisition that the ACL refuses holds nothing; the check names the command."""
    for command in [line.split()[0].lower() for line in redis_store.HARMLESS]:
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


def test_a_plain_client_of_a_cluster_is_refused(settings: Settings) -> None:
    """With a client for one server, the first lock and the check say that it needs another."""
    refused = pytest.raises(
        ConfigurationError, match=r"node of Redis Cluster.*a client for Redis Clu"
    )
    with RedisServer(cluster=True) as node:
        settings.CACHES = cache_at(node.url, "django")
        with refused:
            cache_lock("x").acquire()
        texts = [message.msg for message in lock_store.check_server()]
    assert any("is a node of Redis Cluster" in text for text in texts)
