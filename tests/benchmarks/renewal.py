"""
Keeping many locks alive on Redis: what the renewing thread costs the process that holds them.

The floor is one bare script call over as many keys, in the same process and after each period:
both come after a long sleep. A process that holds nothing stands beside it.
"""

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import redis
from django.conf import settings

from django_celery_safe import cache_lock, iter_locks
from tests.benchmarks.locks import caches_on
from tests.benchmarks.report import Figure
from tests.processes import start_in_process, tell
from tests.servers import RedisServer, ServerPool

#: Locks held by one process, their lease in s, and the thirds of a lease that are watched.
LOCKS, LEASE, PERIODS = 1000, 30.0, 3

BARE_EXTEND = """
for i = 1, #KEYS do
    if redis.call('GET', KEYS[i]) then redis.call('PEXPIRE', KEYS[i], ARGV[1]) end
end
return 0
"""

#: Part of a period by which the watch begins, and ends, after a renewal is due.
MARGIN = 0.1


class Watched(NamedTuple):
    """The figures of a process that held locks, from itself and from the server."""

    #: CPU seconds that it used in each period, while it only waited.
    cpu: list[float]
    #: CPU seconds of one bare script call over as many keys, after each period.
    bare: list[float]
    #: Threads that its locks started.
    threads: int
    #: Tokens of the locks that it trusted in the end.
    tokens: list[str]


def run(servers: ServerPool) -> list[Figure]:
    """Watch a process with locks and one without, side by side."""
    with caches_on(servers.redis):
        return watch(servers.redis, LOCKS, LEASE, PERIODS)


def watch(server: RedisServer, locks: int, lease: float, periods: int) -> list[Figure]:
    """
    Return what it costs to hold so many locks, for so many thirds of their lease.

    The watch begins after the first renewal, which connects and sends the script.
    """
    server.flush()
    period = lease / 3
    longest = period * (periods + 2) + 30
    with (
        start_in_process(hold, 0, lease, periods) as idle,
        start_in_process(hold, locks, lease, periods) as holder,
    ):
        idle.receive(longest)
        holder.receive(longest)
        with server.counting() as count:
            held: Watched = holder.receive(longest)
            floor: Watched = idle.receive(longest)
        still_held = count_held(held.tokens)
    requests = count.commands.get("evalsha", 0) + count.commands.get("eval", 0)
    watched = periods * period
    cpu, bare = statistics.median(held.cpu), statistics.median(held.bare)
    idle_cpu = statistics.median(floor.cpu)
    return [
        Figure("CPU of a period / bare script", cpu / bare, note=f"{locks:,} locks"),
        Figure("% of a core", cpu / period * 100, note=f"renewed each {period:g} s"),
        Figure("% of a core, no locks", idle_cpu / period * 100, note="at the same time"),
        Figure("CPU of a period, ms", cpu * 1000),
        Figure("renewing threads", held.threads),
        Figure("locks lost", locks - still_held, note=f"after {watched:g} s"),
        Figure("requests in a period", requests / periods - 1, note="without the bare one"),
    ]


def count_held(tokens: Sequence[str]) -> int:
    """Return how many of these acquisitions hold their locks, as the server sees it."""
    return len({lock.token for lock in iter_locks()}.intersection(tokens))


def hold(locks: int, lease: float, periods: int) -> None:
    """Hold locks, do nothing else, and tell what that took after the first renewal."""
    before = set(threading.enumerate())
    held = [cache_lock(f"renewal:{number}", timeout=lease) for number in range(locks)]
    assert all(lock.acquire() for lock in held)
    time.sleep(lease / 3 * (1 + MARGIN))
    call = bare_call(locks) if locks else None
    tell("renewed once")
    cpu, bare = [], []
    for _ in range(periods):
        cpu.append(cpu_of(lambda: time.sleep(lease / 3)))
        if call is not None:
            bare.append(cpu_of(call))
    threads = len(set(threading.enumerate()) - before)
    tell(Watched(cpu, bare, threads, [str(lock.token) for lock in held if lock]))


def cpu_of(work: Callable[[], object]) -> float:
    """Return the seconds of CPU that this process uses meanwhile."""
    began = time.process_time()
    work()
    return time.process_time() - began


def bare_call(keys: int) -> Callable[[], object]:
    """Return the least that extending so many keys can be: one script, asked by redis-py."""
    client = redis.Redis.from_url(
        settings.CACHES["default"]["LOCATION"], single_connection_client=True
    )
    extend = client.register_script(BARE_EXTEND)
    names = [f":1:celery_safe:lock:bare:{number}" for number in range(keys)]
    extend(names, ["1000"])
    return lambda: extend(names, ["1000"])
