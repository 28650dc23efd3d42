"""
Keeping many locks alive on Redis: what the renewing thread costs the process that holds them.

The floor is one bare script call over as many keys, in the same process and after each period:
both come after a long sleep. A process that holds nothing stands beside it.
"""

import statistics
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import redis
from django.conf import settings

from django_celery_safe import cache_lock, iter_locks
from tests.benchmarks.report import Figure
from tests.benchmarks.tools import caches_on
from tests.processes import start_in_process, tell
from tests.servers import ServerPool

#: Locks held by one process, their lease in s, and the thirds of a lease that are watched.
LOCKS, LEASE, PERIODS = 1000, 30.0, 9
PERIOD = LEASE / 3

#: Seconds until all is watched, at the most.
LONGEST = PERIOD * (PERIODS + 2) + 30

BARE_EXTEND = """
for i = 1, #KEYS do
    if redis.call('GET', KEYS[i]) then redis.call('PEXPIRE', KEYS[i], ARGV[1]) end
end
return 0
"""


class Watched(NamedTuple):
    """The figures of a process that held locks."""

    #: CPU seconds that it used in each period, while it only waited.
    cpu: list[float]
    #: CPU seconds of one bare script call over as many keys, after each period.
    bare: list[float]
    #: Threads that its locks started.
    threads: int
    #: Tokens of the locks that it trusted in the end.
    tokens: list[str]


def run(servers: ServerPool) -> list[Figure]:
    """Watch a process with locks and one without, side by side, after the first renewal."""
    server = servers.redis
    server.flush()
    with (
        caches_on(server),
        start_in_process(hold, 0) as idle,
        start_in_process(hold, LOCKS) as holder,
    ):
        idle.receive(LONGEST)
        holder.receive(LONGEST)
        with server.counting() as count:
            held: Watched = holder.receive(LONGEST)
            nothing: Watched = idle.receive(LONGEST)
        still_held = len({lock.token for lock in iter_locks()}.intersection(held.tokens))
    requests = count.commands.get("evalsha", 0) + count.commands.get("eval", 0)
    cpu, idle_cpu = statistics.median(held.cpu), statistics.median(nothing.cpu)
    ratio, lost = cpu / statistics.median(held.bare), LOCKS - still_held
    return [
        Figure("CPU of a period / bare script", ratio, note=f"{LOCKS:,} locks"),
        Figure("% of a core", cpu / PERIOD * 100, note=f"renewed each {PERIOD:g} s"),
        Figure("% of a core, no locks", idle_cpu / PERIOD * 100, note="at the same time"),
        Figure("renewing threads", held.threads),
        Figure("locks lost", lost, note=f"after {PERIODS * PERIOD:g} s"),
        Figure("requests in a period", requests / PERIODS - 1, note="without the bare one"),
    ]


def hold(locks: int) -> None:
    """Hold locks, do nothing else, and tell what that took after the first renewal."""
    before = set(threading.enumerate())
    held = [cache_lock(f"renewal:{number}", timeout=LEASE) for number in range(locks)]
    assert all(lock.acquire() for lock in held)
    time.sleep(PERIOD * 1.1)
    url = settings.CACHES["default"]["LOCATION"]
    client = redis.Redis.from_url(url, single_connection_client=True)
    extend = client.register_script(BARE_EXTEND)
    names = [f":1:celery_safe:lock:bare:{number}" for number in range(locks)]
    if names:
        extend(names, ["1000"])  # connects
    tell("renewed once")
    cpu, bare = [], []
    for _ in range(PERIODS):
        cpu.append(cpu_of(lambda: time.sleep(PERIOD)))
        if names:
            bare.append(cpu_of(lambda: extend(names, ["1000"])))
    threads = len(set(threading.enumerate()) - before)
    tell(Watched(cpu, bare, threads, [str(lock.token) for lock in held if lock]))


def cpu_of(work: Callable[[], object]) -> float:
    """Return the seconds of CPU that this process uses meanwhile."""
    began = time.process_time()
    work()
    return time.process_time() - began
