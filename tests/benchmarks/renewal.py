"""
Keeping many locks alive on Redis: what the renewing thread costs the process that holds them.

The floor is a process with the same imports that sleeps as long and holds nothing.
"""

import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from django_celery_safe import cache_lock, iter_locks
from tests.benchmarks.locks import caches_on
from tests.benchmarks.report import Figure
from tests.processes import start_in_process, tell
from tests.servers import RedisServer, ServerPool

#: Locks held by one process, their lease in s, and the thirds of a lease that are watched.
LOCKS, LEASE, PERIODS = 1000, 30.0, 3

#: Part of a period by which the watch begins, and ends, after a renewal is due.
MARGIN = 0.1


class Watched(NamedTuple):
    """What a process that held locks found out about itself, and the server about it."""

    #: CPU seconds that it used while it only waited.
    cpu: float
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
    return [
        Figure("% of a core", held.cpu / watched * 100, note=f"{locks:,} locks, each {period:g} s"),
        Figure("% of a core, no locks", floor.cpu / watched * 100, note="floor, at the same time"),
        Figure("CPU of a period, ms", held.cpu / periods * 1000),
        Figure("renewing threads", held.threads),
        Figure("locks lost", locks - still_held, note=f"after {watched:g} s"),
        Figure("requests in a period", requests / periods, note="counted at the server"),
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
    tell("renewed once")
    began = time.process_time()
    time.sleep(lease / 3 * periods)
    cpu = time.process_time() - began
    threads = len(set(threading.enumerate()) - before)
    tell(Watched(cpu, threads, [str(lock.token) for lock in held if lock]))
