"""The system checks: each cause gives its id, its meaning and a hint; a worker logs it."""

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from billiard import current_process
from celery import Celery, Task, signals
from celery.beat import ScheduleEntry
from celery.contrib.django.task import DjangoTask
from celery.schedules import schedule
from django.core import checks
from django.db import connections
from pytest_django import Settings

from django_celery_safe import (
    ConfigurationError,
    SafeTaskMixin,
    cache_lock,
    idempotent,
    single_instance,
    stages,
)
from django_celery_safe.checks.project import RELAY_TASK
from django_celery_safe.databases import Now
from django_celery_safe.models import OutboxMessage, OutboxRelay
from django_celery_safe.sending.relay import Relay
from tests import checking
from tests.app.models import Person
from tests.checking import NAME, REDIS, add_task, app, app_without_tasks, no_faults, reindex
from tests.conftest import MakeDatabase, UseBroker
from tests.processes import CeleryWorker, Journal, wait_for
from tests.routing import runs_in
from tests.servers import RedisServer
from tests.servers.databases import gone_settings, registered, sqlite_settings

HOUR = 3600
SQLITE = "django.db.backends.sqlite3"
RABBITMQ_BROKER = "amqp://127.0.0.1:1//"
DJANGO = "django.core.cache.backends"
LOCMEM = f"{DJANGO}.locmem.LocMemCache"
#: Environment variable with the path of the journal in which a worker notes its forks.
FORKS = "SAFE_TEST_FORKS"
#: Checks that need ``--deploy``; E002 and W002 have parts that do, and parts that don't.
DEPLOYED = {"E003", "W006", "W008", "W009", "W010"}

__all__ = ["app", "no_faults"]

pytestmark = pytest.mark.filterwarnings("ignore:Overriding setting DATABASES")


@pytest.fixture(autouse=True)
def _in_order(no_faults: None, app: Celery, settings: Settings) -> Iterator[None]:
    """Let only databases of the test have an outbox; wait for what a worker asks at its start."""
    settings.DATABASE_ROUTERS = ["tests.routing.NotInDefault"]
    settings.CACHES = {"default": redis(0), "locks": redis(1)}
    settings.DJANGO_CELERY_SAFE = {"LOCK_CACHE": "locks"}
    yield
    for thread in threading.enumerate():
        if "(_log_messages)" in thread.name:
            thread.join(30)


def redis(number: int) -> dict[str, str]:
    """Return a cache in a database of a Redis that is not there."""
    return {**REDIS, "LOCATION": f"redis://127.0.0.1:1/{number}"}


def found(*, deploy: bool = True) -> dict[str, checks.CheckMessage]:
    """Return what our checks say by id, but that the lock store is silent."""
    said = checking.found(deploy=deploy)
    if "could not be asked to acquire" in getattr(said.get("W010"), "msg", ""):
        del said["W010"]
    return said


def assert_said(number: str, *parts: str) -> None:
    """Assert that the checks say only this, with all of these parts."""
    said = found()
    assert set(said) == {number}
    text = f"{said[number].msg} {said[number].hint}"
    assert [part for part in parts if not re.search(part, text)] == []
    assert (number in found(deploy=False)) is (number not in DEPLOYED)


# Settings and places.


def sqlite(name: str) -> dict[str, Any]:
    """Return a SQLite file with IMMEDIATE, as DATABASES has it."""
    return {"ENGINE": SQLITE, "NAME": name, "OPTIONS": {"transaction_mode": "IMMEDIATE"}}


def ours(**given: Any) -> dict[str, Any]:
    """Return our settings."""
    return {"DJANGO_CELERY_SAFE": {"LOCK_CACHE": "locks", **given}}


def locks_in(backend: str, **more: Any) -> dict[str, Any]:
    """Return settings with the locks in a cache of this class."""
    locks = {"BACKEND": backend, "LOCATION": "redis://127.0.0.1:1/1", **more}
    return {"CACHES": {"default": redis(0), "locks": locks}}


def locks_in_database(**databases: Any) -> dict[str, Any]:
    """Return settings with the locks in the last of these databases."""
    return {"DATABASES": databases, "DJANGO_CELERY_SAFE": {"LOCK_DATABASE": list(databases)[-1]}}


A, B, MEMORY = sqlite("a"), sqlite("b"), sqlite(":memory:")
MEMCACHED = locks_in(f"{DJANGO}.memcached.PyMemcacheCache", LOCATION="127.0.0.1:1")
SLOW, FAST = timedelta(seconds=31), timedelta(seconds=30)
DEFERRED = {"ENGINE": SQLITE, "NAME": "a"}
#: An id, words of its text and hint, settings with the fault, and settings without it.
SETTINGS: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("E001", "no setting 'LOCK_TIMOUT'.*'LOCK_TIMEOUT'", ours(LOCK_TIMOUT=9), ours(LOCK_TIMEOUT=9)),
    ("E001", "no setting 'COLOUR'.*It knows: LOCK_CACHE", ours(COLOUR="blue"), {}),
    ("E001", "no key 'sen'.*mean 'sent'", ours(RETENTION={"sen": 9}), ours(RETENTION={"sent": 9})),
    ("E001", "has to be a dict.*Write DJANGO", {"DJANGO_CELERY_SAFE": "not a dict"}, {}),
    ("E001", "LOCK_TIMEOUT.*The default is 30", ours(LOCK_TIMEOUT=None), {}),
    ("E001", "OUTBOX='forever'", ours(OUTBOX="forever"), ours(OUTBOX=False)),
    ("E001", "MAX_DEATHS=0", ours(MAX_DEATHS=0), ours(MAX_DEATHS=None)),
    ("E001", "SEND_TIMEOUT", ours(OUTBOX_SEND_TIMEOUT=SLOW), ours(OUTBOX_SEND_TIMEOUT=FAST)),
    ("E002", "stores nothing.*Redis", locks_in(f"{DJANGO}.dummy.DummyCache"), {}),
    ("E002", "pylibmc", locks_in(f"{DJANGO}.memcached.PyLibMCCache"), {}),
    ("E002", "LOCK_DATABASE is", ours(LOCK_DATABASE=["x"]), {}),
    ("E002", "mean 'default'", ours(LOCK_DATABASE="defalt"), {}),
    ("E002", "mean 'locks'", ours(LOCK_CACHE="lock"), {}),
    ("E002", "LOCK_CACHE or LOCK_DATABASE", locks_in("no_such_module.Cache"), {}),
    ("E002", "LOCK_CACHE or LOCK_DATABASE", locks_in(REDIS["BACKEND"], OPTIONS=["x"]), {}),
    (
        "E002",
        "also holds data.*SQLite file of its own",
        locks_in_database(default=A, locks={**A, "NAME": "./a"}),
        locks_in_database(default=A, locks=B),
    ),
    ("E002", "also holds data", locks_in_database(default=A), {}),
    ("E002", "in memory: each thread", locks_in_database(default=A, locks=MEMORY), {}),
    ("W002", "every process has for itself.*Use Redis", locks_in(LOCMEM), {}),
    ("W002", "forgets items when it is full and .*restarts", MEMCACHED, {}),
    ("W002", "nothing is known of", locks_in("tests.locks.test_portable.UnknownCache"), {}),
    ("W003", 'S."default".*IMMEDIATE', {"DATABASES": {"default": DEFERRED, "good": B}}, {}),
]


@pytest.mark.parametrize("case", SETTINGS)
def test_settings(case: Any, settings: Settings) -> None:
    """A setting, cache or database that can't be used gives one message, without any query."""
    number, said, faulty, mended = case
    for name, value in faulty.items():
        setattr(settings, name, value)
    (message,) = checking.find_messages()
    assert message.id == f"django_celery_safe.{number}"
    assert re.search(said, f"{message.msg} {message.hint}")
    assert number in found()  # nor do other checks fail by it
    for name, value in ({**ours(), **locks_in(REDIS["BACKEND"]), "DATABASES": {}} | mended).items():
        setattr(settings, name, value)
    assert [m for m in checking.find_messages() if re.search(said, m.msg)] == []


def test_eager_tasks_share_no_locks(settings: Settings, app: Celery) -> None:
    """W002 is silent with task_always_eager; what can't hold a lock at all stays an error."""
    app.conf.task_always_eager = True
    settings.CACHES = locks_in(LOCMEM)["CACHES"]
    assert found(deploy=False) == {}
    settings.CACHES = locks_in("no_such_module.Cache")["CACHES"]
    assert set(found(deploy=False)) == {"E002"}


def test_locks_that_are_cleared_with_a_cache(settings: Settings) -> None:
    """W002 names, with ``--deploy``, the caches whose clear() frees the locks."""
    for caches, shared in (
        ({"default": redis(0)}, "the project's default cache"),
        ({"default": redis(1), "locks": redis(1)}, r'CACHES\["default"\]'),
        ({"a": redis(1), "default": redis(2), "locks": redis(1)}, r'CACHES\["a"\]'),
        ({"default": redis(0), "other": {"BACKEND": "no.such"}, "locks": redis(1)}, None),
    ):
        settings.CACHES = caches
        settings.DJANGO_CELERY_SAFE = {"LOCK_CACHE": list(caches)[-1]}
        assert found(deploy=False) == {}
        assert set(found()) == ({"W002"} if shared else set())
        assert not shared or re.search(shared, found()["W002"].msg)


def test_the_server_of_the_locks(settings: Settings) -> None:
    """With --deploy: a server that is silent, may evict locks, or refuses what locks need."""
    assert checking.found() == {}
    assert "could not be asked" in checking.found(deploy=True)["W010"].msg
    with RedisServer() as server:
        settings.CACHES = locks_in(REDIS["BACKEND"], LOCATION=server.url)["CACHES"]
        for memory, policy, evicts in (
            ("0", "volatile-lru", False),
            ("50mb", "noeviction", False),
            ("50mb", "allkeys-lfu", True),
        ):
            with server.client() as admin:
                admin.config_set("maxmemory", memory)
                admin.config_set("maxmemory-policy", policy)
            said = found()
            assert set(said) == ({"W002"} if evicts else set())
            assert not evicts or f"policy is {policy}, which deletes locks" in said["W002"].msg
        with server.client() as admin:
            admin.execute_command("ACL", "SETUSER", "default", "-info")
            assert_said("W010", "refused to tell how it evicts keys", "INFO")
            assert cache_lock("x").acquire()
            # A command that locks need only now and then.
            admin.execute_command("ACL", "SETUSER", "default", "-zremrangebyscore")
            errors = [one.msg for one in checking.find_messages(deploy=True) if one.is_serious()]
            assert any("refuses to this user what locks need: zremr" in text for text in errors)


def test_a_database_that_refuses_locks(settings: Settings, make_database: MakeDatabase) -> None:
    """E002, with --deploy: autocommit is off in LOCK_DATABASE, or it lacks tables."""
    alias = make_database("sqlite-immediate")
    given = connections.settings[alias]
    with (
        registered("manual", {**given, "AUTOCOMMIT": False}),
        registered("bare", {**given, "NAME": f"{given['NAME']}.bare"}),
    ):
        for name, said in (
            ("manual", "autocommit off is one"),
            ("bare", "migrate django_celery_safe --database=bare"),
            (alias, None),
        ):
            settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": name}
            assert set(found()) == ({"E002"} if said else set())
            assert not said or said in f"{found()['E002'].msg} {found()['E002'].hint}"


# Tasks.


class AppTask(SafeTaskMixin, DjangoTask):
    """The task class of a project, which is one of ours."""

    abstract = True


def welcome(pk: int) -> None:
    """Do a thing once by a flag."""
    with Person.do_once(pk, "is_welcome_email_sent") as person:
        print(person)


def charge(pk: int) -> None:
    """Do a thing once by a record, in a block."""
    with idempotent(f"charge:{pk}") as claim:
        print(claim)


def logged(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Decorate as a project does, or as some libraries do."""

    @wraps(function, **options)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


def said_of(
    lock: Any = None,
    conf: Any = None,
    broker: str = "memory://",
    function: Callable[..., Any] = reindex,
    **options: Any,
) -> dict[str, checks.CheckMessage]:
    """
    Return what is said of a task, but that the outbox has no table here, and no relay.

    Args:
        lock: Options of its lock; None: it has none.
        conf: The configuration of its app.
    """
    decorated = function if lock is None else single_instance(**lock)(function)
    with app_without_tasks(broker, **conf or {}) as app:
        add_task(app, decorated, **options)
        said = found()
    return {number: said[number] for number in said if number not in {"E003", "W009"}}


plan, on_redis = partial(partial, said_of), partial(partial, said_of, broker=checking.REDIS_BROKER)


def transport(**options: Any) -> dict[str, Any]:
    """Return a configuration with these options of the broker."""
    return {"broker_transport_options": options}


SURE = {"acks_late": True, "reject_on_worker_lost": True}
WAIT_LONG = {"on_conflict": "wait", "blocking_timeout": HOUR + 2}
END, START = {"unique_until": "end"}, {"unique_until": "start"}
RETRY = {"on_conflict": "retry"}
LONG = {"acks_late": True, "time_limit": HOUR + 1}
NO_OPTIONS, HALF = transport(), transport(socket_timeout=1)
PATIENT = transport(**checking.TRANSPORT_OPTIONS, visibility_timeout=5402)
ADVICE = '"until_done".*WORKER_LOST.*WORKER_PREFETCH_MULTIPLIER = 1.*WORKER_DISABLE_PREFETCH'
Said: TypeAlias = Callable[[], dict[str, checks.CheckMessage]]
#: An id, words of its text and hint, and a task with the fault.
FAULTY: list[tuple[str, str, Said]] = [
    ("E005", "unique_until='end', but it is not a SafeTask.*task_cls=", plan(END, base=None)),
    ("E005", "has outbox=True, but it is not", plan(base=Task, outbox=True)),
    ("E005", "max_deaths=3, but it is not carried.*until_done", plan(max_deaths=3)),
    ("W005", '"start" and on_conflict="skip"', plan(START)),
    (
        "W006",
        "without socket_timeout and socket_connect_timeout.*OPTIONS",
        on_redis({}, NO_OPTIONS),
    ),
    ("W006", "without socket_connect_timeout:", plan({}, HALF, "sentinel://127.0.0.1:1")),
    ("W006", "AMQP without confirm_publish.*True", plan({}, NO_OPTIONS, RABBITMQ_BROKER)),
    ("W007", f"Task {NAME} does its work once.*gone.*{ADVICE}", plan(function=welcome)),
    ("W007", "once", plan(function=charge, acks_late=True, base=Task)),
    ("W007", "once", plan(function=idempotent(reindex), reject_on_worker_lost=True)),
    ("W007", "once", plan(function=logged(logged(welcome)))),
    ("W007", "once", plan(function=logged(idempotent(reindex), updated=()))),
    ("W007", "once", plan(function=welcome, autoretry_for=(OSError,))),
    ("W008", "for 3601 s .*timeout of 3600 s.*until_done.*_timeout.: 5402}", on_redis(**LONG)),
    ("W008", "may run for 3602 s", on_redis(WAIT_LONG, acks_late=True, base=Task)),
]
#: Tasks of which nothing is said.
SILENT: list[Said] = [
    plan(END, base=AppTask),
    plan(max_deaths=3, outbox="until_done"),
    plan(START | RETRY),
    on_redis(conf=NO_OPTIONS, base=Task),
    on_redis(conf=transport(socket_timeout=1, socket_connect_timeout=1)),
    plan({}, NO_OPTIONS, "no-such-broker://"),
    plan(function=welcome, **SURE),
    plan(function=welcome, outbox="until_done"),
    plan(conf={"task_annotations": {NAME: SURE}}, function=welcome),
    on_redis(conf=PATIENT, **LONG),
    on_redis(acks_late=True, time_limit=HOUR),
    on_redis(time_limit=HOUR + 1),
    on_redis(**LONG, outbox="until_done"),
    on_redis(**LONG, base=Task),
    plan({}, None, RABBITMQ_BROKER, **LONG),
    on_redis(function=welcome, **SURE),
]


@pytest.mark.parametrize(("number", "said", "find"), FAULTY)
def test_a_faulty_task(number: str, said: str, find: Said) -> None:
    """A task that can get lost, run twice or wait in vain gives one message, with its remedy."""
    messages = find()
    assert set(messages) == {number}
    assert re.search(said, f"{messages[number].msg} {messages[number].hint}")


@pytest.mark.parametrize("find", SILENT)
def test_a_task_in_order(find: Said) -> None:
    """A setting that only resembles a fault gives no message."""
    assert find() == {}


def test_each_task_of_the_current_app(app: Celery) -> None:
    """Only the tasks of the current app are checked; of lost ones, one message has the number."""
    for number in range(3):
        add_task(app, welcome, name=f"{NAME}_{number}")
        add_task(app, name=f"{NAME}_class_{number}", base=Task, outbox=True)
    *idle, lost = (message.msg for message in checking.find_messages())
    assert [text.split()[1] for text in idle] == [f"{NAME}_class_{number}" for number in range(3)]
    assert lost.startswith(f"3 tasks, such as {NAME}_0, do their work once")
    with app_without_tasks("memory://") as other:
        add_task(other)
        assert found(deploy=False) == {}


def test_tasks_that_can_not_be_loaded(
    app: Celery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W004 has the error of a task module, whoever imports it, and no task is checked."""
    (tmp_path / "broken_shop").mkdir()
    (tmp_path / "broken_shop/__init__.py").touch()
    (tmp_path / "broken_shop/tasks.py").write_text("raise OSError('no key')")
    monkeypatch.syspath_prepend(tmp_path)
    add_task(app, base=Task, outbox=True)
    app.conf.include = ["no_such_module"]
    assert "no_such_module" in found()["W004"].msg
    app.conf.include = []
    app.autodiscover_tasks(["broken_shop"])
    try:
        assert_said("W004", "OSError: no key")
    finally:
        sys.modules.pop("broken_shop", None)


# Tables and relays.


def leave_relay(alias: str, ago: timedelta) -> None:
    """Let a relay have been there so long ago, by the database's clock."""
    relay = Relay(alias)
    relay.housekeeping.take_turn_if_due()
    OutboxRelay.objects.using(alias).update(host="web1", pid=42, seen_at=Now() - ago)


def add_step(app: Celery) -> None:
    """Give the app a task that is a step."""
    add_task(app, single_instance(on_conflict="retry")(stages.step(welcome)), name=f"{NAME}_step")


@pytest.mark.parametrize("kind", ["outbox", "runs"])
def test_a_relay_that_nobody_sees(app: Celery, make_database: MakeDatabase, kind: str) -> None:
    """W009 comes where tasks need a relay, unless beat starts it or it was seen within an hour."""
    alias = make_database("sqlite-immediate")
    with runs_in(alias):
        add_task(app, name=f"{NAME}_plain")
        assert found() == {}
        if kind == "runs":
            add_step(app)
        else:
            add_task(app, outbox=True)
        assert_said("W009", f"Task {NAME}", f"in {alias!r} yet", "celery_outbox relay", "beat")
        app.conf.beat_schedule = {"other": {"task": NAME, "schedule": 10}}
        assert set(found()) == {"W009"}
        for entry in (
            {"task": RELAY_TASK, "schedule": 10},
            ScheduleEntry("relay", RELAY_TASK, schedule=schedule(10), app=app),
        ):
            app.conf.beat_schedule = {"relay": entry}
            assert found() == {}
        app.conf.beat_schedule = {}
        leave_relay(alias, timedelta(minutes=50))
        assert found() == {}
        OutboxRelay.objects.using(alias).update(seen_at=Now() - timedelta(minutes=61))
        assert_said("W009", r"for 61min \(web1 pid 42\)")


def test_every_outbox_needs_a_relay(
    app: Celery, make_database: MakeDatabase, settings: Settings
) -> None:
    """W009 comes for each outbox that answers, but for one of LOCK_DATABASE beside others."""
    aliases = [make_database("sqlite-immediate") for _ in range(3)]
    settings.DJANGO_CELERY_SAFE = {"OUTBOX": True, "LOCK_DATABASE": aliases[0]}
    add_task(app, name="celery.chain")
    assert found() == {}  # it comes with Celery
    add_task(app)
    said = [m.msg for m in checking.find_messages(deploy=True) if str(m.id).endswith("W009")]
    assert [alias for alias in aliases if any(repr(alias) in text for text in said)] == aliases[1:]
    for alias in aliases[1:]:
        leave_relay(alias, timedelta())
    with registered("gone", gone_settings()):
        assert found() == {}


def test_tables_that_are_missing(app: Celery, make_database: MakeDatabase, tmp_path: Path) -> None:
    """E003 says who needs the tables of the outbox, or of runs, and what to run."""
    add_task(app, outbox=True)
    with registered("empty", sqlite_settings(tmp_path / "empty.sqlite3", "sqlite")):
        assert_said("E003", f"Task {NAME} needs", "no database has its", "Run manage.py migrate")
        app.tasks.clear()
        add_step(app)
        alias = make_database("sqlite-immediate")
        leave_relay(alias, timedelta())
        with runs_in("empty"):
            assert_said("E003", "is a step of stages, and 'empty'", "migrate --database=empty")
        with runs_in(alias):
            assert found() == {}
            with connections[alias].schema_editor() as editor:
                editor.delete_model(OutboxMessage)
            assert set(found()) == {"E003"}


# Workers.


def test_local_memory_is_refused_in_a_pool(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of a worker's pool holds no locks in its local memory; others do."""
    settings.CACHES = locks_in(LOCMEM)["CACHES"]
    assert cache_lock("x").acquire()
    monkeypatch.setitem(current_process()._config, "daemon", True)  # as billiard makes them
    with pytest.raises(ConfigurationError, match=r"a process of a worker's pool.*--pool=threads"):
        cache_lock("y").acquire()


def test_a_worker_logs_no_silenced_check(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """Checks in SILENCED_SYSTEM_CHECKS are not logged; the others are, with their hints."""
    settings.SILENCED_SYSTEM_CHECKS = ["django_celery_safe.W002"]
    settings.DJANGO_CELERY_SAFE = {}
    for receiver in [receiver() for _, receiver in signals.worker_ready.receivers]:
        if getattr(receiver, "__module__", "").startswith("django_celery"):
            receiver()
    # A thread of its own asks a server.
    wait_for(lambda: "W010" in caplog.text, 10)
    assert "HINT: Check that the server is up" in caplog.text
    assert "W002" not in caplog.text


@signals.worker_before_create_process.connect
def note_what_a_child_inherits(**_: Any) -> None:
    """In a worker of these tests: write down what else goes on when the pool forks."""
    if path := os.environ.get(FORKS):
        threads = [thread.name for thread in threading.enumerate()]
        Journal(Path(path)).write("forks", threads=threads)


@pytest.mark.long
def test_the_checks_wait_until_the_pool_has_forked(
    use_broker: UseBroker, settings: Settings, tmp_path: Path
) -> None:
    """No thread of theirs runs when a child is forked; a silent server does not hold up a start."""
    # For the checks of Django in a worker: since 6.0 one of a model asks the database.
    settings.DATABASES = {"default": {"ENGINE": SQLITE, "NAME": ":memory:"}}
    settings.DJANGO_CELERY_SAFE = {}
    use_broker()
    journal = Journal(tmp_path / "forks")
    with RedisServer() as server:
        settings.CACHES = {"default": {**REDIS, "LOCATION": server.url}}
        with (
            server.silence(),
            CeleryWorker(
                "tests.app", arguments=("--include", __name__), env={FORKS: str(journal.path)}
            ) as worker,
        ):
            # Later ones would replace a child that a busy machine kept from starting.
            forks = [entry["threads"] for entry in journal.entries()[:2]]
            assert forks == [["MainThread"]] * 2
            assert "W002" not in worker.log
            server.resume()
            wait_for(lambda: "django_celery_safe.W002" in worker.log, 20)
