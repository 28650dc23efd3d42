"""The doctor, on stores that are well and on stores that are not."""

import re
import signal
import threading
from collections.abc import Callable
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest
from pytest_django import Settings

from django_celery_safe import cache_lock, conf, iter_locks
from django_celery_safe.inspection import doctor, race
from django_celery_safe.inspection.doctor import examine
from django_celery_safe.inspection.findings import Finding, Verdict
from tests import checking
from tests.conftest import REDIS_BACKENDS, MakeRedisCache
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


def use_redis(settings: Settings, server: RedisServer, **user: str) -> None:
    """Put the locks into this server, as this user."""
    url = f"redis://{user['name']}:{user['password']}@{server.host}:{server.port}/0" if user else ""
    settings.CACHES = {
        "default": {"BACKEND": REDIS_BACKENDS["django"], "LOCATION": url or server.url}
    }


@pytest.mark.nightly
def test_redis_is_safe(
    find: Examine,
    redis_cache_settings: MakeRedisCache,
    redis_server: RedisServer,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Redis without eviction is all well, and the counter of the fences is all that is left."""
    for name in ("WOKEN_WITHIN", "LATE"):
        monkeypatch.setattr(doctor, name, 30.0)  # a busy machine is no fault of Redis
    settings.CACHES = redis_cache_settings("django-redis")
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
def test_memcached_is_safe(
    find: Examine, memcached_cache_settings: Callable[[], Any], settings: Settings
) -> None:
    """memcached excludes, forgets, numbers nothing, and has leases of whole seconds."""
    settings.CACHES = memcached_cache_settings()
    found = find()
    assert verdicts(found) == {**WITHOUT_SERVER, "weakness": "warning", "listing": "warning"}
    assert "forgets items when it is full" in found["weakness"].said
    assert found["fencing"].values == {"acquisitions": 0}
    assert found["waking"].values["promised"] is False
    assert found["lease"].values["free_after_s"] >= 1
    assert abs(found["clock"].values["offset_s"]) < 5


@pytest.mark.nightly
def test_a_database_is_safe(find: Examine, db_alias: str, settings: Settings) -> None:
    """Locks in a database are all well, nothing clears them, and no row is left."""
    from django_celery_safe.models import DatabaseLock

    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": db_alias}
    found = find()
    assert verdicts(found) == {**WITHOUT_SERVER, "clearing": "ok"}, found["exclusion"].said
    assert found["store"].values["kind"] == "database"
    assert not DatabaseLock.objects.using(db_alias).exists()


@pytest.mark.nightly
def test_a_cache_of_which_nothing_is_known(
    find: Examine, settings: Settings, tmp_path: Path
) -> None:
    """A cache that is no more than Django's API gets warnings, and what it does is measured."""
    cache = {"BACKEND": "diskcache.DjangoCache", "LOCATION": str(tmp_path), "TIMEOUT": None}
    settings.CACHES = {**settings.CACHES, "locks": cache}
    found = find("locks")
    assert verdicts(found) == {
        **WITHOUT_SERVER,
        "weakness": "warning",
        "clearing": "ok",
        "listing": "warning",
    }
    assert found["clock"].values == {"offset_s": None}
    assert found["store"].values["alias"] == "locks"


def test_a_refused_cache_is_unsafe(find: Examine, settings: Settings, tmp_path: Path) -> None:
    """On a cache where no lock excludes, the examination ends with why."""
    backend = "django.core.cache.backends.filebased.FileBasedCache"
    settings.CACHES = {"default": {"BACKEND": backend, "LOCATION": str(tmp_path)}}
    found = find()
    assert verdicts(found) == {"store": "unsafe"}
    assert "several processes get the same lock" in found["store"].said
    assert found["store"].values["kind"] == "cache"


@pytest.mark.nightly
def test_local_memory_is_unsafe(find: Examine) -> None:
    """Processes are seen to hold one lock in LocMemCache."""
    found = find(processes=3, seconds=5)
    unsafe = {**WITHOUT_SERVER, "store": "warning", "clearing": "ok", "exclusion": "unsafe"}
    assert verdicts(found) == unsafe
    values = found["exclusion"].values
    assert values["processes"] == 3
    assert values["overlaps"] > 0


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


def test_check_and_doctor_say_the_same(fragile_redis: RedisServer) -> None:
    """A fault that both find has one text and one hint, in `check --deploy` and in the doctor."""
    with fragile_redis.client() as admin:
        admin.config_set("maxmemory", 50_000_000)
        admin.config_set("maxmemory-policy", "allkeys-lru")
    with closing(examine()) as findings:
        found = {finding.check: finding for finding in islice(findings, 4)}
    messages = checking.find_messages(deploy=True)
    said = {message.id: f"{message.msg} {message.hint}" for message in messages}
    assert said["django_celery_safe.W005"] == found["clearing"].said
    assert said["django_celery_safe.W006"] == found["eviction"].said


def test_a_server_that_refuses_locks(redis_server: RedisServer, settings: Settings) -> None:
    """A replica is named as such, with what to do, and its locks are not tried out further."""
    options = ("--replicaof", redis_server.host, str(redis_server.port))
    with RedisServer(options=options) as replica:
        use_redis(settings, replica)
        found = {finding.check: finding for finding in examine()}
    assert found["store"].verdict == "unknown"
    assert "is a replica" in found["store"].said
    assert set(found) <= {"store", "permissions"}


@pytest.mark.parametrize(("command", "verdict"), [("config", "ok"), ("info", "unknown")])
def test_a_server_that_refuses_to_tell(
    command: str, verdict: str, fragile_redis: RedisServer, settings: Settings
) -> None:
    """Without CONFIG, as on managed servers, eviction is known; without INFO it is unknown."""
    with fragile_redis.client() as admin:
        admin.execute_command(
            "ACL", "SETUSER", "doctor", "on", ">secret", "~*", "&*", "+@all", f"-{command}"
        )
    use_redis(settings, fragile_redis, name="doctor", password="secret")
    finding = find_until("eviction")
    assert finding.verdict == verdict
    assert ("refused to tell how it evicts keys" in finding.said) == (verdict == "unknown")


def test_a_server_that_is_down(fragile_redis: RedisServer) -> None:
    """A server that does not answer is neither safe nor unsafe."""
    fragile_redis.stop()
    (finding,) = examine()
    assert (finding.check, finding.verdict) == ("store", "unknown")
    assert "refused" in finding.said


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
def test_a_store_that_is_far_away(redis_server: RedisServer, settings: Settings) -> None:
    """Where answers are slow fewer locks are tried, and too few of them show nothing."""
    redis_server.flush()
    backend = "tests.locks.broken.DistantCache"
    settings.CACHES = {"default": {"BACKEND": backend, "LOCATION": redis_server.url}}
    with pytest.MonkeyPatch.context() as patch:
        share_settings(patch)
        finding = find_until("exclusion")
    assert finding.verdict == "unknown"
    assert "so slow that there were fewer than 10 tries, so nothing is known" in finding.said
    assert 5 <= finding.values["expired_tries"] <= 8
    assert finding.values["overlaps"] == finding.values["expired_overlaps"] == 0


@pytest.mark.nightly
def test_a_store_that_loses_its_memory(fragile_redis: RedisServer) -> None:
    """A lock that is gone before its release is unsafe; the hint blames what deletes locks."""
    stop = threading.Event()

    def empty_it() -> None:
        with fragile_redis.client() as client:
            while not stop.wait(0.05):
                client.flushdb()

    emptying = threading.Thread(target=empty_it)
    emptying.start()
    try:
        findings = examine()
        found = {finding.check: finding for finding in findings}
    finally:
        stop.set()
        emptying.join()
    assert (found["waking"].verdict, found["lease"].verdict) == ("unsafe", "unsafe")
    assert re.search(
        r"A lock with a lease of 10 s was gone when its holder released it after 0\.\d+ s: two "
        r"processes can hold one lock\. Find out what deletes locks there",
        found["waking"].said,
    )
    assert "two processes hold one lock. Find out what deletes locks there" in found["lease"].said
    assert not [one for one in found.values() if "Use Redis" in one.said]


def test_a_slow_store_for_its_leases(
    settings: Settings, redis_cache_settings: MakeRedisCache
) -> None:
    """A round trip that is long beside LOCK_TIMEOUT is a warning."""
    settings.CACHES = redis_cache_settings("django-redis")
    assert find_until("round_trip").verdict == "ok"
    settings.DJANGO_CELERY_SAFE = {"LOCK_TIMEOUT": 0.001}
    finding = find_until("round_trip")
    assert finding.verdict == "warning"
    assert "more than a tenth of LOCK_TIMEOUT (0.001 s)" in finding.said


def test_settings_that_no_lock_can_have(
    memcached_cache_settings: Callable[[], Any], settings: Settings
) -> None:
    """A lease that the store can't keep, or a cache that is not there, ends the examination."""
    settings.CACHES = memcached_cache_settings()
    (missing,) = examine("nowhere")
    settings.DJANGO_CELERY_SAFE = {"LOCK_TIMEOUT": 1}
    (short,) = examine()
    assert (missing.check, missing.verdict) == (short.check, short.verdict) == ("store", "unknown")
    assert "'nowhere'" in missing.said
    assert "has to be from 2 s" in short.said


def test_locks_on_an_alias_of_their_own(
    settings: Settings, redis_server: RedisServer, redis_cache_settings: MakeRedisCache
) -> None:
    """A database of the locks' own is not cleared; one that another alias has too is."""
    locks = {"BACKEND": REDIS_BACKENDS["django"], "LOCATION": redis_server.database_url(5)}
    settings.CACHES = {**redis_cache_settings("django-redis"), "locks": locks}
    settings.DJANGO_CELERY_SAFE = {"LOCK_CACHE": "locks"}
    assert find_until("clearing").values == {"emptied_with": []}
    settings.CACHES = {**settings.CACHES, "pages": {**locks, "KEY_PREFIX": "pages"}}
    finding = find_until("clearing")
    assert finding.verdict == "warning"
    assert finding.values == {"emptied_with": ['CACHES["pages"]']}


def test_an_examination_that_is_left_leaves_nothing(
    redis_cache_settings: MakeRedisCache, redis_server: RedisServer, settings: Settings
) -> None:
    """A caller that stops reading the findings finds the store as it was."""
    settings.CACHES = redis_cache_settings("django-redis")
    with cache_lock("first"):
        pass
    before = left_behind(redis_server)
    for check in ("round_trip", "listing", "waking"):
        find_until(check)
        assert left_behind(redis_server) == before


@pytest.mark.nightly
def test_processes_with_other_settings(
    redis_cache_settings: MakeRedisCache, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where other processes keep their locks elsewhere, it is not said that all is well."""
    share_settings(monkeypatch)
    settings.CACHES = redis_cache_settings("django")
    finding = find_until("exclusion")
    assert finding.verdict == "unknown"
    assert "keep their locks in another place than this one, whose settings differ" in finding.said


@pytest.mark.nightly
def test_processes_without_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no other process can have the settings, nothing is known of exclusion."""
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "tests.nowhere")
    finding = find_until("exclusion")
    assert finding.verdict == "unknown"
    assert finding.said.startswith("Processes could not race for a lock: ")
    assert "ModuleNotFoundError: No module named 'tests.nowhere'" in finding.said


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_dies_or_hangs(
    number: signal.Signals,
    redis_cache_settings: MakeRedisCache,
    redis_server: RedisServer,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that dies or hangs makes exclusion unknown; it is ended, and its locks freed."""
    settings.CACHES = redis_cache_settings("django-redis")
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
