"""
Listing many locks among many more other keys on Redis.

The floor is one MGET of all the locks' keys, by someone who knows them already.
"""

import statistics
import tracemalloc
from collections import deque
from typing import Any

import redis

from django_celery_safe import cache_lock, iter_locks
from tests.benchmarks.locks import caches_on, describe_floor
from tests.benchmarks.report import Figure, interleaved, ratio
from tests.processes import start_in_process
from tests.servers import RedisServer, ServerPool

LOCKS, OTHERS, ROUNDS = 100_000, 1_000_000, 7

#: Seconds that all locks are held for: longer than this benchmark takes.
LEASE = 3600

#: Keys that one SCAN is asked to look at, and that one script writes.
PAGE = 1000

FLOOR = "one MGET"
OURS = f"iter_locks() / {FLOOR}"
SCANNED = f"SCAN, MGET a page / {FLOOR}"

WRITE_OTHERS = """
for i = ARGV[1], ARGV[2] do redis.call('SET', ':1:other:' .. i, 'something cached') end
"""


def run(servers: ServerPool) -> list[Figure]:
    """Fill a Redis of its own, and list what it holds."""
    with RedisServer() as server, caches_on(server):
        fill(server, LOCKS, OTHERS)
        return measure(server, LOCKS, ROUNDS)


def fill(server: RedisServer, locks: int, others: int) -> None:
    """Acquire so many locks and write so many other keys."""
    with server.client() as client:
        for first in range(1, others + 1, PAGE):
            client.eval(WRITE_OTHERS, 0, str(first), str(min(first + PAGE - 1, others)))
    half = locks // 2
    with (
        start_in_process(acquire_many, 0, half) as one,
        start_in_process(acquire_many, half, locks) as other,
    ):
        one.result(300)
        other.result(300)


def acquire_many(first: int, end: int) -> None:
    """Acquire the locks of these numbers, and leave them to their leases."""
    for number in range(first, end):
        assert cache_lock(name_of(number), timeout=LEASE, renew=False).acquire()


def name_of(number: int) -> str:
    """Return the name of a lock as a single-instance task would give it."""
    return f"shop.tasks.import_feed:{number:032x}"


def measure(server: RedisServer, locks: int, rounds: int) -> list[Figure]:
    """List in the same rounds as the floor, then once to check and once to weigh."""
    with server.client() as client:
        keys = list(client.scan_iter("*celery_safe:lock:*", PAGE))
        candidates = {
            FLOOR: lambda: client.mget(keys),
            OURS: lambda: deque(iter_locks(), maxlen=0),
            SCANNED: lambda: list_by_scan(client),
        }
        samples = interleaved(candidates, rounds)
        there = client.dbsize()
    listed = [lock.name for lock in iter_locks()]
    names = set(listed)
    wrong = len(listed) - len(names) + len(names ^ set(map(name_of, range(locks))))
    milliseconds = statistics.median(samples[FLOOR]) / 1000
    return [
        Figure(f"{FLOOR}, ms", milliseconds, note=f"of known keys; {describe_floor()}"),
        Figure(OURS, ratio(samples, OURS, FLOOR), note=f"{locks:,} locks, {there:,} keys"),
        Figure(SCANNED, ratio(samples, SCANNED, FLOOR), note="nothing decoded"),
        Figure("Python peak, MB", peak_of_listing() / 1e6, note="tracemalloc, in another pass"),
        Figure("missed, twice or not there", wrong, note=f"of {len(listed):,} locks listed"),
    ]


def list_by_scan(client: "redis.Redis") -> int:
    """List without an index: look at every key, read those that are locks."""
    found, cursor = 0, 0
    while True:
        page: Any = client.scan(cursor, "*celery_safe:lock:*", PAGE)
        cursor, keys = page
        found += len(client.mget(keys)) if keys else 0
        if not cursor:
            return found


def peak_of_listing() -> int:
    """Return the most bytes that Python held during a listing beyond those before it."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        deque(iter_locks(), maxlen=0)
        _, peak = tracemalloc.get_traced_memory()
        return peak - before
    finally:
        tracemalloc.stop()
