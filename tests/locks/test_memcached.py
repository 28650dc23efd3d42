"""Locks in memcached: a server in trouble, odd values, listing, leases of whole seconds."""

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

import pytest
from pymemcache.client.base import Client
from pytest_django import Settings

from django_celery_safe import ConfigurationError, LockBackendError, cache_lock, find_lock
from django_celery_safe.leases.holder import Holder, hashed_name
from django_celery_safe.leases.lease import Renewal
from django_celery_safe.locks.stores import get_store
from tests.caches import cache_at
from tests.clock import HeldClock
from tests.conftest import MakeCaches
from tests.locks.lines import connections_to
from tests.locks.renewals import acquired, get_lock, take_lock
from tests.processes import run_in_processes, wait_for
from tests.servers import MemcachedServer

#: Timeout of the clients of servers that stop to answer, s.
TIMEOUT = 0.3
THIRTY_DAYS = 30 * 24 * 3600 - 1


def use(settings: Settings, server: MemcachedServer, **options: Any) -> None:
    """Let locks live in this server, by a client with these OPTIONS."""
    settings.CACHES = cache_at(server.url, "memcached", OPTIONS=options)


@pytest.fixture
def memcached(
    settings: Settings, memcached_cache_settings: MakeCaches, memcached_server: MemcachedServer
) -> MemcachedServer:
    """The private memcached that tests share, emptied, with the locks in it."""
    settings.CACHES = memcached_cache_settings()
    return memcached_server


@pytest.fixture
def fragile(settings: Settings) -> Iterator[MemcachedServer]:
    """A memcached of this test alone, to be stopped and started, with the locks in it."""
    with MemcachedServer() as server:
        use(settings, server)
        yield server


# The server gone, restarted, silent


@pytest.mark.parametrize("options", [{}, {"ignore_exc": True, "use_pooling": True}], ids=str)
def test_a_killed_server_is_not_a_held_lock(
    options: dict[str, Any], fragile: MemcachedServer, settings: Settings
) -> None:
    """With the server gone every request is an error, and nobody is told that a lock is held."""
    use(settings, fragile, **options)
    held = acquired("held")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(cache_lock("held", blocking_timeout=20).acquire)
        asked = fragile.count("cmd_set")
        wait_for(lambda: fragile.count("cmd_set") > asked, 20, "nobody waits")
        fragile.kill()
        with pytest.raises(LockBackendError, match="did not answer to acquire"):
            waiting.result(30)
    requests: dict[str, Callable[[], object]] = {
        "acquire": cache_lock("new").acquire,
        "extend": held.ensure,
        "peek": lambda: find_lock("held"),
        "release": held.release,
    }
    for action, request in requests.items():
        with pytest.raises(LockBackendError, match=rf"memcached\) did not answer to {action} "):
            request()


def test_the_first_command_after_a_restart_costs_no_error(fragile: MemcachedServer) -> None:
    """A connection that the server closed since the last command is replaced unnoticed."""
    requests: list[Callable[[], object]] = [
        cache_lock("restarted").acquire,
        lambda: find_lock("restarted"),
        lambda: get_store().release("restarted", "a" * 32),
        lambda: get_store().extend([Renewal("restarted", "a" * 32, 10)]),
    ]
    for request in requests:
        assert find_lock("restarted") is None
        fragile.restart()
        request()
        fragile.flush()


@pytest.mark.parametrize("answer", [b"VALUE\r\n", b"VALUE x y z\r\n", b"\r\n", b"a b"])
def test_a_server_that_answers_nonsense_is_an_error(answer: bytes, settings: Settings) -> None:
    """If it is no memcached, a lock counts neither as held nor as free."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def reply() -> None:
            with suppress(OSError):  # the listener is closed
                while True:
                    with listener.accept()[0] as client:
                        client.recv(1000)
                        client.sendall(answer)

        threading.Thread(target=reply, daemon=True).start()
        location = f"127.0.0.1:{listener.getsockname()[1]}"
        settings.CACHES = cache_at(location, "memcached")
        store, token = get_store(), "t" * 32
        asks: list[Callable[[], object]] = [
            lambda: cache_lock("x").acquire(),
            lambda: find_lock("x"),
            lambda: store.release("x", token),
            lambda: store.extend([Renewal("x", token, 10)]),
        ]
        for ask in asks:
            with pytest.raises(LockBackendError):
                ask()


def test_a_silent_server_is_an_error(
    fragile: MemcachedServer, settings: Settings, caplog: pytest.LogCaptureFixture, clock: HeldClock
) -> None:
    """A server that stops to answer is an error after the timeout; then all is as before."""
    use(settings, fragile, timeout=TIMEOUT, connect_timeout=TIMEOUT)
    with cache_lock("kept", timeout=600) as kept:
        token = kept.token
        with ThreadPoolExecutor(1) as pool:
            waiter = cache_lock("kept")
            assert pool.submit(waiter.acquire).result(20) is False
            waiting = pool.submit(waiter.acquire, None)
            with fragile.silence():
                with pytest.raises(LockBackendError, match=r"acquire.*time"):
                    cache_lock("silent").acquire()
                with pytest.raises(LockBackendError, match="extend"):
                    kept.ensure()
                with pytest.raises(LockBackendError, match="acquire"):
                    waiting.result(30)
                clock.advance(201)
                wait_for(lambda: "could not be renewed" in caplog.text, 20, "no renewal failed")
                # Within its lease nobody else can have it.
                assert kept.held
        # A late answer of the server is not taken for another request's.
        kept.ensure()
        found = get_lock("kept")
        assert (found.name, found.token) == ("kept", token)
    assert find_lock("kept") is None


def test_a_renewal_waits_as_told(fragile: MemcachedServer, settings: Settings) -> None:
    """A renewal gives up after its own time or the client's, whichever is less; others wait on."""
    patient = get_store()
    take_lock("kept", "a" * 32)
    use(settings, fragile, timeout=0.1, connect_timeout=0.1)
    impatient = get_store()
    renewal = [Renewal("kept", "a" * 32, 60)]
    with ThreadPoolExecutor(3) as pool:
        with fragile.silence():
            for asked in (
                pool.submit(patient.extend, renewal, within=0.1),
                pool.submit(impatient.extend, renewal, within=60),
            ):
                wait_for(asked.done, 10, "it waits still")
                assert isinstance(asked.exception(), LockBackendError)
            # It has no limit, whatever others were told on the way.
            waiting = pool.submit(patient.extend, renewal)
            with pytest.raises(TimeoutError):
                waiting.result(0.5)
            assert not waiting.done()
        assert waiting.result(10) == [True]
    assert patient.extend(renewal, within=10) == [True]
    assert connections_to(fragile.port) == 1


def test_a_server_without_cas_hangs_nobody(settings: Settings) -> None:
    """On a server without compare-and-set (-C) a lock is refused or works; nothing hangs."""

    def lock_once() -> None:
        with suppress(ConfigurationError, LockBackendError), cache_lock("no cas"):
            pass

    with MemcachedServer(arguments=("-C",)) as server, ThreadPoolExecutor(1) as pool:
        use(settings, server)
        locking = pool.submit(lock_once)
        try:
            locking.result(30)
        finally:
            server.kill()


# Leases


@pytest.mark.parametrize("seconds", [2, 2.5, THIRTY_DAYS])
def test_an_item_outlives_its_lease_by_a_tick(seconds: float, memcached: MemcachedServer) -> None:
    """
    On the server's clock an item ends at least a second after its lease.

    That clock may be almost a second behind, and then go on by two at once.
    """
    store, token = get_store(), "a" * 32
    began_at = memcached.count("time")
    take_lock("ticking", token, seconds)
    assert end_of(memcached, "ticking") >= began_at + seconds + 1
    for within in (None, 5.0):
        # From a lease that would end much later, or else an extension could do nothing.
        store.extend([Renewal("ticking", token, THIRTY_DAYS)])
        began_at = memcached.count("time")
        assert store.extend([Renewal("ticking", token, seconds)], within) == [True]
        latest = memcached.count("time") + seconds + 3
        assert began_at + seconds + 1 <= end_of(memcached, "ticking") <= latest


def end_of(server: MemcachedServer, name: str) -> int:
    """Return when the server itself says that a lock's item ends, s since the epoch."""
    with closing(server.client()) as client:
        dump = client.raw_command(b"lru_crawler metadump all", b"END\r\n")
    ends = re.findall(rf"key=\S*{hashed_name(name)[-64:]} exp=(\d+) ", dump.decode())
    assert len(ends) == 1
    return int(ends[0])


@pytest.mark.parametrize("seconds", [1.9, THIRTY_DAYS + 1])
def test_a_lease_that_can_not_be_kept_is_refused(
    seconds: float, memcached: MemcachedServer, settings: Settings
) -> None:
    """Leases below 2 s and of 30 days and more are an error that says what is possible."""
    with pytest.raises(ConfigurationError, match="from 2 s to 2591999 s"):
        cache_lock("refused", timeout=seconds).acquire()
    settings.DJANGO_CELERY_SAFE = {"LOCK_TIMEOUT": seconds}
    with pytest.raises(ConfigurationError, match="from 2 s to 2591999 s"):
        cache_lock("refused").acquire()
    assert find_lock("refused") is None


def test_a_release_wins_against_a_renewal(
    memcached: MemcachedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release frees the lock for good, though a renewal comes between its two requests."""
    store, token = get_store(), "a" * 32
    take_lock("raced", token)
    cas, renewed = Client.cas, list[bool]()

    def renew_before(client: Client, *args: Any, **options: Any) -> Any:
        if not renewed:
            renewed.append(False)
            renewed[:] = store.extend([Renewal("raced", token, 60)])
        return cas(client, *args, **options)

    monkeypatch.setattr(Client, "cas", renew_before)
    before = memcached.count("cas_badval")
    assert store.release("raced", token) is True
    assert renewed == [True]
    assert memcached.count("cas_badval") == before + 1
    assert store.peek("raced") is None


# Keys and options


APART: dict[str, dict[str, Any]] = {
    "default": {},
    "prefix": {"KEY_PREFIX": "shop"},
    "version": {"KEY_PREFIX": "shop", "VERSION": 2},
    "option": {"OPTIONS": {"key_prefix": b"site:"}},
}


def test_caches_with_other_keys_do_not_meet(
    settings: Settings, memcached_cache_settings: MakeCaches
) -> None:
    """KEY_PREFIX, VERSION and the client's prefix keep locks apart."""
    settings.CACHES = {}
    for alias, options in APART.items():
        settings.CACHES |= memcached_cache_settings(alias, **options)
    locks = {}
    for alias in APART:
        settings.DJANGO_CELERY_SAFE = {"LOCK_CACHE": alias}
        locks[alias] = cache_lock("same")
        assert locks[alias].acquire()
    for alias, lock in locks.items():
        settings.DJANGO_CELERY_SAFE = {"LOCK_CACHE": alias}
        found = get_lock("same")
        assert (found.name, found.token) == ("same", lock.token)
        assert not cache_lock("same").acquire()
        # Gone, it can't be taken for the next one.
        assert lock.release()


# Threads and forks


def use_own_locks(number: int, times: int = 100) -> str:
    """Take and free a lock of one's own, checking that each answer is one's own."""
    store = get_store()
    name, token = f"own:{number}", f"{number:032}"
    for _ in range(times):
        take_lock(name, token, by=Holder("here", number))
        found = get_lock(name)
        assert (found.token, found.holder.pid) == (token, number)
        assert store.extend([Renewal(name, token, 60)]) == [True]
        assert store.release(name, token) is True
    return "all right"


def test_threads_are_not_disturbed_by_a_close(memcached: MemcachedServer) -> None:
    """The renewing thread closes the store, with its last lease, and others see no error."""
    store = get_store()
    ended = threading.Event()

    def close() -> None:
        while not ended.is_set():
            store.close()
            time.sleep(0.005)

    with ThreadPoolExecutor(5) as pool:
        closing = pool.submit(close)
        try:
            assert list(pool.map(use_own_locks, range(4))) == ["all right"] * 4
        finally:
            ended.set()
    closing.result()


def test_a_fork_has_connections_of_its_own(memcached: MemcachedServer) -> None:
    """Parent and child go on at once after a fork, with an open connection, and mix up nothing."""
    assert run_in_processes(fork_and_go_on, 1) == [("all right", "all right", "refused")]


def fork_and_go_on() -> tuple[str, ...]:
    """Fork with a lock held and a connection open; return how parent and child fared."""
    lock = acquired("parent's")
    use_own_locks(0, 1)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        outcome = "failed"
        with suppress(BaseException):
            outcome = use_own_locks(1)
        os.write(writer, outcome.encode())
        os._exit(0)
    outcome = use_own_locks(2)
    os.waitpid(child, 0)
    lock.ensure()
    refused = "refused" if not cache_lock("parent's").acquire() else "taken"
    assert lock.release()
    return outcome, os.read(reader, 100).decode(), refused
