"""Locks in Redis, however the cache is configured: keys, serializers, sockets, users, pools."""

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from django.core.cache import cache
from pytest_django import Settings

from django_celery_safe import cache_lock, find_lock, iter_locks, release_lock
from django_celery_safe.leases.lease import Renewal
from django_celery_safe.locks.stores import get_store
from tests.caches import RedisCacheKind
from tests.clock import HeldClock
from tests.conftest import MakeCaches
from tests.contract import cases
from tests.locks.renewals import acquired, take_lock, uses_of, wait_and_release
from tests.processes import wait_for
from tests.servers import RedisServer


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


class Cut(NamedTuple):
    """Breaks the connections that have a name, and no others."""

    admin: Any
    name: str

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
    redis_cache_settings: MakeCaches,
    redis_server: RedisServer,
    cut: Cut,
    clock: HeldClock,
    tmp_path: Path,
) -> None:
    """However the cache is configured, locks exclude, are shown, live on, and end."""
    settings.CACHES = redis_cache_settings(kind, LOCATION=cut.url(redis_server.url), **entry)
    for case in (cases.odd_names_are_locks_of_their_own, cases.holder_is_shown):
        case(tmp_path)
    # Each time as the first on a broken connection.
    lock = acquired("life", timeout=30)
    fence: Any = lock.fence
    for ask, answer in uses_of(lock, clock):
        assert cut()
        assert ask() == answer
    assert lock.fence > fence
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait_and_release, "life")
        wait_for(lambda: cut.admin.info("clients")["blocked_clients"], 20, "nobody waits")
        assert lock.release()
        assert waiting.result(30)


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
    redis_cache_settings: MakeCaches,
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
def count_listed(in_redis: None, redis_server: RedisServer) -> Iterator[Callable[[], int]]:
    """Count the locks on the list of the default cache, as the server has it."""
    with redis_server.client() as admin:
        yield partial(admin.zcard, cache.make_key("celery_safe:locks"))


def abandon(names: list[str], seconds: float) -> None:
    """Take locks that nobody will renew nor release."""
    for number, name in enumerate(names):
        take_lock(name, f"{number:032}", seconds)


def test_the_list_forgets_abandoned_locks(count_listed: Callable[[], int]) -> None:
    """Locks that ended by their lease are never shown, and leave the list as others are taken."""
    abandon([f"abandoned:{number}" for number in range(200)], 0.001)
    assert count_listed() > 0
    wait_for(lambda: not list(iter_locks()), 20, "an expired lock is shown")
    # One acquisition in a hundred trims, so the chance of a failure is one in 10^13.
    wait_for(lambda: take_others(100) and not count_listed(), 10, "they are in the list still")


def take_others(number: int) -> bool:
    """Take and free a lock, over and over."""
    for _ in range(number):
        take_lock("other", "t" * 32)
        assert get_store().release("other", "t" * 32)
    return True


def test_the_list_holds_still_for_what_stays(count_listed: Callable[[], int]) -> None:
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
    assert count_listed() > 2500
