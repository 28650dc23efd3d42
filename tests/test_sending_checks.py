"""The system checks of sending: brokers that block or lose, and an outbox that nobody empties."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, Task
from django.core import checks
from pytest_django import Settings

from django_celery_safe import SafeTask
from django_celery_safe.checks.project import RELAY_TASK
from django_celery_safe.databases import Now
from django_celery_safe.models import OutboxRelay
from django_celery_safe.sending.relay import Relay
from django_celery_safe.tasks import relay_outbox
from tests import checking
from tests.checking import TRANSPORT_OPTIONS, app_without_tasks
from tests.conftest import MakeDatabase
from tests.servers.databases import gone_settings, registered, sqlite_settings
from tests.test_checks import REDIS
from tests.test_task_checks import NAME, RABBITMQ_BROKER, REDIS_BROKER, add_task

TIMEOUTS = {"socket_timeout": 10, "socket_connect_timeout": 5}
BOTH = "Redis without socket_timeout and socket_connect_timeout:"

pytestmark = pytest.mark.filterwarnings("ignore:Overriding setting DATABASES")


class NotInDefault:
    """Keeps the outbox out of the default database, which is in memory and of all tests."""

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        """Return False for the package's tables there, else no opinion."""
        return False if (db, app_label) == ("default", "django_celery_safe") else None


@pytest.fixture(autouse=True)
def _no_faults(settings: Settings) -> None:
    """Begin with settings that no check complains of."""
    settings.CACHES = {"default": REDIS}
    settings.DATABASES = {"default": {"ENGINE": "django.db.backends.postgresql", "NAME": "data"}}
    settings.DATABASE_ROUTERS = [f"{__name__}.NotInDefault"]
    settings.DJANGO_CELERY_SAFE = {}


@pytest.fixture
def app() -> Iterator[Celery]:
    """An app without tasks, on a Redis that nobody is asked for."""
    with app_without_tasks(REDIS_BROKER) as app:
        yield app


def found(*, deploy: bool = False) -> dict[str, checks.CheckMessage]:
    """Return what our checks say, but of locks in the default cache, by id."""
    everything = checking.found(deploy=deploy)
    return {number: one for number, one in everything.items() if number not in {"W005", "W006"}}


def assert_said(number: str, *parts: str, deploy: bool = False) -> None:
    """Assert that the checks say only this, with all of these parts and a hint."""
    messages = found(deploy=deploy)
    assert set(messages) == {number}
    message = messages[number]
    for part in parts:
        assert part in message.msg
    assert message.hint
    assert message.level == (checks.ERROR if number[0] == "E" else checks.WARNING)


@pytest.mark.parametrize(
    ("broker", "options", "said"),
    [
        (REDIS_BROKER, {}, BOTH),
        ("rediss://127.0.0.1:1/0", {}, BOTH),
        ("sentinel://127.0.0.1:1", {}, BOTH),
        (REDIS_BROKER, {"socket_timeout": None, "socket_connect_timeout": 0}, BOTH),
        (REDIS_BROKER, {"socket_timeout": 5}, "Redis without socket_connect_timeout:"),
        (REDIS_BROKER, {"socket_connect_timeout": 5}, "Redis without socket_timeout:"),
        (REDIS_BROKER, TIMEOUTS, None),
        (RABBITMQ_BROKER, {"confirm_publish": True}, None),
        ("memory://", {}, None),
        ("no-such-broker://", {}, None),
    ],
)
def test_a_redis_that_may_block(
    app: Celery, broker: str, options: dict[str, Any], said: str | None
) -> None:
    """W014 names the timeouts that a Redis broker lacks, and what to set."""
    app.conf.update(broker_url=broker, broker_transport_options=options)
    add_task(app)
    if said is None:
        assert found(deploy=True) == {}
        return
    assert_said("W014", said, "for ever", deploy=True)
    assert all(name in str(found(deploy=True)["W014"].hint) for name in TIMEOUTS)


@pytest.mark.parametrize(
    ("broker", "options", "wrong"),
    [
        (RABBITMQ_BROKER, {}, True),
        (RABBITMQ_BROKER, {"confirm_publish": False}, True),
        ("pyamqp://127.0.0.1:1//", TIMEOUTS, True),
        (RABBITMQ_BROKER, {"confirm_publish": True}, False),
        (REDIS_BROKER, TIMEOUTS, False),
    ],
)
def test_an_amqp_broker_that_confirms_nothing(
    app: Celery, broker: str, options: dict[str, Any], wrong: bool
) -> None:
    """W015 tells of an AMQP broker that does not say whether it got a message."""
    app.conf.update(broker_url=broker, broker_transport_options=options)
    add_task(app)
    if not wrong:
        assert found(deploy=True) == {}
        return
    assert_said("W015", "without confirm_publish", deploy=True)
    assert found() == {}  # a laptop need not care
    assert '{"confirm_publish": True}' in str(found(deploy=True)["W015"].hint)


@pytest.mark.parametrize("broker", [REDIS_BROKER, RABBITMQ_BROKER])
def test_the_broker_of_a_project_without_safe_tasks_is_its_own_business(
    app: Celery, broker: str
) -> None:
    """W014 and W015 are silent where no task is a SafeTask."""
    app.conf.update(broker_url=broker, broker_transport_options={})
    add_task(app, base=Task)
    assert found(deploy=True) == {}


@pytest.mark.parametrize(
    ("options", "conf", "wanted", "wrong"),
    [
        ({"serializer": "pickle", "outbox": True}, {}, False, True),
        ({"serializer": "pickle"}, {}, True, True),
        ({"outbox": True}, {"task_serializer": "pickle"}, False, True),
        ({"serializer": "pickle", "outbox": False}, {}, True, False),
        ({"serializer": "pickle"}, {}, False, False),
        ({"serializer": "json"}, {"task_serializer": "pickle"}, True, False),
        ({"outbox": True}, {}, True, False),
    ],
)
def test_pickle_in_the_outbox(
    app: Celery,
    settings: Settings,
    options: dict[str, Any],
    conf: dict[str, Any],
    wanted: bool,
    wrong: bool,
) -> None:
    """W017 tells of a task that goes through the outbox with pickle, by whatever setting."""
    settings.DJANGO_CELERY_SAFE = {"OUTBOX": wanted}
    app.conf.update(conf)
    add_task(app, **options)
    if wrong:
        assert_said("W017", f"Task {NAME} is", "pickle")
    else:
        assert found() == {}


@pytest.mark.parametrize("remedied", [False, True])
def test_the_remedy_fits_a_foreign_task(app: Celery, remedied: bool) -> None:
    """W017's hint names a setting that works for a task whose code is not the project's."""
    if remedied:
        app.conf.task_annotations = {NAME: {"serializer": "json"}}
        vars(app).pop("annotations", None)  # read before
    add_task(app, serializer="pickle", outbox=True)
    annotation = f'CELERY_TASK_ANNOTATIONS = {{"{NAME}": {{"serializer": "json"}}}}'
    hints = [str(one.hint) for one in found().values()]
    assert [annotation in hint for hint in hints] == ([] if remedied else [True])


def test_tasks_that_come_with_celery_are_not_counted(outbox: str, app: Celery) -> None:
    """With the class of all tasks ours, chain, group and their like send nothing of their own."""

    def run() -> None:
        """Do nothing."""

    for name in ("celery.chain", "celery.group"):
        app.task(name=name, base=SafeTask, outbox=True, shared=False)(run)
    assert f"Task {NAME} is" in str(found(deploy=True)["W016"].msg)


def test_many_tasks_are_one_message(app: Celery) -> None:
    """W017 counts the tasks and names one, so that a large project gets one message."""
    for number in range(3):
        add_task(app, name=f"{NAME}_{number}", serializer="pickle", outbox=True)
    assert_said("W017", f"3 tasks, such as {NAME}_0, are")


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


def test_only_check_deploy_asks_a_database(app: Celery) -> None:
    """W016 and E006 are of ``check --deploy``: a plain check asks no database."""
    add_task(app, outbox=True)
    assert found() == {}


def test_an_outbox_without_a_relay(outbox: str) -> None:
    """W016 tells that no relay was ever there, and how to start one."""
    assert_said("W016", f"Task {NAME} is", f"seen in {outbox!r} yet, and", deploy=True)
    hint = str(found(deploy=True)["W016"].hint)
    assert "manage.py celery_outbox relay" in hint
    assert RELAY_TASK in hint


@pytest.mark.parametrize(
    ("ago", "wrong"),
    [
        (timedelta(), False),
        (timedelta(minutes=59), False),
        (timedelta(minutes=61), True),
        (timedelta(days=3), True),
    ],
)
def test_a_relay_that_is_gone(outbox: str, ago: timedelta, wrong: bool) -> None:
    """W016 is silent for an hour after a relay was there, and then names the last one."""
    note_relay(outbox, ago)
    if wrong:
        assert_said("W016", "since 20", "(web1 pid 42)", deploy=True)
    else:
        assert found(deploy=True) == {}


def test_beat_is_a_relay(app: Celery, outbox: str) -> None:
    """W016 is silent where beat starts the shipped task, but not for any task of beat's."""
    app.conf.beat_schedule = {"other": {"task": NAME, "schedule": 10}}
    assert set(found(deploy=True)) == {"W016"}
    entry = {"task": RELAY_TASK, "schedule": 10}
    app.conf.beat_schedule = {**app.conf.beat_schedule, "outbox": entry}
    assert found(deploy=True) == {}


def test_the_task_that_the_hint_names_is_there() -> None:
    """W016 names the shipped task for beat's schedule."""
    assert relay_outbox.name == RELAY_TASK


def test_an_outbox_that_nobody_uses_needs_no_relay(
    app: Celery, settings: Settings, make_database: MakeDatabase
) -> None:
    """W016 is silent about a table that no task needs, until the setting OUTBOX fills it."""
    make_database("sqlite")
    add_task(app)
    add_task(app, name=f"{NAME}_plain", base=Task)
    assert found(deploy=True) == {}
    settings.DJANGO_CELERY_SAFE = {"OUTBOX": True}
    assert_said("W016", f"Task {NAME} is", deploy=True)


def test_each_outbox_needs_a_relay(outbox: str, make_database: MakeDatabase) -> None:
    """W016 comes for each database whose outbox has no relay, and not for the others."""
    others = [make_database("sqlite") for _ in range(2)]
    note_relay(outbox, timedelta())
    messages = checking.find_messages(deploy=True)
    said = [message.msg for message in messages if str(message.id).endswith("W016")]
    assert len(said) == 2
    assert [alias in text for alias, text in zip(others, said, strict=True)] == [True, True]


def test_the_database_of_the_locks_needs_no_relay(
    outbox: str, make_database: MakeDatabase, settings: Settings
) -> None:
    """W016 leaves out LOCK_DATABASE, whose outbox nobody uses."""
    locks = make_database("sqlite-immediate")
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": locks}
    assert_said("W016", f"seen in {outbox!r} yet", deploy=True)
    note_relay(outbox, timedelta())
    assert found(deploy=True) == {}
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": outbox}
    assert_said("W016", f"seen in {locks!r} yet", deploy=True)


def test_the_only_outbox_needs_a_relay_though_locks_live_there(
    outbox: str, settings: Settings
) -> None:
    """W016 comes for LOCK_DATABASE where no other database has an outbox."""
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": outbox}
    assert_said("W016", f"seen in {outbox!r} yet", deploy=True)


def test_a_database_that_is_gone(app: Celery, make_database: MakeDatabase) -> None:
    """W016 says that a database could not be asked, and the check goes on."""
    add_task(app, outbox=True)
    alias = make_database("sqlite")
    note_relay(alias, timedelta())
    with registered("gone", gone_settings()):
        assert_said("W016", "outbox of 'gone' (OperationalError", deploy=True)


def test_an_outbox_without_a_table(
    app: Celery, make_database: MakeDatabase, tmp_path: Path
) -> None:
    """E006 tells that no database has the table of the outbox, until one has it."""
    add_task(app, outbox=True)
    with registered("empty", sqlite_settings(tmp_path / "empty.sqlite3", "sqlite")):
        assert_said("E006", f"Task {NAME} is", "no database has its table", deploy=True)
        assert "manage.py migrate" in str(found(deploy=True)["E006"].hint)
        make_database("sqlite")
        assert set(found(deploy=True)) == {"W016"}


def test_a_safe_task_of_its_own_is_a_user_of_the_outbox(
    app: Celery, make_database: MakeDatabase
) -> None:
    """A class of the project's that says ``outbox = True`` is heeded as the option is."""

    class Kept(SafeTask):
        abstract = True
        outbox = True

    make_database("sqlite")
    add_task(app, base=Kept)
    assert set(found(deploy=True)) == {"W016"}


def test_good_settings_are_silent(app: Celery, outbox: str) -> None:
    """A bounded broker, JSON and a relay give no message of sending, with ``--deploy`` or not."""
    app.conf.broker_transport_options = TRANSPORT_OPTIONS
    note_relay(outbox, timedelta())
    assert found() == found(deploy=True) == {}
