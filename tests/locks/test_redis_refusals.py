"""Redis servers that answer, and refuse: the errors' texts, and no lock left behind."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pytest_django import Settings

from django_celery_safe import ConfigurationError, LockBackendError, cache_lock
from django_celery_safe.inspection import lock_store
from django_celery_safe.locks.stores import get_store
from django_celery_safe.locks.stores import redis as redis_store
from tests.conftest import MakeRedisCache, cache_at
from tests.processes import dead_port
from tests.servers import RedisServer


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
    settings.CACHES = cache_at(node.url, "django")
    with pytest.raises(ConfigurationError, match=r"node of Redis Cluster.*a client for Redis Clu"):
        cache_lock("x").acquire()
    texts = [message.msg for message in lock_store.check_server()]
    assert any("is a node of Redis Cluster" in text for text in texts)
