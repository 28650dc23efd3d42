"""All that is kept in PostgreSQL works behind PgBouncer in transaction pooling."""

from contextlib import ExitStack
from typing import Any

from django.db import connections, transaction
from pytest_django import Settings

from django_celery_safe import cache_lock, current_claim, idempotent
from tests.app.models import Person
from tests.concurrency.mailbox import Mailbox
from tests.conftest import behind
from tests.locks.renewals import wait_for_renewals
from tests.routing import runs_in
from tests.sending.carrying import Carried
from tests.servers import PgBouncerServer, PostgresServer
from tests.stages.test_messages import STEPS, Staged, count_begun

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


def test_everything_else(
    postgres_alias: str, postgres_server: PostgresServer, mailbox: Mailbox
) -> None:
    """Outbox, carried tasks, records, flags and stages work, and leave nothing in a session."""
    with PgBouncerServer(postgres_server) as bouncer, behind(bouncer, postgres_alias) as alias:
        use_everything(alias, mailbox)
        connections[alias].close()
        with bouncer.all_sessions(connections.settings[alias]["NAME"]) as clients:
            assert [row for client in clients for row in client.execute(STATE)] == []


def use_everything(alias: str, mailbox: Mailbox) -> None:
    """Send, carry, record, flag and run stages."""
    carried = Carried(mailbox, alias)

    def write(task: Any, email: str) -> None:
        with transaction.atomic(using=alias):
            Person.everyone.using(alias).create(email=email)
            claim: Any = current_claim()
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
    bouncer = PgBouncerServer(postgres_server, {"locks": f"dbname={database}"}, pool_size=2)
    with bouncer, behind(bouncer, postgres_alias, "locks") as alias, ExitStack() as stack:
        settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": alias}
        stack.enter_context(bouncer.all_sessions(database))
        with cache_lock("feed:42", timeout=3) as lock:
            wait_for_renewals()
            lock.ensure()
        connections[alias].close()
