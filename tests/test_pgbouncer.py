"""All that is kept in PostgreSQL works behind PgBouncer in transaction pooling."""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from django.db import connections, transaction
from pytest_django import Settings

import django_celery_safe
from django_celery_safe import cache_lock, current_claim, idempotent
from tests.app.models import Person
from tests.concurrency.conftest import mailbox
from tests.concurrency.mailbox import Mailbox
from tests.conftest import behind, requiring
from tests.locks.renewals import wait_for_renewals
from tests.routing import runs_in
from tests.sending.carrying import Carried
from tests.servers import PgBouncerServer, PostgresServer
from tests.stages.test_messages import STEPS, Staged, count_begun

__all__ = ["mailbox"]

#: Everything that a session keeps from one transaction to the next, of the session that is asked.
#: Left out are the settings that PgBouncer restores for each of its clients, and those of a
#: transaction, whose values PostgreSQL restores at its end, but not their source.
STATE = """
    SELECT 'setting ' || name FROM pg_settings WHERE source = 'session' AND name NOT IN (
        'application_name', 'client_encoding', 'DateStyle', 'standard_conforming_strings',
        'TimeZone', 'transaction_isolation', 'transaction_read_only')
    UNION ALL SELECT 'advisory lock' FROM pg_locks
        WHERE locktype = 'advisory' AND pid = pg_backend_pid()
    UNION ALL SELECT 'listener' FROM pg_listening_channels()
    UNION ALL SELECT 'prepared statement' FROM pg_prepared_statements
    UNION ALL SELECT 'cursor' FROM pg_cursors WHERE is_holdable
    UNION ALL SELECT 'temporary table' FROM pg_class
        WHERE relpersistence = 't' AND relnamespace = pg_my_temp_schema()
"""

#: Statements that need a session, each with what it leaves there.
LEAVING = {
    "SET work_mem = '5MB'": "setting work_mem",
    "SELECT set_config('search_path', 'pg_catalog', false)": "setting search_path",
    "SELECT pg_advisory_lock(1)": "advisory lock",
    "LISTEN outbox": "listener",
    "PREPARE ask AS SELECT 1": "prepared statement",
    "DECLARE rows CURSOR WITH HOLD FOR SELECT 1": "cursor",
    "CREATE TEMPORARY TABLE rows ()": "temporary table",
}

#: Matches the statements of SQL that need a session.
OF_A_SESSION = re.compile(
    r"pg_(try_)?advisory_(?!xact)|pg_notify|\b(LISTEN|NOTIFY|PREPARE) \w|\bDECLARE \w+ |"
    r"\bCREATE TEMP|\bSET SESSION|\bSET (?!LOCAL|TRANSACTION)\w+ *(=|TO\b)|set_config\("
)


class Bounced:
    """A database of a test, and PgBouncer before it."""

    def __init__(self, bouncer: PgBouncerServer, alias: str) -> None:
        self.bouncer, self.alias = bouncer, alias

    def left_in_sessions(self) -> set[str]:
        """Return what clients left in any session of the pool."""
        with self.bouncer.all_sessions(connections.settings[self.alias]["NAME"]) as clients:
            return {str(row[0]) for client in clients for row in client.execute(STATE)}


@pytest.fixture
def bounced(postgres_alias: str, postgres_server: PostgresServer) -> Iterator[Bounced]:
    """A database behind PgBouncer; after the test nothing may be left in its sessions."""
    with requiring(PgBouncerServer):
        bouncer = PgBouncerServer(postgres_server)
    with bouncer, behind(bouncer, postgres_alias) as alias:
        bounced = Bounced(bouncer, alias)
        yield bounced
        connections[alias].close()
        assert bounced.left_in_sessions() == set()


@pytest.fixture
def alias(bounced: Bounced) -> str:
    """The alias of a database behind PgBouncer, whose sessions are looked at in the end."""
    return bounced.alias


def test_what_is_left_in_a_session_is_noticed(
    postgres_alias: str, postgres_server: PostgresServer
) -> None:
    """The looks at the sessions and at the code find each thing that needs a session."""
    assert all(OF_A_SESSION.search(statement) for statement in LEAVING)
    assert not OF_A_SESSION.search("SET LOCAL lock_timeout = '15s'")
    with requiring(PgBouncerServer):
        bouncer = PgBouncerServer(postgres_server)
    with bouncer, behind(bouncer, postgres_alias) as alias:
        with connections[alias].cursor() as cursor:
            for statement in LEAVING:
                cursor.execute(statement)
        assert Bounced(bouncer, alias).left_in_sessions() == set(LEAVING.values())
        connections[alias].close()


def test_no_code_needs_a_session() -> None:
    """No statement of the package's own has a lock, a listener or a setting of a session."""
    sources = Path(django_celery_safe.__file__).parent.rglob("*.py")
    found = {path.name: OF_A_SESSION.findall(path.read_text()) for path in sources}
    assert {name: matches for name, matches in found.items() if matches} == {}


def test_everything_else(alias: str, mailbox: Mailbox) -> None:
    """Outbox, carried tasks, records, flags and stages work, and leave nothing in a session."""
    carried = Carried(mailbox, alias)

    def write(task: Any, email: str) -> None:
        with transaction.atomic(using=alias):
            Person.everyone.using(alias).create(email=email)
            claim = current_claim()
            assert claim is not None
            claim.finish(email)

    carried.body = write
    message = carried.send("ann@example.org")
    with transaction.atomic(using=alias):
        carried.task.apply_async_on_commit(("bob@example.org",), using=alias)
        transaction.set_rollback(True, using=alias)
    for _ in range(2):
        carried.mailbox.deliver(message)
    assert not mailbox.take()
    person = Person.everyone.using(alias).get()
    assert not carried.rows.exists()
    for is_first in (True, False):
        with idempotent("invoice:42", using=alias) as claim:
            assert bool(claim) is is_first
        with Person.do_once(person.pk, "is_welcome_email_sent", using=alias) as row:
            assert (row is not None) is is_first
    with runs_in(alias):
        assert count_begun(Staged(mailbox, alias), 10) == [(1,) * STEPS] * 10


def test_locks_with_a_pool_of_their_own(
    postgres_alias: str, postgres_server: PostgresServer, settings: Settings
) -> None:
    """Locks are renewed while transactions have all sessions of the data's pool."""
    database = connections.settings[postgres_alias]["NAME"]
    with requiring(PgBouncerServer):
        bouncer = PgBouncerServer(postgres_server, {"locks": f"dbname={database}"}, pool_size=2)
    with bouncer, behind(bouncer, postgres_alias, "locks") as alias, ExitStack() as stack:
        settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": alias}
        stack.enter_context(bouncer.all_sessions(database))
        with cache_lock("feed:42", timeout=3) as lock:
            wait_for_renewals()
            lock.ensure()
        connections[alias].close()
