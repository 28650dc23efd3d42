"""All that is kept in PostgreSQL works behind PgBouncer in transaction pooling."""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.db import connections, transaction
from pytest_django import Settings

import django_celery_safe
from django_celery_safe import cache_lock, current_claim, idempotent
from django_celery_safe.models import IdempotencyRecord
from tests.app.models import Person
from tests.app.tasks import add
from tests.commands import listed, refused
from tests.concurrency.conftest import mailbox
from tests.concurrency.mailbox import Mailbox
from tests.conftest import behind, requiring
from tests.idempotency import test_records_race as records_race
from tests.locks.renewals import wait_for_renewals
from tests.processes import Journal, run_in_processes
from tests.routing import runs_in
from tests.sending.carrying import Carried
from tests.sending.conftest import sent
from tests.sending.test_relay import Sent, drain, ids, leave, relay_all, table
from tests.servers import PgBouncerServer, PostgresServer
from tests.stages.test_messages import STEPS, Staged, count_begun

__all__ = ["mailbox", "sent"]

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


@pytest.mark.parametrize("statement", LEAVING)
def test_what_is_left_in_a_session_is_noticed(
    statement: str, postgres_alias: str, postgres_server: PostgresServer
) -> None:
    """The look at the sessions finds each kind of thing that a client may leave there."""
    with requiring(PgBouncerServer):
        bouncer = PgBouncerServer(postgres_server)
    with bouncer, behind(bouncer, postgres_alias) as alias:
        with connections[alias].cursor() as cursor:
            cursor.execute(statement)
        assert Bounced(bouncer, alias).left_in_sessions() == {LEAVING[statement]}
        connections[alias].close()


def test_no_code_needs_a_session() -> None:
    """No statement of the package's own has a lock, a listener or a setting of a session."""
    assert all(OF_A_SESSION.search(statement) for statement in LEAVING)
    assert not OF_A_SESSION.search("SET LOCAL lock_timeout = '15s'")
    sources = Path(django_celery_safe.__file__).parent.rglob("*.py")
    found = {path.name: OF_A_SESSION.findall(path.read_text()) for path in sources}
    assert {name: matches for name, matches in found.items() if matches} == {}


@pytest.mark.parametrize("pool", [{}, {"pool": {"min_size": 0, "max_size": 1, "timeout": 3}}])
def test_locks(pool: dict[str, Any], alias: str, settings: Settings) -> None:
    """A lock is renewed and handed on, with psycopg's pool too; tests/contract has the rest."""
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": alias}
    connection: Any = connections[alias]
    connection.settings_dict["OPTIONS"] = pool
    with cache_lock("feed:42", timeout=3) as lock:
        before = lock.fence
        wait_for_renewals()
        lock.ensure()
        assert not cache_lock("feed:42").acquire()
    with cache_lock("feed:42") as lock:
        assert before is not None
        assert (lock.fence or 0) > before
    connection.close_pool()


def test_a_send_through_the_outbox(alias: str, sent: Sent) -> None:
    """A message is out right after its commit, its row is gone, and a rollback sends nothing."""
    with transaction.atomic(using=alias):
        result = add.apply_async_on_commit((1,), using=alias, outbox=True)
        assert table(alias).count() == 1
    with transaction.atomic(using=alias):
        add.apply_async_on_commit((2,), using=alias, outbox=True)
        transaction.set_rollback(True, using=alias)
    assert ids(sent()) == [result.id]
    assert not table(alias).exists()


def test_relays_beside_each_other(alias: str, sent: Sent) -> None:
    """Three relays send what dead senders left behind, each message once."""
    wanted = leave(alias, 250)
    connections[alias].close()
    counts = run_in_processes(relay_all, 3, alias)
    assert sum(counts) == 250
    assert sorted(ids(sent())) == sorted(wanted)
    assert drain(alias) == 0


def test_a_carried_task(alias: str, mailbox: Mailbox) -> None:
    """A carried task runs, finishes in its own transaction, and leaves no row."""
    carried = Carried(mailbox, alias)

    def write(task: Any, email: str) -> None:
        with transaction.atomic(using=alias):
            Person.everyone.using(alias).create(email=email)
            claim = current_claim()
            assert claim is not None
            claim.finish(email)

    carried.body = write
    message = carried.send("ann@example.org")
    carried.mailbox.deliver(message)
    carried.mailbox.deliver(message)
    assert Person.everyone.using(alias).count() == 1
    assert not carried.rows.exists()


def test_records(alias: str, tmp_path: Path) -> None:
    """Eight processes get each message three times, and do the work of each key once."""
    journal = Journal(tmp_path / "journal")
    run_in_processes(records_race.deliver_all, 8, alias, journal, 8)
    rows = records_race.ROWS
    assert journal.tally("number", "effect") == dict.fromkeys(range(rows), 1)
    assert IdempotencyRecord.objects.using(alias).done().filter(claims=1).count() == rows


def test_flags(alias: str) -> None:
    """A thing is done once for a row, whose lock another session sees."""
    person = Person.everyone.using(alias).create()
    done = []
    for _ in range(2):
        with Person.do_once(person.pk, "is_welcome_email_sent", using=alias) as row:
            done.append(row is not None)
    assert done == [True, False]


def test_stages(alias: str, mailbox: Mailbox) -> None:
    """Ten messages of a stage run at once over four sessions; each stage is begun once."""
    with runs_in(alias):
        assert count_begun(Staged(mailbox, alias), 10) == [(1,) * STEPS] * 10


@contextmanager
def server_side_cursors(alias: str) -> Iterator[None]:
    """Use a database with Django's default."""
    connections[alias].settings_dict["DISABLE_SERVER_SIDE_CURSORS"] = False
    try:
        yield
    finally:
        connections[alias].settings_dict["DISABLE_SERVER_SIDE_CURSORS"] = True


def test_listings(alias: str) -> None:
    """Each command lists its rows without a cursor of the server."""
    for number in range(3):
        with idempotent(f"invoice:{number}", using=alias) as claim:
            assert claim
    leave(alias, 3)
    assert len(listed("celery_idempotency", f"--database={alias}")) == 3
    assert len(listed("celery_outbox", f"--database={alias}")) == 3


def test_why_cursors_are_off(pgbouncer_alias: str) -> None:
    """With Django's default a listing asks another session for its cursor, and fails."""
    for number in range(3):
        with idempotent(f"invoice:{number}", using=pgbouncer_alias) as claim:
            assert claim
    with server_side_cursors(pgbouncer_alias):
        said = refused("celery_idempotency", "list", f"--database={pgbouncer_alias}")[1]
    assert re.search(r"(portal|cursor) \"_django_curs_\w+\" does not exist", said)


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
