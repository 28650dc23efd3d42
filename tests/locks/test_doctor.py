"""``celery_locks doctor``, on stores that are well and on stores that are not."""

import json
from typing import Any

import pytest
from pytest_django import Settings

from tests.caches import cache_at
from tests.commands import refused, run, status_of_program
from tests.servers import RedisServer

#: The verdict of each check on a Redis that also has the default cache, and on a database.
OF_REDIS = {"W002": "warning", "clock": "ok", "round_trip": "ok", "race": "ok", "eviction": "ok"}
OF_DATABASE = {check: OF_REDIS[check] for check in ("clock", "round_trip", "race")}


def verdicts(printed: str) -> dict[str, str]:
    """Return the verdict of each check in what ``doctor --json`` printed."""
    findings: list[dict[str, str]] = json.loads(printed)
    return {finding["check"]: finding["verdict"] for finding in findings}


def left_behind(server: RedisServer) -> set[bytes]:
    """Return the keys in database 0, but for those that stay when locks are used."""
    with server.client() as client:
        keys: list[bytes] = client.keys("*")
    return {*keys} - {b":1:celery_safe:fence"}


def test_redis_is_safe(in_redis: None, redis_server: RedisServer) -> None:
    """Redis without eviction is well, and no lock is left."""
    printed = run("celery_locks", "doctor", "--json")
    assert verdicts(printed) == OF_REDIS, printed
    assert left_behind(redis_server) == set()


def test_a_database_is_safe(in_database: str) -> None:
    """Locks in a database are well, and none is left."""
    from django_celery_safe.models import DatabaseLock

    printed = run("celery_locks", "doctor", "--json")
    assert verdicts(printed) == OF_DATABASE, printed
    assert not DatabaseLock.objects.using(in_database).exclude(token="").exists()


def test_a_server_that_evicts_is_unsafe(fragile_redis: RedisServer) -> None:
    """Also before it has a limit of its memory; lines have 80 columns."""
    with fragile_redis.client() as admin:
        admin.config_set("maxmemory-policy", "allkeys-lru")
    out, why = refused("celery_locks", "doctor")
    assert "unsafe   eviction    maxmemory-policy is allkeys-lru" in out
    assert max(map(len, out.splitlines())) <= 80
    assert why == "Locks are not safe here: eviction."


def test_exit_status(settings: Settings, tmp_path: Any) -> None:
    """It is 1 where locks can't be held, and 2 where nobody answers."""
    for kind, location, status, check in (
        ("django.core.cache.backends.filebased.FileBasedCache", str(tmp_path), 1, "E002"),
        ("django", "redis://127.0.0.1:1", 2, "W010"),
    ):
        settings.CACHES = cache_at(location, kind)
        assert status_of_program("celery_locks", "doctor") == status
        found = verdicts(refused("celery_locks", "doctor", "--json")[0])
        assert found[check] == ("unsafe" if status == 1 else "unknown")
        assert "race" not in found


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fault", "check", "verdict"),
    [
        ("ReadThenWriteCache", "race", "unsafe"),
        ("HastyCache", "race", "unsafe"),
        ("NoExpiryCache", "race", "unknown"),
        ("LateCache", "clock", "warning"),
        ("BaffledCache", "E002", "unknown"),
    ],
)
def test_a_broken_store_is_caught(
    fault: str, check: str, verdict: str, redis_server: RedisServer, settings: Settings
) -> None:
    """A store with this fault gets this verdict, and nothing of it is left either."""
    redis_server.flush()
    settings.CACHES = cache_at(redis_server.url, f"tests.faulty.{fault}")
    arguments = ("celery_locks", "doctor", "--json")
    printed = run(*arguments) if verdict == "warning" else refused(*arguments)[0]
    found = verdicts(printed)
    assert found.get(check) == verdict, printed
    assert left_behind(redis_server) == set()
