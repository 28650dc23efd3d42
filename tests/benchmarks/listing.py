"""
Listing many locks among many more other keys on Redis.

The floor is one MGET of all the locks' keys, by someone who knows them already.
"""

import statistics
import tracemalloc
from collections import deque
from contextlib import ExitStack

from django_celery_safe import cache_lock, iter_locks
from tests.benchmarks.locks import describe_floor
from tests.benchmarks.report import Figure, interleaved, ratio
from tests.benchmarks.tools import caches_on
from tests.processes import start_in_process
from tests.servers import RedisServer, ServerPool

LOCKS, OTHERS, ROUNDS = 100_000, 1_000_000, 7

#: Seconds that all locks are held for: longer than this benchmark takes.
LEASE = 3600

#: Keys that one script writes, or one SCAN looks at.
PAGE = 1000

FLOOR, OURS = "one MGET", "iter_locks()"

WRITE_OTHERS = """
for i = ARGV[1], ARGV[2] do redis.call('SET', ':1:other:' .. i, 'something cached') end
"""


def run(servers: ServerPool) -> list[Figure]:
    """Fill a Redis of its own, and list what it holds in the same rounds as the floor."""
    with RedisServer() as server, caches_on(server), server.client() as client:
        for first in range(1, OTHERS + 1, PAGE):
            client.eval(WRITE_OTHERS, 0, str(first), str(first + PAGE - 1))
        with ExitStack() as stack:
            half = LOCKS // 2
            for numbers in ((0, half), (half, LOCKS)):
                process = stack.enter_context(start_in_process(acquire_many, *numbers))
                stack.callback(process.result, 300)
        keys = list(client.scan_iter("*celery_safe:lock:*", PAGE))
        samples = interleaved(
            {FLOOR: lambda: client.mget(keys), OURS: lambda: deque(iter_locks(), maxlen=0)}, ROUNDS
        )
        there = client.dbsize()
        listed = [lock.name for lock in iter_locks()]
        tracemalloc.start()
        deque(iter_locks(), maxlen=0)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    names = set(listed)
    wrong = len(listed) - len(names) + len(names ^ set(map(name_of, range(LOCKS))))
    floor = statistics.median(samples[FLOOR]) / 1000
    note = f"{LOCKS:,} locks, {there:,} keys"
    return [
        Figure(f"{FLOOR}, ms", floor, note=f"of known keys; {describe_floor()}"),
        Figure(f"{OURS} / {FLOOR}", ratio(samples, OURS, FLOOR), note=note),
        Figure("Python peak, MB", peak / 1e6, note="tracemalloc, in another pass"),
        Figure("missed, twice or not there", wrong, note=f"of {len(listed):,} locks listed"),
    ]


def acquire_many(first: int, end: int) -> None:
    """Acquire the locks of these numbers, and leave them to their leases."""
    for number in range(first, end):
        assert cache_lock(name_of(number), timeout=LEASE).acquire()


def name_of(number: int) -> str:
    """Return the name of a lock as a single-instance task would give it."""
    return f"shop.tasks.import_feed:{number:032x}"
