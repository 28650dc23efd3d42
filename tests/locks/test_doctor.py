"""The doctor, on stores that are well and on stores that are not."""

import signal
from collections.abc import Callable
from contextlib import closing
from typing import Any

import psutil
import pytest
from pytest_django import Settings

from django_celery_safe import conf, iter_locks
from django_celery_safe.inspection import doctor, race
from django_celery_safe.inspection.doctor import examine
from django_celery_safe.inspection.findings import Finding, Verdict
from tests.processes.settings import settings_environment
from tests.servers import RedisServer

#: Findings for a store that promises everything and shares its place with the default cache.
ALL_WELL = {
    "store": "ok",
    "permissions": "ok",
    "eviction": "ok",
    "clearing": "warning",
    "clock": "ok",
    "round_trip": "ok",
    "listing": "ok",
    "waking": "ok",
    "lease": "ok",
    "exclusion": "ok",
    "fencing": "ok",
}
#: The same of a store that is not asked what its server is like.
WITHOUT_SERVER = {
    check: verdict
    for check, verdict in ALL_WELL.items()
    if check not in {"permissions", "eviction"}
}

Examine = Callable[..., dict[str, Finding]]


@pytest.fixture
def find(monkeypatch: pytest.MonkeyPatch) -> Examine:
    """Examine in this process, of which others have the settings; return findings by check."""

    def find(cache: Any = conf.UNSET, **options: Any) -> dict[str, Finding]:
        share_settings(monkeypatch)
        return {finding.check: finding for finding in examine(cache, **options)}

    return find


def share_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes that are started have the settings of this test."""
    for name, value in settings_environment().items():
        monkeypatch.setenv(name, value)


def find_until(check: str) -> Finding:
    """Examine until this finding comes, and stop."""
    with closing(examine()) as findings:
        return next(finding for finding in findings if finding.check == check)


def verdicts(found: dict[str, Finding]) -> dict[str, str]:
    """Return the verdict of each check."""
    return {check: str(finding.verdict) for check, finding in found.items()}


@pytest.mark.nightly
def test_redis_is_safe(
    in_redis: None, find: Examine, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis without eviction is all well, and the counter of the fences is all that is left."""
    for name in ("WOKEN_WITHIN", "LATE"):
        monkeypatch.setattr(doctor, name, 30.0)  # a busy machine is no fault of Redis
    found = find(seconds=5)
    assert verdicts(found) == ALL_WELL
    assert found["store"].values == {
        "kind": "cache",
        "alias": "default",
        "where": 'CACHES["default"] (redis)',
    }
    values = found["exclusion"].values
    faults = ("overlaps", "expired_overlaps", "places_overlaps", "errors")
    assert [values[name] for name in faults] == [0, 0, 0, 0]
    assert found["fencing"].values == {"acquisitions": values["acquired"] + 2}
    assert left_behind(redis_server) == [b":1:celery_safe:fence"]


def left_behind(server: RedisServer) -> list[bytes]:
    """Return the keys in database 0."""
    with server.client() as client:
        keys: list[bytes] = client.keys("*")
        return keys


@pytest.mark.nightly
def test_a_database_is_safe(find: Examine, db_alias: str, settings: Settings) -> None:
    """Locks in a database are all well, nothing clears them, and no row is left."""
    from django_celery_safe.models import DatabaseLock

    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": db_alias}
    found = find()
    assert verdicts(found) == {**WITHOUT_SERVER, "clearing": "ok"}, found["exclusion"].said
    assert found["store"].values["kind"] == "database"
    assert not DatabaseLock.objects.using(db_alias).exists()


@pytest.mark.parametrize(
    ("policy", "max_memory", "verdict"),
    [
        ("allkeys-lru", 0, "unsafe"),
        ("volatile-ttl", 50_000_000, "unsafe"),
        ("noeviction", 50_000_000, "ok"),
    ],
)
def test_eviction(policy: str, verdict: str, max_memory: int, fragile_redis: RedisServer) -> None:
    """A Redis that makes room by deleting keys is unsafe, be it before it has a limit."""
    with fragile_redis.client() as admin:
        admin.config_set("maxmemory", max_memory)
        admin.config_set("maxmemory-policy", policy)
    finding = find_until("eviction")
    assert (finding.verdict, finding.values) == (
        verdict,
        {"policy": policy, "max_memory_bytes": max_memory},
    )
    assert policy in finding.said
    assert ("maxmemory is 0" in finding.said) == (verdict == "unsafe" and not max_memory)


def test_a_server_that_goes_down(
    fragile_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that could not be run any more are unknown, and named all the same."""
    share_settings(monkeypatch)
    findings = examine()
    first = next(findings)
    fragile_redis.stop()
    found = {finding.check: finding for finding in findings}
    assert first.verdict == "ok"
    assert verdicts(found) == {
        **{check: "unknown" for check in ALL_WELL if check != "store"},
        "clearing": "warning",
    }


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("locks.broken.GenerousCache", {"lease": "unsafe", "exclusion": "unsafe"}),
        ("contract.broken.ReadThenWriteCache", {"exclusion": "unsafe"}),
        ("locks.broken.OverwritingCache", {"exclusion": "unsafe"}),
        ("locks.broken.HastyCache", {"lease": "unsafe"}),
        ("contract.broken.NoExpiryCache", {"lease": "warning", "exclusion": "unknown"}),
        ("contract.broken.FencePerProcessCache", {"fencing": "unsafe"}),
        ("locks.broken.SecretiveCache", {"listing": "warning"}),
        ("locks.broken.LateCache", {"clock": "warning"}),
        ("locks.broken.BaffledCache", {"clock": "unknown", "exclusion": "ok"}),
    ],
)
def test_a_broken_store_is_caught(
    fault: str,
    expected: dict[str, str],
    redis_server: RedisServer,
    settings: Settings,
    find: Examine,
) -> None:
    """A store with this fault gets these verdicts, and nothing of it is left either."""
    redis_server.flush()
    settings.CACHES = {"default": {"BACKEND": f"tests.{fault}", "LOCATION": redis_server.url}}
    found = find()
    assert {check: found[check].verdict for check in expected} == expected, found
    assert set(left_behind(redis_server)) <= {b":1:celery_safe:fence"}


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_dies_or_hangs(
    number: signal.Signals,
    in_redis: None,
    redis_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that dies or hangs makes exclusion unknown; it is ended, and its locks freed."""
    share_settings(monkeypatch)
    monkeypatch.setattr(race, "ANSWER", 2)
    hit: list[int] = []

    def hit_one(racers: race.Racers, *args: Any) -> race.RaceOutcome:
        process = psutil.Process(racers._racers[0]._process.pid)
        process.send_signal(number)
        hit.append(process.pid)
        return start_race(racers, *args)

    start_race = race.Racers.race
    monkeypatch.setattr(race.Racers, "race", hit_one)
    findings = examine(seconds=0.5)
    finding = next(finding for finding in findings if finding.check == "exclusion")
    assert finding.verdict == Verdict.UNKNOWN
    ended = "ended with status -9" if number == signal.SIGKILL else "said nothing for"
    assert f"process {hit[0]} {ended}" in finding.said
    assert not psutil.pid_exists(hit[0])
    assert [finding.check for finding in findings] == ["fencing"]
    # The list may still name a lock whose lease ended before it could be released.
    assert {*left_behind(redis_server)} <= {b":1:celery_safe:fence", b":1:celery_safe:locks"}
    assert list(iter_locks()) == []


def test_the_processes_end_with_their_starter() -> None:
    """Processes that wait for a race are gone when their starter is done with them."""
    with race.Racers(2) as racers:
        pids = [racer._process.pid for racer in racers._racers]
        assert [psutil.pid_exists(pid) for pid in pids] == [True, True]
    assert [psutil.pid_exists(pid) for pid in pids] == [False, False]
