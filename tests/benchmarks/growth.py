"""
How the cost of what is done all the time grows with what is there.

A free lock while 100, 10,000 or 1,000,000 others are held, in Redis and in a table, and the
first run of a piece of ``idempotent`` work beside as many records. All sizes are measured in
the same rounds, each as a ratio to the smallest. ``outbox`` and ``carried`` do the same for
messages, and ``stages`` for steps. Relays are one, two and four processes on one outbox.
"""

import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

from django.db import connections
from django.test import override_settings

from django_celery_safe import cache_lock, idempotent
from django_celery_safe.leases.holder import TOKEN_LENGTH, Holder
from django_celery_safe.locks.stores.base import Acquired
from django_celery_safe.locks.stores.database import DatabaseStore
from django_celery_safe.models import DatabaseLock, IdempotencyRecord
from tests.benchmarks import outbox
from tests.benchmarks.report import Figure, interleaved, ratio
from tests.processes import run_in_processes
from tests.servers import RedisServer, ServerPool
from tests.servers.databases import Databases

#: How many locks are held, or records kept.
SIZES = (100, 10_000, 1_000_000)

#: Rounds of the measurement, and of the relays.
ROUNDS, RELAY_ROUNDS = 25, 3

#: How many relays work on one outbox, and how many messages each has to send.
RELAYS, MESSAGES = (1, 2, 4), 3000

#: Seconds that the other locks are held for: longer than this benchmark takes.
LEASE = 3600

#: Keys that one script writes.
PAGE = 1000

#: Copies the lock KEYS[1], and its place in the list KEYS[2], under other names.
COPY = """
local value, ends = redis.call('GET', KEYS[1]), redis.call('ZSCORE', KEYS[2], KEYS[1])
for i = ARGV[1], ARGV[2] do
  redis.call('SET', KEYS[1] .. i, value, 'PX', ARGV[3])
  redis.call('ZADD', KEYS[2], ends, KEYS[1] .. i)
end
"""

#: For each size, a call to be measured.
Calls = dict[int, Callable[[], object]]


def run(servers: ServerPool) -> list[Figure]:
    """Measure locks, records and relays."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        databases = Databases(servers, folder)
        aliases = {
            size: stack.enter_context(databases.alias(servers.database, folder)) for size in SIZES
        }
        servers_of_sizes = {size: stack.enter_context(RedisServer()) for size in SIZES}
        entries = {
            str(size): {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": server.url}
            for size, server in servers_of_sizes.items()
        }
        stack.enter_context(override_settings(CACHES={"default": entries["100"], **entries}))
        kinds = {
            "lock, Redis": locks_on_redis(servers_of_sizes),
            "lock, table": locks_in_tables(aliases),
            "first run": first_runs(aliases),
        }
        figures = [figure for kind, calls in kinds.items() for figure in figures_of(kind, calls)]
    return [*figures, *measure_relays(servers)]


def figures_of(kind: str, calls: Calls) -> list[Figure]:
    """Measure all sizes side by side."""
    named = {f"{size:,}": call for size, call in calls.items()}
    samples = interleaved(named, ROUNDS)
    first = f"{SIZES[0]:,}"
    floor = Figure(f"{kind}: {first}, µs", statistics.median(samples[first]))
    return [floor] + [
        Figure(f"{kind}: {name} / {first}", ratio(samples, name, first))
        for name in named
        if name != first
    ]


def locks_on_redis(servers: dict[int, RedisServer]) -> Calls:
    """Have so many locks held on each server; return an acquisition with its release."""
    calls: Calls = {}
    for size, server in servers.items():
        alias = str(size)
        assert cache_lock("growth", timeout=LEASE, renew=False, cache=alias).acquire()
        with server.client() as client:
            (index,) = [key for key in client.scan_iter() if client.type(key) == b"zset"]
            (key,) = client.zrange(index, 0, -1)
            for first in range(1, size, PAGE):
                last = min(first + PAGE, size) - 1
                client.eval(COPY, 2, key, index, str(first), str(last), str(LEASE * 1000))
            assert client.zcard(index) == size

        def acquire_and_release(alias: str = alias) -> None:
            lock = cache_lock("benchmark", cache=alias)
            assert lock.acquire()
            assert lock.release()

        calls[size] = acquire_and_release
    return calls


def locks_in_tables(aliases: dict[int, str]) -> Calls:
    """Have so many rows of locks in each database; return an acquisition with its release."""
    calls: Calls = {}
    for size, alias in aliases.items():
        store, holder = DatabaseStore(alias), Holder("benchmark")
        token = "f" * TOKEN_LENGTH
        store.acquire("growth", token, LEASE, holder)
        row = DatabaseLock.objects.using(alias).values().get()
        copy_row(
            alias,
            DatabaseLock,
            row,
            {"key": "'growth' || number", "token": "md5(number::text)"},
            size,
        )

        def acquire_and_release(store: DatabaseStore = store, holder: Holder = holder) -> None:
            token = "0" * TOKEN_LENGTH
            assert isinstance(store.acquire("benchmark", token, 30.0, holder), Acquired)
            assert store.release("benchmark", token)

        calls[size] = acquire_and_release
    return calls


def first_runs(aliases: dict[int, str]) -> Calls:
    """Have so many records in each database; return the first run of another work."""
    calls: Calls = {}
    for size, alias in aliases.items():

        @idempotent(using=alias, key="{number}")
        def work(number: int) -> None:
            """Do nothing."""

        work(-1)
        row = IdempotencyRecord.objects.using(alias).values().get()
        copy_row(alias, IdempotencyRecord, row, {"key": "'growth' || number"}, size)
        numbers = count()
        calls[size] = lambda work=work, numbers=numbers: work(next(numbers))  # type: ignore[misc]
    return calls


def copy_row(
    alias: str, model: Any, row: dict[str, Any], changes: dict[str, str], size: int
) -> None:
    """Have so many rows like this one, with columns that are SQL of their number."""
    same = {name: value for name, value in row.items() if name not in changes}
    with connections[alias].cursor() as cursor:
        table = model._meta.db_table
        cursor.execute(
            f"INSERT INTO {table} ({', '.join([*same, *changes])}) "
            f"SELECT {', '.join([*['%s'] * len(same), *changes.values()])} "
            f"FROM generate_series(1, {size - 1}) AS number",
            list(same.values()),
        )
        # Autovacuum would do that.
        cursor.execute(f"ANALYZE {table}")


def measure_relays(servers: ServerPool) -> list[Figure]:
    """Return the messages a second of several relays on one outbox."""
    rates: dict[int, list[float]] = {number: [] for number in RELAYS}
    with outbox.outboxes(servers, 1) as (alias,):
        row = outbox.a_row(alias)
        for _ in range(RELAY_ROUNDS):
            for number in RELAYS:
                rates[number].append(rate_of(servers.redis, alias, row, number))
    return [
        Figure(f"{number} relays: messages/s", statistics.median(values), better="higher")
        for number, values in rates.items()
    ]


def rate_of(redis: RedisServer, alias: str, row: outbox.Row, relays: int) -> float:
    """Return the messages a second of so many relays."""
    redis.flush()
    outbox.fill(alias, row, relays * (MESSAGES + outbox.WARM_UP), outbox.ALL_DUE)
    times: Sequence[tuple[float, float]] = run_in_processes(
        outbox.relay_all, relays, alias, timeout=outbox.LONGEST
    )
    began, ended = min(time[0] for time in times), max(time[1] for time in times)
    return relays * MESSAGES / (ended - began)
