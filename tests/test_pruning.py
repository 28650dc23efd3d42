"""Relays delete old rows: in batches, beside others, and only those that they may."""

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, NamedTuple

import pytest
from celery import Celery
from django.core.management import call_command
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext
from model_bakery import baker
from pytest_django import Settings

from django_celery_safe.databases import Now
from django_celery_safe.models import (
    IdempotencyRecord,
    OutboxMessage,
    OutboxRelay,
    StageRun,
    StageStep,
)
from django_celery_safe.sending.housekeeping import prune_some
from django_celery_safe.sending.relay import Relay
from django_celery_safe.stages import Status
from django_celery_safe.tasks import relay_outbox
from tests.app.models import Cover
from tests.conftest import MakeDatabase
from tests.plans import plan_of
from tests.processes import meet, run_in_processes, start_in_process, tell, wait_for
from tests.statements import at_statement

#: Makes so many rows of an age in a database, and returns their keys.
Make = Callable[[str, int, timedelta], set[Any]]

DAY: Final = timedelta(days=1)
YEAR: Final = timedelta(days=366)
#: How many relays delete at once.
RELAYS: Final = 4


# Rows of each kind


def make(
    model: Any, alias: str, number: int, age: timedelta, moments: str, **values: Any
) -> set[Any]:
    """Make rows whose moments were so long ago by the database's clock; return their keys."""
    made = baker.make(model, number, _using=alias, _bulk_create=True, **values)
    rows = model.objects.using(alias).filter(pk__in=[row.pk for row in made])
    rows.update(**{moment: Now() - age for moment in moments.split()})
    return {row.pk for row in made}


def maker(model: Any, moments: str, before: timedelta = 0 * DAY, **values: Any) -> Make:
    """Return what makes rows of one kind, given alias, number and age."""
    return lambda alias, number, age: make(model, alias, number, age - before, moments, **values)


make_expired = maker(IdempotencyRecord, "expires_at", 7 * DAY, state="done")
make_orphaned = maker(IdempotencyRecord, "ends_at", state="running")


def make_runs(alias: str, number: int, age: timedelta) -> set[Any]:
    """Make runs that ended, each with two steps."""
    made = make(StageRun, alias, number, age, "ended_at", status=Status.SUCCEEDED)
    places = [(pk, position) for pk in made for position in (0, 1)]
    StageStep.objects.using(alias).bulk_create(
        baker.prepare(StageStep, run_id=pk, position=position, status=Status.SUCCEEDED)
        for pk, position in places
    )
    return made


class Old(NamedTuple):
    """Rows of one kind that are deleted by their age."""

    model: Any
    #: Which part of the model's rows that a relay deletes.
    part: int
    index: str
    make: Make
    batch: int = 500

    def find(self, alias: str) -> Any:
        """Return the rows that a relay deletes."""
        return self.model.objects.using(alias).prunable()[self.part]


def over(state: str, moment: str = "ended_at") -> Make:
    """Return what makes messages in a state in which they stay."""
    return maker(OutboxMessage, moment, state=state, due_at=None)


OLD: Final = {
    "sent": Old(OutboxMessage, 0, "safe_outbox_sent", over("sent", "sent_at")),
    "done": Old(OutboxMessage, 1, "safe_outbox_done", over("done")),
    "failed": Old(OutboxMessage, 2, "safe_outbox_failed", over("failed")),
    "expired": Old(IdempotencyRecord, 0, "safe_record_expires", make_expired),
    "orphaned": Old(IdempotencyRecord, 1, "safe_record_running", make_orphaned),
    "runs": Old(StageRun, 0, "safe_run_ended", make_runs, batch=1),
}
MODELS: Final = (OutboxMessage, IdempotencyRecord, StageRun)


#: One kind of each table.
each_table = pytest.mark.parametrize("name", ["failed", "orphaned", "runs"])


@pytest.fixture(autouse=True)
def _kept_for_a_week(settings: Settings) -> None:
    """Keep rows of every kind for a week, unless a test says otherwise."""
    week = 7 * 24 * 3600
    settings.DJANGO_CELERY_SAFE = {"RETENTION": {"sent": week, "failed": week}}


def make_each(alias: str, age: timedelta, number: int = 2) -> dict[str, set[Any]]:
    """Make rows of each kind."""
    return {name: kind.make(alias, number, age) for name, kind in OLD.items()}


def keys(alias: str) -> set[Any]:
    """Return the keys of all rows; steps of other runs are an error."""
    steps = StageStep.objects.using(alias).values_list("run", flat=True)
    assert set(steps) == set(StageRun.objects.using(alias).values_list("pk", flat=True))
    return {
        (model, pk)
        for model in MODELS
        for pk in model._default_manager.using(alias).values_list("pk", flat=True)
    }


def take_turn(alias: str) -> None:
    """Let a new relay do its chores."""
    Relay(alias).housekeeping.take_turn_if_due()


# Deletion by age


@pytest.mark.sql
def test_a_relay_deletes_what_is_old(alias: str, broker: Celery) -> None:
    """A relay deletes rows that are older than their retention, and leaves younger ones."""
    make_each(alias, 6 * DAY)
    young = keys(alias)
    make_each(alias, 8 * DAY)
    take_turn(alias)
    assert keys(alias) == young
    take_turn(alias)
    assert keys(alias) == young


def test_a_relay_that_runs_now_and_then_deletes_what_is_old(
    make_database: MakeDatabase, settings: Settings, broker: Celery
) -> None:
    """relay_outbox and ``relay --once`` delete old rows in the databases of all outboxes."""
    settings.DATABASE_ROUTERS = ["tests.routing.NotInDefault"]
    aliases = [make_database("sqlite-immediate") for _ in range(2)]
    for relay in (relay_outbox, lambda: call_command("celery_outbox", "relay", "--once")):
        for alias in aliases:
            make_each(alias, YEAR)
        relay()
        assert [keys(alias) for alias in aliases] == [set(), set()]


def test_a_retention_of_none_is_for_ever(alias: str, broker: Celery, settings: Settings) -> None:
    """No relay deletes rows then, except records with an expiry of their own."""
    settings.DATABASE_ROUTERS = []
    settings.DJANGO_CELERY_SAFE = {"RETENTION": None}
    made = make_each(alias, 50 * YEAR)
    before = keys(alias)
    take_turn(alias)
    assert before - keys(alias) == {(IdempotencyRecord, pk) for pk in made["expired"]}


# How much at a time


@each_table
def test_a_batch_is_bounded(alias: str, name: str) -> None:
    """One statement deletes a batch, a turn three batches of the oldest, the next turn the rest."""
    old = OLD[name]
    youngest = old.make(alias, 2, 8 * DAY)
    for days in (11, 10, 9):
        old.make(alias, 2, days * DAY)
    with CaptureQueriesContext(connections[alias]) as queries:
        assert prune_some(old.find(alias), 6, 2) is True
    deletes = [q["sql"] for q in queries if is_deletion(q["sql"], old.model._meta.db_table)]
    assert len(deletes) == 3
    assert set(old.find(alias).values_list("pk", flat=True)) == youngest
    assert prune_some(old.find(alias), 6, 2) is False
    assert keys(alias) == set()


def is_deletion(sql: str, table: str) -> bool:
    """Whether a statement deletes rows of a table; MariaDB may name it once more."""
    return sql.startswith("DELETE ") and table in sql.partition(" WHERE ")[0]


@pytest.mark.sql
def test_old_rows_are_found_by_an_index(alias: str) -> None:
    """Each query uses its index, MariaDB's any with the state; none sorts, beside many rows."""
    make_each(alias, DAY, 1000)
    make_each(alias, 8 * DAY, 20)
    for old in OLD.values():
        plan = plan_of(old.find(alias)[:500])
        partial = connections[alias].features.supports_partial_indexes
        assert (old.index if partial else "safe_") in plan
        assert "Sort" not in plan
        assert "TEMP B-TREE" not in plan


# Beside others


def take_turns(alias: str) -> None:
    """Be a relay that does its chores beside others."""
    relay = Relay(alias)
    meet()
    relay.housekeeping.take_turn_if_due()


@pytest.mark.sql
def test_turns_side_by_side(alias: str, caplog: pytest.LogCaptureFixture) -> None:
    """Relays that do their chores at the same moment delete all that is old, without an error."""
    make_each(alias, YEAR, 40)
    run_in_processes(take_turns, RELAYS, alias)
    take_turn(alias)
    assert keys(alias) == set()
    assert caplog.records == []


def hold(alias: str, model: Any, pk: Any) -> None:
    """Lock a row until this process is ended."""
    with transaction.atomic(using=alias):
        rows = model._default_manager.using(alias)
        tell(rows.select_for_update().get(pk=pk).pk)
        threading.Event().wait()


@each_table
def test_a_locked_row_is_passed_by(postgres_alias: str, name: str) -> None:
    """A relay does not wait for an old row that is locked; it deletes the row in a later turn."""
    alias, old = postgres_alias, OLD[name]
    oldest = min(old.make(alias, 1, 2 * YEAR))
    old.make(alias, 3, YEAR)
    with start_in_process(hold, alias, old.model, oldest) as holder:
        assert holder.receive() == oldest
        with connections[alias].cursor() as cursor:
            cursor.execute("SET lock_timeout = '5s'")
        prune_some(old.find(alias), 10, old.batch if old.batch == 1 else 10)
        assert [pk for _, pk in keys(alias)] == [oldest]
        holder.kill()
        wait_for(lambda: not prune_some(old.find(alias), 10, 10) and not keys(alias))


def test_what_is_used_again_meanwhile_stays(alias: str) -> None:
    """A record that is claimed between the look and the deletion is not deleted."""
    (pk,) = make_orphaned(alias, 1, YEAR)
    record = IdempotencyRecord.objects.using(alias).filter(pk=pk)

    def claim() -> None:
        record.update(ends_at=Now() + DAY)

    with at_statement(alias, "SELECT", claim, after=True, times=1) as met:
        assert prune_some(OLD["orphaned"].find(alias), 10, 10) is False
    assert met
    assert record.exists()


# Errors and protected rows


@pytest.mark.parametrize("missing", [(IdempotencyRecord,), (StageStep, StageRun)])
def test_a_database_without_a_table_is_left_alone(
    alias: str, missing: Any, broker: Celery, caplog: pytest.LogCaptureFixture
) -> None:
    """A relay deletes the rows of the other tables, and logs nothing about the missing one."""
    make_each(alias, YEAR)
    with connections[alias].schema_editor() as editor:
        for model in missing:
            editor.delete_model(model)
    take_turn(alias)
    left = [model for model in MODELS if model not in missing]
    assert sum(model._default_manager.using(alias).count() for model in left) == 0
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_failure_stops_nothing_else(
    alias: str, broker: Celery, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The failure is logged, other old rows are deleted, and the relay records that it lives."""
    make_each(alias, YEAR)
    monkeypatch.delattr(type(IdempotencyRecord.objects.all()), "prunable")
    take_turn(alias)
    assert {model for model, _ in keys(alias)} == {IdempotencyRecord}
    assert OutboxRelay.objects.using(alias).exists()
    (said,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert said.getMessage().startswith(f"The old records in {alias!r} could not be deleted: ")
    assert "prunable" in said.getMessage()


def test_a_run_that_a_row_protects_stays(
    alias: str, broker: Celery, caplog: pytest.LogCaptureFixture
) -> None:
    """Other runs are deleted; the protected one is logged once, and deleted when it may be."""
    (protected,) = make_runs(alias, 1, 2 * YEAR)
    cover = Cover.objects.using(alias).create(run_id=protected)
    make_runs(alias, 3, YEAR)
    for _ in range(3):
        take_turn(alias)
    assert keys(alias) == {(StageRun, protected)}
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"Run {protected} is not pruned: ")
    cover.delete()
    take_turn(alias)
    assert keys(alias) == {(StageRun, protected)}
    StageRun.objects.using(alias).update(protected_at=Now() - DAY)
    take_turn(alias)
    assert keys(alias) == set()


@pytest.mark.sql
def test_a_run_that_only_its_database_protects_stays(
    alias: str, broker: Celery, caplog: pytest.LogCaptureFixture
) -> None:
    """A foreign key with DO_NOTHING is such a case: only the commit shows that it fails."""
    (protected,) = make_runs(alias, 1, 2 * YEAR)
    with connections[alias].cursor() as cursor:
        cursor.execute(
            f"CREATE TABLE refers (run bigint REFERENCES {StageRun._meta.db_table} (id)"
            f"{connections[alias].ops.deferrable_sql()})"
        )
        cursor.execute("INSERT INTO refers VALUES (%s)", [protected])
    make_runs(alias, 3, YEAR)
    take_turn(alias)
    assert keys(alias) == {(StageRun, protected)}
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"Run {protected} is not pruned: ")
