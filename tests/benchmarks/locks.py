"""
Cost of a free lock: acquire + release, as a ratio to the least it can cost.

The floor on Redis is raw redis-py with hiredis: SET NX PX, then a registered script that
compares and deletes. Beside ours stand the locks that a Django project would use else. The floor
on PostgreSQL is an upsert and a DELETE by hand, through Django's cursor.
"""

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

import redis
import redis_lock
from django.conf import settings
from django.core.cache import caches
from django.db import connections
from redis.lock import Lock

from django_celery_safe import cache_lock
from django_celery_safe.databases import CLOCKS
from django_celery_safe.leases.holder import TOKEN_LENGTH, Holder
from django_celery_safe.locks.stores import get_store
from django_celery_safe.locks.stores.base import LockRequest
from tests.benchmarks.report import Figure, interleaved, least
from tests.benchmarks.tools import BACKENDS, caches_on, databases, in_process, keep_locks_in
from tests.servers import RedisServer, ServerPool

#: The lease in every candidate, seconds.
LEASE = 30

ROUNDS = 40

#: From process to process the same code differs by some percent: where its memory lies, the order
#: of its dicts.
PROCESSES = 5

#: The floors, and ours on PostgreSQL.
RAW, BY_HAND = "raw", "by hand"
DATABASE = "PostgreSQL"

#: Places of a lock that several hold, two of which are held.
PLACES = 3
LIMITED = f"limit={PLACES}"

COMPARE_AND_DELETE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""

UPSERT = f"""
INSERT INTO django_celery_safe_databaselock AS lock (key, token, holder, fence, ends_at_us)
VALUES (%s, %s, %s, 1, {CLOCKS["postgresql"]} + %s)
ON CONFLICT (key) DO UPDATE SET token = excluded.token, holder = excluded.holder,
    fence = lock.fence + 1, ends_at_us = excluded.ends_at_us
WHERE lock.ends_at_us <= {CLOCKS["postgresql"]} RETURNING fence
"""
DELETE = "DELETE FROM django_celery_safe_databaselock WHERE key = %s AND token = %s"

Candidate = Callable[[], object]


def run(servers: ServerPool) -> list[Figure]:
    """Measure ours, the floors and the peers in the same rounds, then count what they ask."""
    return [*on_redis(servers), *on_database(servers)]


def on_redis(servers: ServerPool) -> list[Figure]:
    """Measure in several processes, and count round trips in this one."""
    measured = [in_process(measure) for _ in range(PROCESSES)]
    raw = statistics.fmean(times[RAW] for times in measured)
    server = servers.redis
    with caches_on(server):
        ours = {**{alias: ours_on(alias) for alias in BACKENDS}, LIMITED: ours_of_several()}
        figures = [Figure("raw, µs", raw, note=describe_floor())]
        for name in [name for name in measured[0] if name != RAW]:
            over = statistics.fmean(one[name] / one[RAW] for one in measured)
            note = "ours" if name in ours else "peer"
            figures.append(Figure(f"{name} / {RAW}", over, note=note))
        note = "at the server"
        figures += [
            Figure(f"{name}: round trips", trips_of(server, 200, call), note=note)
            for name, call in ours.items()
        ]
        note = "0.75 s of work, lease 3 s"
        return figures + [
            Figure(f"{alias}: trips, with work", trips_of(server, 3, working_on(alias)), note=note)
            for alias in BACKENDS
        ]


def on_database(servers: ServerPool) -> list[Figure]:
    """Measure in several processes; ``tests/locks/test_stores.py`` counts the statements."""
    with databases(servers, DATABASE):
        measured = [in_process(measure_database) for _ in range(PROCESSES)]
    by_hand, over = map(statistics.fmean, zip(*measured, strict=True))
    return [
        Figure(f"{BY_HAND}, µs", by_hand, note="an upsert and a DELETE"),
        Figure(f"{DATABASE} / {BY_HAND}", over, note="ours"),
    ]


def measure_database() -> tuple[float, float]:
    """Return the least µs by hand on PostgreSQL, and our ratio to it."""
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": DATABASE}

    def by_hand() -> None:
        row = ["by hand", "0" * TOKEN_LENGTH, "{}", LEASE * 1_000_000]
        with connections[DATABASE].cursor() as cursor:
            cursor.execute(UPSERT, row)
            assert cursor.fetchone()
        with connections[DATABASE].cursor() as cursor:
            cursor.execute(DELETE, row[:2])
            assert cursor.rowcount == 1

    candidates = {BY_HAND: by_hand, DATABASE: lambda: acquire_and_release("benchmark")}
    times = {name: least(values) for name, values in interleaved(candidates, ROUNDS).items()}
    return times[BY_HAND], times[DATABASE] / times[BY_HAND]


def measure() -> dict[str, float]:
    """Return the least µs of each candidate, in a process and at a server of their own."""
    with ExitStack() as stack:
        server = stack.enter_context(RedisServer())
        stack.enter_context(caches_on(server))
        client = stack.enter_context(server.client())
        candidates = {RAW: floor(client)}
        candidates |= {alias: ours_on(alias) for alias in BACKENDS}
        candidates |= {LIMITED: ours_of_several(), **peers(client)}
        return {name: least(values) for name, values in interleaved(candidates, ROUNDS).items()}


def floor(client: "redis.Redis") -> Candidate:
    """Return the least that an owner-checked lock with a lease can do: two bare requests."""
    release = client.register_script(COMPARE_AND_DELETE)

    def acquire_and_release() -> None:
        assert client.set("floor", "token", nx=True, px=LEASE * 1000)
        assert release(keys=["floor"], args=["token"])

    return acquire_and_release


def ours_of_several() -> Candidate:
    """Return our lock of several holders, of which all but one hold it already."""
    keep_locks_in("django-redis")
    store = get_store()
    for number in range(1, PLACES):
        # The same tokens each time: to ask again takes no other place.
        token = f"{number:0{TOKEN_LENGTH}}"
        store.take(LockRequest("limited", token, 3600.0, Holder("benchmark"), limit=PLACES))
    return ours_on("django-redis", "limited", limit=PLACES)


def ours_on(alias: str, name: str = "benchmark", **options: Any) -> Candidate:
    """Return our lock with its defaults, a new one each time, as a ``with`` makes it."""

    chosen = settings.DJANGO_CELERY_SAFE

    def ours() -> None:
        chosen["LOCK_CACHE"] = alias  # at the cost of nothing else
        acquire_and_release(name, **options)

    return ours


def acquire_and_release(name: str, **options: Any) -> None:
    """Acquire and release a free lock of ours."""
    lock = cache_lock(name, timeout=LEASE, **options)
    assert lock.acquire()
    assert lock.release()


def working_on(alias: str) -> Candidate:
    """Return our lock with work that ends before a third of the lease has passed."""

    def work() -> None:
        keep_locks_in(alias)
        with cache_lock("benchmark", timeout=3.0) as lock:
            assert lock
            time.sleep(0.75)

    return work


def peers(client: "redis.Redis") -> dict[str, Candidate]:
    """Return the locks that projects use today."""
    django_redis: Any = caches["django-redis"]

    def use(make: Callable[[], Any]) -> Candidate:
        def acquire_and_release() -> None:
            lock = make()
            assert lock.acquire(blocking=False)
            lock.release()

        return acquire_and_release

    return {
        "redis-py Lock": use(lambda: Lock(client, "redis-py", timeout=LEASE)),
        "django-redis cache.lock": use(lambda: django_redis.lock("django-redis", timeout=LEASE)),
        "python-redis-lock": use(lambda: redis_lock.Lock(client, "python-redis", expire=LEASE)),
    }


def trips_of(server: RedisServer, number: int, call: Candidate) -> float:
    """Count at the server what a call asks of it."""
    call()
    with server.counting() as count:
        for _ in range(number):
            call()
    return count.round_trips / number


def describe_floor() -> str:
    """Say what the floor was measured with."""
    parser = "hiredis" if find_spec("hiredis") else "no hiredis"
    return f"redis-py {redis.__version__}, {parser}"
