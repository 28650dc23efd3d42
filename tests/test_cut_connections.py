"""Sessions that a server has ended, as it does when they are idle for long: nobody notices."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import Any

import pytest
from celery.signals import after_task_publish
from django.db import DatabaseError, connections, transaction
from django.db.models import Value
from django.db.models.functions import Concat
from pytest_django import Settings

from django_celery_safe import find_lock, idempotent, stages
from django_celery_safe.models import OutboxMessage, StageRun
from django_celery_safe.sending.housekeeping import prune_some
from django_celery_safe.sending.relay import Relay
from django_celery_safe.signals import lock_lost
from tests.app.models import Person
from tests.app.tasks import add
from tests.concurrency.mailbox import Mailbox
from tests.conftest import MakeDatabase
from tests.idempotency.test_claims_in_trouble import gateway
from tests.idempotency.test_flags_race import end_sessions
from tests.listening import receiving
from tests.locks.lines import Line
from tests.locks.renewals import acquired
from tests.processes import wait_for
from tests.routing import AllIn
from tests.sending.carrying import Carried
from tests.sending.conftest import dying_sender, hearing
from tests.servers import PostgresServer
from tests.servers.databases import SERVERS, DatabaseKind, end_own_session
from tests.statements import at_statement

__all__ = ["gateway"]


@pytest.fixture
def alias(make_database: MakeDatabase, db_kind: DatabaseKind, settings: Settings) -> str:
    """The alias of a database with a server, for everything that this app stores."""
    alias = make_database(db_kind if db_kind in SERVERS else "postgres")
    settings.DATABASE_ROUTERS = [AllIn(alias)]
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": alias}
    return alias


def lock(alias: str) -> None:
    held = acquired("x", timeout=60)
    end_own_session(alias)
    held.ensure()
    end_own_session(alias)
    assert held.release()


def claim(alias: str) -> None:
    with idempotent("x", using=alias) as claim:
        assert claim
        end_own_session(alias)
        claim.ensure()
        end_own_session(alias)
        claim.finish(1)
    end_own_session(alias)
    with idempotent("x", using=alias) as again:
        assert not again


def once(alias: str) -> None:
    connections[alias].close()  # what the project itself writes is not repeated
    guarantees: list[Any] = ["at_least_once", "at_most_once"]
    for guarantee in guarantees:
        person = Person.everyone.using(alias).create()
        end_own_session(alias)
        with Person.do_once(
            person.pk, "is_welcome_email_sent", using=alias, guarantee=guarantee
        ) as row:
            assert row is not None


def start(alias: str) -> None:
    run = stages.start([(add, 1)])
    end_own_session(alias)
    assert run.progress.total == 1
    end_own_session(alias)
    run.abort()
    end_own_session(alias)
    prune_some(StageRun.objects.using(alias), 1, 1)
    assert not StageRun.objects.using(alias).exists()


#: What a process may do that was idle for long.
USES: dict[str, Callable[[str], object]] = {
    "a lock": lock,
    "a claim": claim,
    "do_once": once,
    "stages": start,
    "a listing": lambda alias: list(OutboxMessage.objects.using(alias).pending()),
    "a deletion": lambda alias: prune_some(OutboxMessage.objects.using(alias).done(), 10, 10),
}


@pytest.mark.sql
def test_a_session_that_the_server_has_ended_is_replaced(alias: str) -> None:
    """Outside a transaction, a process that was idle for long goes on with a new connection."""
    for use in USES.values():
        end_own_session(alias)
        use(alias)


def test_the_other_sessions_of_a_pool_are_replaced_too(
    postgres_alias: str, postgres_server: PostgresServer, mailbox: Mailbox
) -> None:
    """A restarted server has ended all sessions of a pool, and the next send goes out."""
    connection: Any = connections[postgres_alias]
    connection.settings_dict["OPTIONS"] = {"pool": {"min_size": 3, "max_size": 3, "timeout": 60}}
    carried = Carried(mailbox, postgres_alias)
    name = connections.settings[postgres_alias]["NAME"]
    try:
        carried.send(1)
        wait_for(lambda: len(postgres_server.sessions(name)) == 3, 60)
        end_sessions(postgres_server, postgres_alias)
        assert carried.send(2).args == [2]
    finally:
        connection.close()
        connection.close_pool()


def test_a_transaction_whose_session_was_ended_is_not_repeated(
    alias: str, mailbox: Mailbox
) -> None:
    """Its earlier statements are lost, so the error reaches the code that began it."""
    carried = Carried(mailbox, alias)
    with pytest.raises(DatabaseError), transaction.atomic(using=alias):
        Person.everyone.using(alias).create(pk=1)
        end_own_session(alias)
        carried.task.apply_async_on_commit(using=alias)
    assert not Person.everyone.using(alias).exists()
    assert not carried.rows.exists()
    assert not mailbox.take()


def test_a_relay_whose_session_was_ended_reports_no_outage(
    alias: str, mailbox: Mailbox, caplog: pytest.LogCaptureFixture
) -> None:
    """It may have waited for the broker for long; the next batch is sent at once."""
    carried = Carried(mailbox, alias)
    stop = threading.Event()
    relay = Relay(alias)
    relay.drain()
    with dying_sender(alias):
        carried.task.apply_async_on_commit(("x",), using=alias)
    carried.make_due()
    end_own_session(alias)
    with receiving(after_task_publish, lambda **kwargs: stop.set()):
        relay.run(stop)
    assert mailbox.take_one().args == ["x"]
    assert "can't be reached" not in caplog.text


def test_the_wrapper_of_a_block_that_connects_ends_with_the_block(postgres_alias: str) -> None:
    """A project that counts or refuses the queries of a block does so in the block only."""

    def connect_in_block() -> int:
        with closing(connections[postgres_alias]):  # of this thread, and not opened yet
            with at_statement(postgres_alias, "", bool) as seen:
                Person.everyone.using(postgres_alias).exists()
            Person.everyone.using(postgres_alias).exists()
            return len(seen)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(connect_in_block).result() == 1


def test_a_change_of_a_projects_table_is_not_repeated(gateway: tuple[str, str, Line]) -> None:
    """It may look at rows of this app; if its answer is lost, only the project can repeat it."""
    direct, through, way = gateway
    person = Person.everyone.using(direct).create(pk=1)
    connections[through].ensure_connection()
    nobody = OutboxMessage.objects.values("task")
    before = person.email
    longer = Person.everyone.using(through).exclude(email__in=nobody)
    with pytest.raises(DatabaseError):
        way.cut_after = 0
        longer.update(email=Concat("email", Value("x")))
    person.refresh_from_db()
    assert person.email == f"{before}x"


@contextmanager
def answer_lost(alias: str, way: Line, statement: str) -> Iterator[None]:
    """Lose the answer to the first statement of the block that begins so."""
    connections[alias].ensure_connection()
    with at_statement(alias, statement, partial(setattr, way, "cut_after", 0), times=1) as met:
        yield
    assert met
    assert way.cut_after is None


def test_a_lock_whose_release_gets_no_answer_is_free(
    gateway: tuple[str, str, Line], settings: Settings
) -> None:
    """The release is asked for again, and what it finds is no loss of the lock."""
    _, through, way = gateway
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": through}
    lock = acquired("x", timeout=60)
    with hearing(lock_lost) as told, answer_lost(through, way, "UPDATE"):
        assert lock.release()
    assert told == []
    assert find_lock("x") is None


@pytest.mark.parametrize("statement", ["INSERT", "UPDATE"])
def test_a_claim_that_gets_no_answer_once_is_ours(
    statement: str, gateway: tuple[str, str, Line]
) -> None:
    """It is asked for again, and what it finds is no other process."""
    _, through, way = gateway
    if statement == "UPDATE":
        with suppress(ValueError), idempotent("x", using=through):
            raise ValueError
    with answer_lost(through, way, statement), idempotent("x", using=through) as claim:
        assert claim
