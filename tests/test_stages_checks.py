"""The system checks of stages: runs without tables, and crashes that nobody clears up after."""

from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from django.db import connections

from django_celery_safe import SafeTask, single_instance, stages
from django_celery_safe.checks.project import RELAY_TASK
from django_celery_safe.models import OutboxMessage, OutboxRelay, StageStep
from tests import test_sending_checks as sending_checks
from tests.conftest import MakeDatabase
from tests.routing import runs_in
from tests.servers.databases import gone_settings, registered, sqlite_settings
from tests.test_sending_checks import _no_faults, app, note_relay
from tests.test_task_checks import NAME, add_task

__all__ = ["_no_faults", "app"]

SWEEP_TASK = "django_celery_safe.tasks.sweep_stages"

pytestmark = pytest.mark.filterwarnings("ignore:Overriding setting DATABASES")

found = partial(sending_checks.found, deploy=True)
assert_said = partial(sending_checks.assert_said, deploy=True)


@pytest.fixture
def runs(app: Celery, make_database: MakeDatabase) -> Iterator[str]:
    """The database with the runs, and a task that is a step."""
    add_step(app)
    alias = make_database("sqlite-immediate")
    with runs_in(alias):
        yield alias


def add_step(app: Celery, name: str = NAME) -> None:
    """Give the app a task that is a step."""

    @app.task(base=SafeTask, name=name, shared=False)
    @stages.step
    def resize(params: dict[str, Any]) -> None:
        """Do nothing."""


def test_only_check_deploy_asks_a_database(app: Celery) -> None:
    """E007 and W022 are of ``check --deploy``: a plain check asks no database."""
    add_step(app)
    assert found(deploy=False) == {}


def test_steps_that_nobody_sweeps(runs: str) -> None:
    """W022 tells that neither beat nor a relay clears up, and what to run."""
    no_relay = "beat runs none"
    assert_said("W022", f"Task {NAME} is a step of stages", f"seen in {runs!r} yet", no_relay)
    hint = str(found()["W022"].hint)
    for part in ("manage.py celery_outbox relay", RELAY_TASK, "manage.py celery_stages sweep"):
        assert part in hint


def test_many_steps_are_one_message(app: Celery, runs: str) -> None:
    """W022 counts the steps and names one."""
    add_step(app, f"{NAME}_more")
    assert_said("W022", f"2 tasks, such as {NAME}, are steps of stages")


def test_a_step_below_a_lock_is_found(app: Celery, make_database: MakeDatabase) -> None:
    """W022 sees a step below ``@single_instance`` too."""

    @app.task(base=SafeTask, name=NAME, shared=False)
    @single_instance(on_conflict="retry")
    @stages.step
    def resize(params: dict[str, Any]) -> None:
        """Do nothing."""

    with runs_in(make_database("sqlite")):
        assert_said("W022", NAME)


def test_a_project_without_steps_needs_no_sweep(app: Celery, make_database: MakeDatabase) -> None:
    """W022 and E007 are silent where no task is a step, whatever the tables."""
    add_task(app)
    with runs_in(make_database("sqlite")):
        assert found() == {}
    assert found() == {}


def test_beat_sweeps(app: Celery, runs: str) -> None:
    """W022 is silent where beat starts the shipped relay, but not for any task of beat's."""
    app.conf.beat_schedule = {"other": {"task": NAME, "schedule": 10}}
    assert set(found()) == {"W022"}
    app.conf.beat_schedule = {"relay": {"task": RELAY_TASK, "schedule": 10}}
    assert found() == {}


def test_a_sweep_of_beat_is_not_enough(app: Celery, runs: str) -> None:
    """W022 comes though beat sweeps: messages that are left in the outbox would not be sent."""
    app.conf.beat_schedule = {"sweep": {"task": SWEEP_TASK, "schedule": 60}}
    assert_said("W022", "beat runs none", "stalls after a crash")


@pytest.mark.parametrize(
    ("ago", "wrong"),
    [(timedelta(), False), (timedelta(minutes=59), False), (timedelta(minutes=61), True)],
)
def test_a_relay_sweeps(runs: str, ago: timedelta, wrong: bool) -> None:
    """W022 is silent for an hour after a relay was there, and then names the last one."""
    note_relay(runs, ago)
    if wrong:
        assert_said("W022", "since 20", "(web1 pid 42)")
    else:
        assert found() == {}


def test_a_relay_elsewhere_does_not_sweep(runs: str, make_database: MakeDatabase) -> None:
    """W022 asks the database of the runs: a relay of another one does not look there."""
    note_relay(make_database("sqlite"), timedelta())
    assert_said("W022", f"seen in {runs!r} yet")


@pytest.mark.parametrize("missing", [StageStep, OutboxMessage])
def test_runs_without_tables(runs: str, missing: Any) -> None:
    """E007 tells that a table is missing where runs are to be written, and what to run."""
    note_relay(runs, timedelta())
    assert found() == {}
    with connections[runs].schema_editor() as editor:
        editor.delete_model(missing)
    assert_said("E007", f"Task {NAME} is a step of stages", f"{runs!r}, where their runs")
    assert found()["E007"].hint == f"Run manage.py migrate --database={runs}."


def test_runs_in_a_database_that_was_never_migrated(
    app: Celery, make_database: MakeDatabase, tmp_path: Path
) -> None:
    """E007 comes though beat sweeps: there is nothing to sweep, nor to write to."""
    assert make_database
    add_step(app)
    app.conf.beat_schedule = {"relay": {"task": RELAY_TASK, "schedule": 10}}
    empty = sqlite_settings(tmp_path / "empty.sqlite3", "sqlite-immediate")
    with registered("empty", empty), runs_in("empty"):
        assert_said("E007", "'empty'")


def test_a_database_that_is_gone(app: Celery, make_database: MakeDatabase) -> None:
    """W022 says that a database could not be asked, and the check goes on."""
    assert make_database
    add_step(app)
    with registered("gone", gone_settings()), runs_in("gone"):
        assert_said("W022", "swept in 'gone' (OperationalError")


def test_relays_that_can_not_be_asked_for(runs: str) -> None:
    """W022 says so where the table in which relays note themselves is missing."""
    with connections[runs].schema_editor() as editor:
        editor.delete_model(OutboxRelay)
    assert_said("W022", f"swept in {runs!r} (OperationalError")
