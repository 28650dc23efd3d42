"""
Cost of a free lock on Redis: acquire + release, as a ratio to the least it can cost.

The floor is raw redis-py with hiredis: SET NX PX, then a registered script that
compares and deletes. Beside it stand the same two commands without redis-py's pool, and the
scripts of our own store on a bare socket: the least that our locks can cost in Python.
Beside ours stand the locks that a Django project would use else.
"""

import socket
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

import redis
import redis_lock
from django.conf import settings
from django.core.cache import caches
from redis.lock import Lock

from django_celery_safe import cache_lock
from django_celery_safe.leases.holder import TOKEN_LENGTH, Holder, encode_holder
from django_celery_safe.locks.stores import get_store
from django_celery_safe.locks.stores.base import LockRequest
from django_celery_safe.locks.stores.redis_scripts import ACQUIRE, RELEASE
from tests.benchmarks.report import Figure, interleaved, least
from tests.benchmarks.tools import BACKENDS, caches_on, in_process, keep_locks_in
from tests.servers import RedisServer, ServerPool

#: The lease in every candidate, seconds.
LEASE = 30

ROUNDS = 40

#: From process to process the same code differs by some percent: where its memory lies, the order
#: of its dicts.
PROCESSES = 5

#: The floors: redis-py, its Connection without the pool, our scripts on that, and on a socket.
RAW, RAW_KEPT = "raw", "raw, kept Connection"
KEPT, BARE = "our scripts, kept Connection", "our scripts, bare socket"
FLOORS = (RAW, RAW_KEPT, KEPT, BARE)

#: Places of a lock that several hold, two of which are held.
PLACES = 3
LIMITED = f"limit={PLACES}"

COMPARE_AND_DELETE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""

Candidate = Callable[[], object]


def run(servers: ServerPool) -> list[Figure]:
    """Measure ours, the floors and the peers in the same rounds, then count round trips."""
    measured = [in_process(measure) for _ in range(PROCESSES)]

    def over(name: str, other: str) -> float:
        return statistics.fmean(times[name] / times[other] for times in measured)

    raw = statistics.fmean(times[RAW] for times in measured)
    server = servers.redis
    with caches_on(server):
        ours = {**{alias: ours_on(alias) for alias in BACKENDS}, LIMITED: ours_of_several()}
        figures = [Figure("raw, µs", raw, note=describe_floor())]
        for name in [name for name in measured[0] if name != RAW]:
            note = "ours" if name in ours else "floor" if name in FLOORS else "peer"
            figures.append(Figure(f"{name} / {RAW}", over(name, RAW), note=note))
        figures += [
            Figure(f"{alias} / {other}", over(alias, other), note="ours")
            for alias in BACKENDS
            for other in (BARE, KEPT)
        ]
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


def measure() -> dict[str, float]:
    """Return the least µs of each candidate, in a process and at a server of their own."""
    with ExitStack() as stack:
        server = stack.enter_context(RedisServer())
        stack.enter_context(caches_on(server))
        client = stack.enter_context(server.client())
        connection = redis.Connection(host=server.host, port=server.port)
        stack.callback(connection.disconnect)
        connection.connect()
        bare = stack.enter_context(socket.create_connection((server.host, server.port)))
        candidates = {RAW: floor(client), **floors_on(connection, bare, server)}
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


def floors_on(connection: Any, bare: socket.socket, server: RedisServer) -> dict[str, Candidate]:
    """Return the same without client and pool, and the scripts of our lock without our lock."""
    with server.client() as client:
        digest = client.script_load(COMPARE_AND_DELETE)
        for script in (ACQUIRE, RELEASE):
            client.script_load(script.source)
    holder = encode_holder("bare", Holder("benchmark", 4711, time.time(), True, lease=float(LEASE)))
    token, milliseconds = "0" * TOKEN_LENGTH, str(LEASE * 1000)
    keys = ("bare:lock", "bare:fence", "bare:locks")
    scripts = [
        packed("EVALSHA", ACQUIRE.sha, "3", *keys, token, milliseconds, holder),
        packed("EVALSHA", RELEASE.sha, "2", keys[0], keys[2], token),
    ]

    def ask_all(requests: Sequence[bytes]) -> None:
        for request in requests:
            connection.send_packed_command([request])
            assert connection.read_response()

    def ask_raw() -> None:
        ask_all([
            packed("SET", "kept", "token", "NX", "PX", milliseconds),
            packed("EVALSHA", str(digest), "1", "kept", "token"),
        ])  # fmt: skip

    def ask_bare() -> None:
        for request, answer in zip(scripts, (b"*2", b":1"), strict=True):
            bare.sendall(request)
            assert bare.recv(4096).startswith(answer)

    return {RAW_KEPT: ask_raw, KEPT: lambda: ask_all(scripts), BARE: ask_bare}


def packed(*words: str) -> bytes:
    """Return a command as the server reads it."""
    parts = [f"${len(word.encode())}\r\n{word}\r\n" for word in words]
    return "".join([f"*{len(words)}\r\n", *parts]).encode()


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

    def acquire_and_release() -> None:
        chosen["LOCK_CACHE"] = alias  # at the cost of nothing else
        lock = cache_lock(name, timeout=LEASE, **options)
        assert lock.acquire()
        assert lock.release()

    return acquire_and_release


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
