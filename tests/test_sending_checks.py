"""The system checks of sending and stages: brokers that block or lose, and no relay."""

from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, Task
from django.core import checks
from django.db import connections
from pytest_django import Settings

from django_celery_safe import SafeTask, single_instance, stages
from django_celery_safe.checks.project import RELAY_TASK
from django_celery_safe.databases import Now
from django_celery_safe.models import OutboxMessage, OutboxRelay, StageStep
from django_celery_safe.sending.relay import Relay
from tests import checking
from tests.checking import app, no_faults
from tests.conftest import MakeDatabase
from tests.routing import runs_in
from tests.servers.databases import gone_settings, registered, sqlite_settings
from tests.test_task_checks import NAME, RABBITMQ_BROKER, REDIS_BROKER, add_task

SWEEP_TASK = "django_celery_safe.tasks.sweep_stages"
TIMEOUTS = {"socket_timeout": 10, "socket_connect_timeout": 5}
BOTH = "Redis without socket_timeout and socket_connect_timeout:"

__all__ = ["app", "no_faults"]

pytestmark = pytest.mark.filterwarnings("ignore:Overriding setting DATABASES")


@pytest.fixture(autouse=True)
def _outboxes_of_this_test(no_faults: None, settings: Settings) -> None:
    """Let only the databases that the test makes have an outbox."""
    settings.DATABASE_ROUTERS = ["tests.test_outbox_command.NotInDefault"]


def found(*, deploy: bool = True) -> dict[str, checks.CheckMessage]:
    """Return what our checks say, but of locks in the default cache, by id."""
    everything = checking.found(deploy=deploy)
    return {number: one for number, one in everything.items() if number not in {"W005", "W006"}}


def assert_said(number: str, *parts: str, deploy: bool = True) -> None:
    """Assert that the checks say only this, with all of these parts and a hint."""
    messages = found(deploy=deploy)
    assert set(messages) == {number}
    message = messages[number]
    for part in parts:
        assert part in f"{message.msg} {message.hint}"
    assert message.level == (checks.ERROR if number[0] == "E" else checks.WARNING)


@pytest.mark.parametrize(
    ("broker", "options", "number", "said"),
    [
        (REDIS_BROKER, {}, "W014", BOTH),
        ("rediss://127.0.0.1:1/0", {}, "W014", BOTH),
        ("sentinel://127.0.0.1:1", {}, "W014", BOTH),
        (REDIS_BROKER, {"socket_timeout": 5}, "W014", "Redis without socket_connect_timeout:"),
        (REDIS_BROKER, TIMEOUTS, None, ""),
        (RABBITMQ_BROKER, {}, "W015", '{"confirm_publish": True}'),
        ("pyamqp://127.0.0.1:1//", TIMEOUTS, "W015", "without confirm_publish"),
        (RABBITMQ_BROKER, {"confirm_publish": True}, None, ""),
        ("memory://", {}, None, ""),
        ("no-such-broker://", {}, None, ""),
    ],
)
def test_a_broker_that_may_block_or_lose(
    app: Celery, broker: str, options: dict[str, Any], number: str | None, said: str
) -> None:
    """W014 names the timeouts that a Redis lacks, W015 an AMQP broker that confirms nothing."""
    app.conf.update(broker_url=broker, broker_transport_options=options)
    add_task(app, base=Task)
    assert found() == {}  # without a SafeTask the broker is the project's own business
    app.tasks.clear()
    add_task(app)
    assert found(deploy=False) == {}  # a laptop need not care
    if number is None:
        assert found() == {}
    else:
        assert_said(number, said)


@pytest.mark.parametrize(
    ("options", "wanted", "wrong"),
    [
        ({"serializer": "pickle", "outbox": True}, False, True),
        ({"serializer": "pickle"}, True, True),
        ({"serializer": "pickle", "outbox": False}, True, False),
        ({"serializer": "pickle"}, False, False),
        ({"serializer": "json"}, True, False),
    ],
)
def test_pickle_in_the_outbox(
    app: Celery, settings: Settings, options: dict[str, Any], wanted: bool, wrong: bool
) -> None:
    """W017 tells, once, of tasks that go through the outbox with pickle, by whatever setting."""
    settings.DJANGO_CELERY_SAFE = {"OUTBOX": wanted}
    add_task(app, **options)
    if not wrong:
        assert found(deploy=False) == {}
        return
    annotation = f'CELERY_TASK_ANNOTATIONS = {{"{NAME}": {{"serializer": "json"}}}}'
    assert_said("W017", f"Task {NAME} is", "pickle", annotation, deploy=False)
    app.conf.task_serializer = "pickle"
    add_task(app, name=f"{NAME}_more", outbox=True)
    assert_said("W017", f"2 tasks, such as {NAME}, are", deploy=False)
    # The hint fits a task whose code is not the project's.
    app.conf.task_annotations = {"*": {"serializer": "json"}}
    vars(app).pop("annotations", None)  # read before
    app.tasks.clear()
    add_task(app, **options)
    assert found(deploy=False) == {}


@pytest.fixture
def outbox(app: Celery, make_database: MakeDatabase) -> str:
    """The alias of the one database with an outbox, and a task that is sent through it."""
    add_task(app, outbox=True)
    return make_database("sqlite")


def note_relay(alias: str, ago: timedelta) -> None:
    """Let a relay have been there so long ago, by the database's clock."""
    relay = Relay(alias)
    relay.housekeeping.take_turn_if_due()
    OutboxRelay.objects.using(alias).update(host="web1", pid=42, seen_at=Now() - ago)


def test_an_outbox_without_a_relay(outbox: str, app: Celery) -> None:
    """W016 tells, with --deploy only, that no relay was ever there, and how to start one."""
    hint = "manage.py celery_outbox relay"
    module, _, name = RELAY_TASK.rpartition(".")
    assert hasattr(import_module(module), name)
    assert_said("W016", f"Task {NAME} is", f"seen in {outbox!r} yet, and", hint, RELAY_TASK)
    assert found(deploy=False) == {}
    # With the class of all tasks ours, chain and its like send nothing of their own.
    add_task(app, name="celery.chain", outbox=True)
    assert_said("W016", f"Task {NAME} is")


def test_who_relays(app: Celery, outbox: str) -> None:
    """W016 is silent where beat starts the shipped task, or for an hour after a relay was there."""
    app.conf.beat_schedule = {"other": {"task": NAME, "schedule": 10}}
    assert set(found()) == {"W016"}
    app.conf.beat_schedule = {"outbox": {"task": RELAY_TASK, "schedule": 10}}
    assert found() == {}
    app.conf.beat_schedule = {}
    note_relay(outbox, timedelta(minutes=50))
    assert found() == found(deploy=False) == {}
    OutboxRelay.objects.using(outbox).update(seen_at=Now() - timedelta(minutes=61))
    assert_said("W016", "since 20", "(web1 pid 42)")


def test_an_outbox_that_nobody_uses_needs_no_relay(
    app: Celery, settings: Settings, make_database: MakeDatabase
) -> None:
    """W016 is silent about a table that no task needs, by the setting, its option or its class."""

    class Kept(SafeTask):
        abstract = True
        outbox = True

    make_database("sqlite")
    add_task(app)
    add_task(app, name=f"{NAME}_plain", base=Task)
    assert found() == {}
    settings.DJANGO_CELERY_SAFE = {"OUTBOX": True}
    assert_said("W016", f"Task {NAME} is")
    settings.DJANGO_CELERY_SAFE = {}
    add_task(app, name=f"{NAME}_kept", base=Kept)
    assert_said("W016", f"Task {NAME}_kept is")


def test_each_outbox_needs_a_relay(
    outbox: str, make_database: MakeDatabase, settings: Settings
) -> None:
    """W016 comes for each database whose outbox has no relay, but LOCK_DATABASE beside others."""
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": outbox}
    assert_said("W016", f"seen in {outbox!r} yet")  # the only one
    others = [make_database("sqlite-immediate") for _ in range(3)]
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": others.pop()}
    note_relay(outbox, timedelta())
    messages = checking.find_messages(deploy=True)
    said = [message.msg for message in messages if str(message.id).endswith("W016")]
    assert [alias in text for alias, text in zip(others, said, strict=True)] == [True, True]


def test_an_outbox_that_can_not_be_asked(outbox: str) -> None:
    """W016 says that a database could not be asked, and the check goes on."""
    note_relay(outbox, timedelta())
    with registered("gone", gone_settings()):
        assert_said("W016", "outbox of 'gone' (OperationalError")


def test_an_outbox_without_a_table(
    app: Celery, make_database: MakeDatabase, tmp_path: Path
) -> None:
    """E006 tells that no database has the table of the outbox, until one has it."""
    add_task(app, outbox=True)
    with registered("empty", sqlite_settings(tmp_path / "empty.sqlite3", "sqlite")):
        assert_said("E006", f"Task {NAME} is", "no database has its table", "manage.py migrate")
        make_database("sqlite")
        assert set(found()) == {"W016"}


# Stages: runs without tables, and crashes that nobody clears up after.


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
    @single_instance(on_conflict="retry")
    @stages.step
    def resize(params: dict[str, Any]) -> None:
        """Do nothing."""


def test_steps_that_nobody_sweeps(app: Celery, runs: str, make_database: MakeDatabase) -> None:
    """W022 tells, with --deploy only, that no relay clears up, and what to run; in one message."""
    note_relay(make_database("sqlite"), timedelta())  # which does not look here
    assert_said("W022", f"Task {NAME} is a step of stages", f"seen in {runs!r} yet", RELAY_TASK)
    assert_said("W022", "beat runs none", "celery_outbox relay", "celery_stages sweep")
    assert found(deploy=False) == {}
    add_step(app, f"{NAME}_more")
    assert_said("W022", f"2 tasks, such as {NAME}, are steps of stages")


def test_a_project_without_steps_needs_no_sweep(app: Celery, make_database: MakeDatabase) -> None:
    """W022 and E007 are silent where no task is a step, whatever the tables."""
    add_task(app)
    with runs_in(make_database("sqlite")):
        assert found() == {}
    assert found() == {}


def test_who_sweeps(app: Celery, runs: str) -> None:
    """W022 is silent where beat starts the shipped relay, or for an hour after one was there."""
    for task in (NAME, SWEEP_TASK):  # a sweep alone sends no message that is left in the outbox
        app.conf.beat_schedule = {"other": {"task": task, "schedule": 10}}
        assert_said("W022", "beat runs none")
    app.conf.beat_schedule = {"relay": {"task": RELAY_TASK, "schedule": 10}}
    assert found() == {}
    app.conf.beat_schedule = {}
    note_relay(runs, timedelta(minutes=50))
    assert found() == {}
    OutboxRelay.objects.using(runs).update(seen_at=Now() - timedelta(minutes=61))
    assert_said("W022", "since 20", "(web1 pid 42)")


@pytest.mark.parametrize("missing", [StageStep, OutboxMessage])
def test_runs_without_tables(runs: str, missing: Any) -> None:
    """E007 tells that a table is missing where runs are to be written, and what to run."""
    note_relay(runs, timedelta())
    assert found() == {}
    with connections[runs].schema_editor() as editor:
        editor.delete_model(missing)
    assert_said("E007", f"Task {NAME} is a step of stages", f"{runs!r}, where their runs")
    assert found()["E007"].hint == f"Run manage.py migrate --database={runs}."


def test_databases_that_can_not_be_asked(
    app: Celery, runs: str, make_database: MakeDatabase, tmp_path: Path
) -> None:
    """E007 comes where nothing was migrated; W022 says what could not be asked."""
    with connections[runs].schema_editor() as editor:
        editor.delete_model(OutboxRelay)
    assert_said("W022", f"swept in {runs!r} (OperationalError")
    with registered("gone", gone_settings()), runs_in("gone"):
        assert_said("W022", "swept in 'gone' (OperationalError")
    app.conf.beat_schedule = {"relay": {"task": RELAY_TASK, "schedule": 10}}
    empty = sqlite_settings(tmp_path / "empty.sqlite3", "sqlite-immediate")
    with registered("empty", empty), runs_in("empty"):
        assert_said("E007", "'empty'")
