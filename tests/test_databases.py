"""Databases that are not fit are refused wherever something would be kept there."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from io import StringIO
from typing import Any

import pytest
from django.core import checks
from django.core.management import CommandError, call_command
from django.db import connections, transaction
from pytest_django import Settings

from django_celery_safe import ConfigurationError, cache_lock, idempotent, stages
from django_celery_safe.checks import check_deployment
from django_celery_safe.databases import Now
from django_celery_safe.models import (
    DatabaseLock,
    IdempotencyRecord,
    OutboxMessage,
    StageRun,
    StageStep,
)
from django_celery_safe.sending.commit import OutboxSender
from django_celery_safe.sending.outbox import outbox_aliases
from django_celery_safe.sending.relay import Relay
from django_celery_safe.transactions import Attempts
from tests import checking
from tests.app.models import Person
from tests.checking import REDIS, app_without_tasks
from tests.conftest import MakeDatabase
from tests.routing import AllIn
from tests.servers import MariaDBServer
from tests.servers.databases import registered

ORACLE = "oracle"

pytestmark = pytest.mark.filterwarnings("ignore:Overriding setting DATABASES")


@pytest.fixture
def oracle(settings: Settings) -> Iterator[str]:
    """A database that says to be Oracle; no server is asked."""
    settings.DATABASE_ROUTERS = [AllIn(ORACLE)]
    settings.CACHES = {"default": REDIS}
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": ORACLE}
    with registered(ORACLE, {"ENGINE": "tests.untested_database", "NAME": "/nowhere/at/all"}):
        yield ORACLE


def claim() -> None:
    with idempotent("some"):
        pass


def once() -> None:
    with Person.do_once(1, "is_welcome_email_sent"):
        pass


#: Calls that would keep rows in that database.
USES: dict[str, Callable[[], object]] = {
    "hold locks": lambda: cache_lock("x").acquire(),
    "hold an outbox": lambda: OutboxSender(ORACLE).keep([]),
    "hold an outbox (relay)": lambda: Relay(ORACLE),
    "record what is done once": claim,
    "do a thing once for a row": once,
    "hold runs of stages": lambda: stages.start([("tests.app.tasks.add", 1)]),
}


def test_an_untested_database_is_refused(oracle: str, sqlite_alias: str) -> None:
    """
    Every use of another server is refused before the database is asked.

    E002 names the database and what would use it. A relay of all databases goes by those that can
    have an outbox.
    """
    for what, use in USES.items():
        with pytest.raises(ConfigurationError) as caught:
            use()
        assert str(caught.value).startswith(
            f'DATABASES["oracle"] (oracle) can\'t {what.removesuffix(" (relay)")}: '
            f"django_celery_safe was tested on PostgreSQL, MariaDB and SQLite alone"
        )
    with pytest.raises(CommandError, match=r"\(oracle\) can't .* PostgreSQL, MariaDB and SQLite"):
        call_command("celery_stages", "list", stdout=StringIO())
    assert oracle not in outbox_aliases()
    assert sqlite_alias in outbox_aliases()
    with app_without_tasks("redis://127.0.0.1:1/0") as app:
        app.task(name="shop.charge", acks_late=True, reject_on_worker_lost=True)(idempotent(claim))
        said = [one.msg for one in checking.find_messages() if str(one.id).endswith("E002")]
    for text, what in zip(said, ("hold locks", "keep the rows of do_once of"), strict=True):
        assert text.startswith(f'DATABASES["oracle"] (oracle) can\'t {what}')


def test_a_database_that_is_not_there_is_an_error() -> None:
    """E002 names the alias, who uses it, and those that there are."""
    with app_without_tasks("redis://127.0.0.1:1/0") as app:
        app.task(name="shop.charge")(idempotent(using="ordres")(len))
        (message,) = [one for one in checks.run_checks() if "ordres" in one.msg]
    assert message.msg == "The connection 'ordres' doesn't exist."
    assert message.hint == "Name another alias for the rows of idempotent shop.charge: default."


def test_tables_without_transactions_are_refused(mariadb_alias: str, settings: Settings) -> None:
    """E002 names them where databases may be asked; other checks ask no server."""
    settings.DATABASE_ROUTERS = [AllIn(mariadb_alias)]
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": mariadb_alias}
    with connections[mariadb_alias].cursor() as cursor:
        cursor.execute("SET foreign_key_checks = 0")
        for model in (DatabaseLock, IdempotencyRecord, OutboxMessage, Person):
            cursor.execute(f"ALTER TABLE {model._meta.db_table} ENGINE=Aria")
    with app_without_tasks("redis://127.0.0.1:1/0"):
        assert not [one for one in checks.run_checks() if "InnoDB" in str(one.hint)]
        found = next(one for one in check_deployment() if "InnoDB" in str(one.hint))
    assert "tables there have no transactions: " in found.msg
    assert "django_celery_safe_databaselock (Aria)" in found.msg
    assert "ALTER TABLE django_celery_safe_outboxmessage ENGINE=InnoDB;" in str(found.hint)


@pytest.mark.sql
def test_json_has_moments_in_utc(db_alias: str, settings: Settings) -> None:
    """That is so with USE_TZ or not, and a database's own TIME_ZONE."""
    connection: Any = connections[db_alias]
    settings.TIME_ZONE = "America/New_York"
    for settings.USE_TZ, zone in [(True, None), (True, "Asia/Kolkata"), (False, None)]:
        connection.close()
        connection.settings_dict["TIME_ZONE"] = zone
        for known in ("timezone", "timezone_name"):
            vars(connection).pop(known, None)
        runs = StageRun.objects.using(db_alias)
        runs.bulk_create([StageRun(stages=1, created_at=Now())])
        row = runs.listed().latest("pk")
        moment = datetime.fromisoformat(row.as_json()["created_at"])
        assert moment.utcoffset() == timedelta(0)
        assert abs(datetime.now(UTC) - moment) < timedelta(minutes=5)
        assert 0 <= row.as_json()["age_s"] < 300


@pytest.mark.parametrize("kind", ["mariadb", "mariadb-repeatable"])
def test_a_deadlock_is_a_lost_race(kind: Any, make_database: MakeDatabase) -> None:
    """The one that the server ends is repeated, and both have done their work."""
    alias = make_database(kind)
    Person.everyone.using(alias).bulk_create([Person(pk=1), Person(pk=2)])
    met = threading.Barrier(2)
    tries: list[int] = []

    def change(first: int) -> None:
        for attempt in Attempts(alias, "A change"):
            with attempt, transaction.atomic(using=alias):
                tries.append(first)
                rows = Person.everyone.using(alias)
                rows.filter(pk=first).update(is_badge_printed=True)
                if tries.count(first) == 1:
                    met.wait(30)
                rows.filter(pk=3 - first).update(email=f"{first}@example.org")
        connections[alias].close()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(change, (1, 2)))
    assert len(tries) == 3
    assert Person.everyone.using(alias).filter(is_badge_printed=True).count() == 2


def test_a_statement_that_waits_too_long_is_repeated(
    mariadb_alias: str, mariadb_server: MariaDBServer
) -> None:
    """A lock wait timeout is no error, as long as it is not the last of some."""
    record = IdempotencyRecord.objects.using(mariadb_alias)
    with idempotent("some", using=mariadb_alias) as claim:
        assert claim
    held = mariadb_server.connect(connections.settings[mariadb_alias]["NAME"])
    with closing(held), connections[mariadb_alias].cursor() as cursor:
        cursor.execute("SET SESSION innodb_lock_wait_timeout = 1")
        held.autocommit(False)
        held.cursor().execute(f"SELECT * FROM {IdempotencyRecord._meta.db_table} FOR UPDATE")
        timer = threading.Timer(1.5, held.rollback)
        timer.start()
        assert record.update(error="changed") == 1
        timer.join()


def test_indexes_and_constraints_are_there(mariadb_alias: str) -> None:
    """MySQL has no partial indexes, and Django leaves them out there; ours are whole ones."""
    with connections[mariadb_alias].cursor() as cursor:
        constraints = connections[mariadb_alias].introspection.get_constraints
        found = {
            model: set(constraints(cursor, model._meta.db_table))
            for model in (IdempotencyRecord, OutboxMessage, StageRun, StageStep)
        }
    for model, names in found.items():
        wanted = {one.name for one in (*model._meta.indexes, *model._meta.constraints)}
        assert wanted <= names, model
    assert not [
        one for one in checks.run_checks(databases=[mariadb_alias]) if "models.W" in str(one.id)
    ]
