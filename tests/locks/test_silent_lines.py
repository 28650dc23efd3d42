"""Leases whose renewal gets no answer: a connection that fell silent, or a server that did."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connections, transaction
from pytest_django import Settings

from django_celery_safe import LockBackendError, cache_lock, conf, idempotent
from tests.conftest import REDIS_BACKENDS, MakeDatabase
from tests.locks.lines import Line, line_to
from tests.locks.renewals import wait_for_renewal
from tests.processes import wait_for
from tests.servers import RedisServer

#: Long enough for a second try on a busy machine, s.
LEASE = 10


@pytest.fixture(params=["postgres", "mariadb"])
def line(
    request: pytest.FixtureRequest, make_database: MakeDatabase, settings: Settings
) -> Iterator[Line]:
    """The line to the database where locks and records live."""
    alias = make_database(request.param)
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


def silence_renewal(line: Line) -> None:
    """Let the renewing thread's connection fall silent, and wait until a renewal is sent on it."""
    own = line.count
    wait_for(lambda: line.count > own, 30, "the renewing thread has not connected")
    line.silence()
    assert line.swallowed.wait(30), "nothing is renewed"


def test_a_lock_outlives_the_silence_of_the_connection_that_renews_it(
    line: Line, losses: list[str]
) -> None:
    """While the database answers elsewhere, this and later locks of that length are renewed."""
    with cache_lock("held", timeout=LEASE) as lock:
        silence_renewal(line)
        lock.ensure()
        lock.extend(LEASE + 1)
        with cache_lock("later", timeout=LEASE) as later:
            wait_for_renewal("later")
            wait_for_renewal("held")
            assert later.held
        assert lock.held
    assert not losses


def test_finish_does_not_wait_for_a_renewal_that_hangs(line: Line, alias: str) -> None:
    """Inside atomic(), finish() returns and the transaction commits, as others can see."""
    with idempotent("work", timeout=LEASE, using=alias) as claim:
        silence_renewal(line)
        with transaction.atomic(using=alias):
            claim.finish("done")
    with idempotent("work", using=alias) as repeat:
        assert (bool(repeat), repeat.result) == (False, "done")


@pytest.mark.parametrize(
    "ask", [lambda lock: lock.ensure(), lambda lock: lock.extend(20)], ids=["ensure", "extend"]
)
def test_a_holder_that_asks_a_silent_server_gets_an_error_while_it_is_silent(
    ask: Callable[[Any], None], settings: Settings
) -> None:
    """As soon as the client's own timeout is over, although the renewal is tried all the time."""
    with RedisServer() as server:
        settings.CACHES = {
            "default": {
                "BACKEND": REDIS_BACKENDS["django-redis"],
                "LOCATION": server.url,
                "OPTIONS": {"CONNECTION_POOL_KWARGS": {"socket_timeout": 0.5}},
            }
        }
        with cache_lock("silent", timeout=3) as lock:
            wait_for_renewal("silent")
            with server.silence():
                # From now on, a renewal is always under way.
                wait_for(lambda: lock.remaining < 1, 30)
                with pytest.raises(LockBackendError):
                    ask(lock)
