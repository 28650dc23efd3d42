"""
How the cost of what is done all the time grows with what is there.

A free lock while 100, 10,000 or 1,000,000 others are held, in Redis and in a table, and the
first run of a piece of ``idempotent`` work beside as many records. All sizes are measured in
the same rounds, each as a ratio to the smallest. ``outbox`` and ``carried`` do the same for
messages, and ``stages`` for steps. Relays are one, two and four processes on one outbox.
"""

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import count
from typing import Any

from django.test import override_settings

from django_celery_safe import cache_lock, idempotent
from django_celery_safe.leases.holder import TOKEN_LENGTH, Holder
from django_celery_safe.locks.stores.base import Acquired
from django_celery_safe.locks.stores.database import DatabaseStore
from django_celery_safe.models import DatabaseLock, IdempotencyRecord
from tests.benchmarks import outbox
from tests.benchmarks.locks import ours_on
from tests.benchmarks.report import Figure, interleaved, ratio, take_turns
from tests.benchmarks.tools import BACKENDS, databases, insert_copies, keep_locks_in
from tests.servers import RedisServer, ServerPool

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

Call = Callable[[], object]


def run(servers: ServerPool) -> list[Figure]:
    """Measure locks, records and relays."""
    figures: list[Figure] = []
    with databases(servers, *[None] * len(SIZES)) as aliases, ExitStack() as stack:
        redis = {str(size): stack.enter_context(RedisServer()) for size in SIZES}
        backend = BACKENDS["django-redis"]
        caches = {
            name: {"BACKEND": backend, "LOCATION": server.url} for name, server in redis.items()
        }
        stack.enter_context(
            override_settings(CACHES={"default": caches["100"], **caches}, DJANGO_CELERY_SAFE={})
        )
        sizes = dict(zip(SIZES, aliases, strict=True))
        for kind, calls in {
            "lock, Redis": [lock_on_redis(redis[str(size)], size) for size in SIZES],
            "lock, table": [lock_in_table(alias, size) for size, alias in sizes.items()],
            "first run": [first_run(alias, size) for size, alias in sizes.items()],
        }.items():
            first, *others = names = [f"{size:,}" for size in SIZES]
            samples = interleaved(dict(zip(names, calls, strict=True)), ROUNDS)
            figures.append(Figure(f"{kind}: {first}, µs", statistics.median(samples[first])))
            figures += [
                Figure(f"{kind}: {name} / {first}", ratio(samples, name, first)) for name in others
            ]
    return figures + measure_relays(servers)


def lock_on_redis(server: RedisServer, size: int) -> Call:
    """Have so many locks held on a server; return an acquisition with its release."""
    alias = str(size)
    keep_locks_in(alias)
    assert cache_lock("growth", timeout=LEASE).acquire()
    with server.client() as client:
        (index,) = [key for key in client.scan_iter() if client.type(key) == b"zset"]
        (key,) = client.zrange(index, 0, -1)
        for first in range(1, size, PAGE):
            last = min(first + PAGE, size) - 1
            client.eval(COPY, 2, key, index, str(first), str(last), str(LEASE * 1000))
        assert client.zcard(index) == size
    return ours_on(alias)


def lock_in_table(alias: str, size: int) -> Call:
    """Have so many rows of locks in a database; return an acquisition with its release."""
    store, holder, token = DatabaseStore(alias), Holder("benchmark"), "0" * TOKEN_LENGTH
    store.acquire("growth", "f" * TOKEN_LENGTH, LEASE, holder)
    copy_row(alias, DatabaseLock, size, key="'growth' || number", token="md5(number::text)")

    def acquire_and_release() -> None:
        assert isinstance(store.acquire("benchmark", token, 30.0, holder), Acquired)
        assert store.release("benchmark", token)

    return acquire_and_release


def first_run(alias: str, size: int) -> Call:
    """Have so many records in a database; return the first run of another work."""

    @idempotent(using=alias, key="{number}")
    def work(number: int) -> None:
        """Do nothing."""

    work(-1)
    copy_row(alias, IdempotencyRecord, size, key="'growth' || number")
    numbers = count()
    return lambda: work(next(numbers))


def copy_row(alias: str, model: Any, size: int, **changes: str) -> None:
    """Have so many rows like the only one, with columns that are SQL of their number."""
    row = model.objects.using(alias).values().get()
    same = {name: value for name, value in row.items() if name not in changes}
    insert_copies(alias, model, same, changes, f"generate_series(1, {size - 1}) AS number")


def measure_relays(servers: ServerPool) -> list[Figure]:
    """Return the messages a second of several relays on one outbox."""
    with outbox.outboxes(servers, 1) as (alias,):
        row = outbox.a_row(alias)
        rate = partial(outbox.rate_of_relays, servers.redis, alias, row, MESSAGES)
        rates = take_turns(
            {f"{number} relays: messages/s": partial(rate, number) for number in RELAYS},
            RELAY_ROUNDS,
        )
    return [Figure(name, statistics.median(some), better="higher") for name, some in rates.items()]
