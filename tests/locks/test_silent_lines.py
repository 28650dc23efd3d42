"""Leases whose renewal gets no answer: a connection that fell silent, or a server that did."""

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connections, transaction
from pytest_django import Settings

from django_celery_safe import LockBackendError, cache_lock, conf, idempotent
from tests.clock import HeldClock
from tests.conftest import REDIS_BACKENDS, MakeDatabase
from tests.locks.lines import Line, line_to
from tests.processes import wait_for
from tests.servers import RedisServer
from tests.servers.databases import DatabaseKind

LEASE = 30


@pytest.fixture
def line(db_kind: DatabaseKind, make_database: MakeDatabase, settings: Settings) -> Iterator[Line]:
    """The line to the database where locks and records live; a file has none."""
    alias = make_database("mariadb" if db_kind == "mariadb" else "postgres")
    database: dict[str, Any] = connections.settings[alias]
    with line_to(int(database["PORT"])) as line:
        database["PORT"] = str(line.port)
        settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": alias}
        yield line
        connections[alias].close()


@pytest.fixture
def alias(line: Line) -> str:
    """The database behind the line."""
    return str(conf.get("LOCK_DATABASE"))


def silence_renewal(line: Line, clock: HeldClock) -> None:
    """Let the renewing thread's connection fall silent, and wait until a renewal is sent on it."""
    own = line.count
    clock.advance(11)
    assert line.count > own
    line.silence()
    clock.jump(11, settle=False)
    assert line.swallowed.wait(30), "nothing is renewed"


@pytest.mark.sql
def test_a_lock_outlives_the_silence_of_the_connection_that_renews_it(
    line: Line, losses: list[str], clock: HeldClock
) -> None:
    """While the database answers elsewhere, this and later locks of that length are renewed."""
    with cache_lock("held", timeout=LEASE) as lock:
        silence_renewal(line, clock)
        lock.ensure()
        lock.extend(LEASE + 1)
        with cache_lock("later", timeout=LEASE) as later:
            # The thread that hangs is replaced after two fifths of its lease.
            clock.jump(13, settle=False)
            wait_for(lambda: later.remaining > 25 and lock.remaining > 25, 30, "not renewed")
    assert not losses


@pytest.mark.sql
def test_finish_does_not_wait_for_a_renewal_that_hangs(
    line: Line, alias: str, clock: HeldClock
) -> None:
    """Inside atomic(), finish() returns and the transaction commits, as others can see."""
    with idempotent("work", timeout=LEASE, using=alias) as claim:
        silence_renewal(line, clock)
        with transaction.atomic(using=alias):
            claim.finish("done")
    with idempotent("work", using=alias) as repeat:
        assert (bool(repeat), repeat.result) == (False, "done")


def test_a_holder_that_asks_a_silent_server_gets_an_error_while_it_is_silent(
    clock: HeldClock, settings: Settings
) -> None:
    """As soon as the client's own timeout is over, although a renewal is under way."""
    with RedisServer() as server:
        settings.CACHES = {
            "default": {
                "BACKEND": REDIS_BACKENDS["django-redis"],
                "LOCATION": server.url,
                "OPTIONS": {"CONNECTION_POOL_KWARGS": {"socket_timeout": 0.5}},
            }
        }
        with cache_lock("silent", timeout=LEASE) as lock:
            clock.advance(11)
            with server.silence():
                clock.jump(11, settle=False)
                with pytest.raises(LockBackendError):
                    lock.ensure()
                with pytest.raises(LockBackendError):
                    lock.extend(60)
