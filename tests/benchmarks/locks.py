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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from itertools import product
from typing import Any

import redis
import redis_lock
from django.core.cache import caches
from django.core.cache.backends.base import BaseCache
from django.test import override_settings
from redis.lock import Lock

from django_celery_safe import cache_lock
from django_celery_safe.leases.holder import TOKEN_LENGTH, Holder, encode_holder
from django_celery_safe.locks.stores import locate
from django_celery_safe.locks.stores.redis_scripts import ACQUIRE, RELEASE
from tests.benchmarks.report import Figure, interleaved, ratio
from tests.servers import RedisServer, ServerPool

BACKENDS = {
    "django-redis": "django_redis.cache.RedisCache",
    "Django's RedisCache": "django.core.cache.backends.redis.RedisCache",
}

#: The lease in every candidate, seconds.
LEASE = 30

ROUNDS = 40

#: Acquisitions over which round trips are counted.
COUNTED = 200

#: The same, where each is held for a while: how many, and s of lease and of work.
COUNTED_HELD, HELD_LEASE, WORK = 3, 3.0, 0.75

FLOOR = "raw"

#: The floor by one Connection of redis-py, which ours uses too.
KEPT = "raw, kept Connection / raw"

#: The scripts of our store on a socket, without any client.
BARE = "our scripts, bare socket"

#: The same scripts on a Connection of redis-py: what its client costs without its pool.
KEPT_SCRIPTS = "our scripts, kept Connection"

#: Places of a lock that several hold, two of which are held.
PLACES = 3
LIMITED = f"limit={PLACES}"

COMPARE_AND_DELETE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""

Candidate = Callable[[], object]


def run(servers: ServerPool) -> list[Figure]:
    """Measure ours, the floor and the peers in the same rounds, then count round trips."""
    server = servers.redis
    with ExitStack() as stack:
        stack.enter_context(caches_on(server))
        client = stack.enter_context(server.client())
        ours = {f"{alias} / {FLOOR}": ours_on(alias) for alias in BACKENDS}
        ours[f"{LIMITED} / {FLOOR}"] = ours_of_several()
        bare = stack.enter_context(socket.create_connection((server.host, server.port)))
        connection = stack.enter_context(connection_to(server))
        floors = {
            FLOOR: floor(client),
            KEPT: floor_on_connection(connection),
            f"{KEPT_SCRIPTS} / {FLOOR}": our_scripts_on_connection(connection, server),
            f"{BARE} / {FLOOR}": our_scripts_on(bare, server),
        }
        candidates = {**floors, **ours, **peers(client)}
        samples = interleaved(candidates, ROUNDS)
        figures = [Figure("raw, µs", statistics.median(samples[FLOOR]), note=describe_floor())]
        for name in candidates:
            if name != FLOOR:
                note = "ours" if name in ours else "floor" if name in floors else "peer"
                figures.append(Figure(name, ratio(samples, name, FLOOR), note=note))
        for alias, least in product(BACKENDS, (BARE, KEPT_SCRIPTS)):
            value = ratio(samples, f"{alias} / {FLOOR}", f"{least} / {FLOOR}")
            figures.append(Figure(f"{alias} / {least}", value, note="ours"))
        figures += [count_round_trips(server, alias) for alias in (*BACKENDS, LIMITED)]
        return figures + [count_held_round_trips(server, alias) for alias in BACKENDS]


def caches_on(server: RedisServer) -> override_settings:
    """Return the settings with one cache for each of Django's ways to Redis."""
    entries = {
        alias: {"BACKEND": backend, "LOCATION": server.url} for alias, backend in BACKENDS.items()
    }
    return override_settings(CACHES={"default": entries["django-redis"], **entries})


def floor(client: "redis.Redis") -> Candidate:
    """The least that an owner-checked lock with a lease can do: two bare requests."""
    release = client.register_script(COMPARE_AND_DELETE)

    def acquire_and_release() -> None:
        assert client.set("floor", "token", nx=True, px=LEASE * 1000)
        assert release(keys=["floor"], args=["token"])

    return acquire_and_release


@contextmanager
def connection_to(server: RedisServer) -> Iterator[Any]:
    """Open a Connection of redis-py, with hiredis where that is there."""
    connection = redis.Connection(host=server.host, port=server.port)
    connection.connect()
    try:
        yield connection
    finally:
        connection.disconnect()


def floor_on_connection(connection: Any) -> Candidate:
    """Return the floor's two commands without client and pool, packed by hand."""

    def ask(*words: str) -> Any:
        connection.send_packed_command([packed(words)])
        return connection.read_response()

    digest = ask("SCRIPT", "LOAD", COMPARE_AND_DELETE).decode()

    def acquire_and_release() -> None:
        assert ask("SET", "kept", "token", "NX", "PX", str(LEASE * 1000))
        assert ask("EVALSHA", digest, "1", "kept", "token")

    return acquire_and_release


def our_requests(server: RedisServer) -> tuple[bytes, bytes]:
    """Return what our lock asks, with a holder as ours has it, and let the server know both."""
    for script in (ACQUIRE, RELEASE):
        with server.client() as client:
            client.script_load(script.source)
    holder = encode_holder("bare", Holder("benchmark", 4711, time.time(), True, lease=float(LEASE)))
    token = "0" * TOKEN_LENGTH
    keys = ("bare:lock", "bare:fence", "bare:locks")
    acquire = packed(("EVALSHA", ACQUIRE.sha, "3", *keys, token, str(LEASE * 1000), holder))
    return acquire, packed(("EVALSHA", RELEASE.sha, "2", keys[0], keys[2], token))


def our_scripts_on(bare: socket.socket, server: RedisServer) -> Candidate:
    """Return the requests of our lock and nothing around them."""
    acquire, release = our_requests(server)

    def acquire_and_release() -> None:
        bare.sendall(acquire)
        assert bare.recv(4096).startswith(b"$16")
        bare.sendall(release)
        assert bare.recv(4096).startswith(b"*2\r\n:1")

    return acquire_and_release


def our_scripts_on_connection(connection: Any, server: RedisServer) -> Candidate:
    """Return the same by redis-py's Connection, which packs nothing here."""
    acquire, release = our_requests(server)

    def acquire_and_release() -> None:
        for request in (acquire, release):
            connection.send_packed_command([request])
            assert connection.read_response()

    return acquire_and_release


def packed(words: Sequence[str]) -> bytes:
    """Return a command as the server reads it."""
    parts = [f"${len(word.encode())}\r\n{word}\r\n" for word in words]
    return "".join([f"*{len(words)}\r\n", *parts]).encode()


def ours_of_several() -> Candidate:
    """Return our lock of several holders, of which all but one hold it already."""
    store = locate("django-redis").store()
    for number in range(1, PLACES):
        # The same tokens each time: to ask again takes no other place.
        token = f"{number:0{TOKEN_LENGTH}}"
        store.acquire("limited", token, 3600.0, Holder("benchmark"), limit=PLACES)

    def acquire_and_release() -> None:
        lock = cache_lock("limited", timeout=LEASE, cache="django-redis", limit=PLACES)
        assert lock.acquire()
        assert lock.release()

    return acquire_and_release


def ours_on(alias: str) -> Candidate:
    """Return our lock with its defaults, a new one each time, as a ``with`` makes it."""

    def acquire_and_release() -> None:
        lock = cache_lock("benchmark", timeout=LEASE, cache=alias)
        assert lock.acquire()
        assert lock.release()

    return acquire_and_release


def peers(client: "redis.Redis") -> dict[str, Candidate]:
    """Return the locks that projects use today."""
    django_redis: Any = caches["django-redis"]

    def redis_py() -> None:
        lock = Lock(client, "redis-py", timeout=LEASE)
        assert lock.acquire(blocking=False)
        lock.release()

    def django_redis_lock() -> None:
        lock = django_redis.lock("django-redis", timeout=LEASE)
        assert lock.acquire(blocking=False)
        lock.release()

    def python_redis_lock() -> None:
        lock = redis_lock.Lock(client, "python-redis-lock", expire=LEASE)
        assert lock.acquire(blocking=False)
        lock.release()

    return {
        "redis-py Lock / raw": redis_py,
        "django-redis cache.lock / raw": django_redis_lock,
        "python-redis-lock / raw": python_redis_lock,
        **{f"cookbook, {alias} / raw": cookbook_on(caches[alias]) for alias in BACKENDS},
    }


def cookbook_on(cache: BaseCache) -> Candidate:
    """Return the recipe of Celery's task cookbook, as written there."""

    @contextmanager
    def memcache_lock(lock_id: str, oid: str) -> Iterator[bool]:
        timeout_at = time.monotonic() + LEASE - 3
        status = cache.add(lock_id, oid, LEASE)
        try:
            yield status
        finally:
            if time.monotonic() < timeout_at and status:
                cache.delete(lock_id)

    def acquire_and_release() -> None:
        with memcache_lock("cookbook", "oid") as acquired:
            assert acquired

    return acquire_and_release


def count_round_trips(server: RedisServer, alias: str) -> Figure:
    """Count at the server what our acquire + release asks of it."""
    acquire_and_release = ours_of_several() if alias == LIMITED else ours_on(alias)
    acquire_and_release()
    with server.counting() as count:
        for _ in range(COUNTED):
            acquire_and_release()
    name = f"{alias}: round trips"
    note = "at the server; renew=True, the default"
    return Figure(name, count.round_trips / COUNTED, note=note)


def count_held_round_trips(server: RedisServer, alias: str) -> Figure:
    """Count the same with work that ends before a third of the lease has passed."""
    ours_on(alias)()
    with server.counting() as count:
        for _ in range(COUNTED_HELD):
            with cache_lock("benchmark", timeout=HELD_LEASE, cache=alias) as lock:
                assert lock
                time.sleep(WORK)
    name = f"{alias}: trips, with work"
    note = f"{WORK:g} s of work, lease {HELD_LEASE:g} s, renew=True"
    return Figure(name, count.round_trips / COUNTED_HELD, note=note)


def describe_floor() -> str:
    """Say what the floor was measured with."""
    parser = "hiredis" if find_spec("hiredis") else "no hiredis"
    return f"redis-py {redis.__version__}, {parser}"
