"""The system checks of tasks: each says what contradicts a task's lock, with its numbers."""

import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import celery
import pytest
from celery import Celery, Task
from celery.contrib.django.task import DjangoTask
from django.core import checks
from pytest_django import Settings

from django_celery_safe import SafeTask, SafeTaskMixin, single_instance
from tests.checking import TRANSPORT_OPTIONS, find_messages, found
from tests.processes import CeleryWorker
from tests.test_checks import IMMEDIATE, REDIS, SQLITE

ROOT = Path(__file__).resolve().parent.parent

#: Brokers whose URL alone says what they are; no server listens there.
REDIS_BROKER = "redis://127.0.0.1:1/0"
RABBITMQ_BROKER = "amqp://127.0.0.1:1//"
NAME = "shop.tasks.reindex"

HOUR = 3600
LATE = {"acks_late": True}
WAIT = {"on_conflict": "wait"}

pytestmark = pytest.mark.filterwarnings("ignore:Overriding setting DATABASES")


class AppTask(DjangoTask):
    """The task class of a project that does not know this package."""

    abstract = True


class PlainAppTask(Task):
    """The task class of a project without Celery's support for Django."""

    abstract = True


class PlainSafeTask(SafeTaskMixin):
    """A safe task without Celery's support for Django."""

    abstract = True


class SafeAppTask(SafeTaskMixin, AppTask):
    """The code that W012 advises to write."""

    abstract = True


class MakeApp(Protocol):
    """Makes a Celery app without tasks and makes it the current one."""

    def __call__(
        self, broker: str = "memory://", task_cls: str | type | None = None, **conf: Any
    ) -> Celery:
        """Return the app; ``conf`` is Celery's configuration."""


@pytest.fixture(autouse=True)
def _no_faults(settings: Settings) -> None:
    """Begin with settings that no check complains of, in a form that needs no server."""
    settings.CACHES = {"default": REDIS}
    settings.DATABASES = {"default": {"ENGINE": "django.db.backends.postgresql", "NAME": "data"}}
    settings.DJANGO_CELERY_SAFE = {}


@pytest.fixture
def make_app() -> Iterator[MakeApp]:
    """Make Celery apps for this test; after it the current app is the one before it."""
    before = celery.current_app._get_current_object()
    made = []

    def make(broker: str = "memory://", task_cls: str | type | None = None, **conf: Any) -> Celery:
        app = Celery("shop", broker=broker, task_cls=task_cls, set_as_current=False)
        app.conf.update({"broker_transport_options": TRANSPORT_OPTIONS, **conf})
        app.finalize()
        # The shared tasks of other tests are in every app.
        app.tasks.clear()
        app.set_current()
        made.append(app)
        return app

    yield make
    before.set_current()
    for app in made:
        app.close()


def add_task(app: Celery, alone: dict[str, Any] | None = None, **options: Any) -> Any:
    """Give the app one task; ``alone`` are the options of ``@single_instance``, None: without."""

    def reindex() -> None:
        """Do nothing."""

    function = reindex if alone is None else single_instance(**alone)(reindex)
    return app.task(function, **{"name": NAME, "base": SafeTask, "shared": False, **options})


def assert_said(expected: str | None, number: str) -> None:
    """Assert that the checks say only this, with a hint, or nothing."""
    messages = found()
    if expected is None:
        assert messages == {}
        return
    assert set(messages) == {number}
    message = messages[number]
    assert f"Task {NAME} " in message.msg
    assert expected in message.msg
    assert message.hint
    assert message.level == (checks.ERROR if number[0] == "E" else checks.WARNING)


@pytest.mark.parametrize("until", ["start", "end", 600.0])
@pytest.mark.parametrize(
    ("task_cls", "base", "wrong"),
    [
        (None, None, True),
        (PlainAppTask, None, True),
        (None, AppTask, True),
        (None, SafeTask, False),
        (None, SafeAppTask, False),
        (SafeAppTask, None, False),
    ],
)
def test_unique_until_needs_a_safe_task(
    make_app: MakeApp, until: str | float, task_cls: type | None, base: type | None, wrong: bool
) -> None:
    """E005 tells of a task whose sends nothing keeps apart; SafeTaskMixin is silent."""
    app = make_app(task_cls=task_cls)
    add_task(app, {"unique_until": until, "on_conflict": "retry"}, base=base)
    assert_said(f"unique_until={until!r}, but it is not a SafeTask" if wrong else None, "E005")


def test_without_unique_until_any_task_will_do(make_app: MakeApp) -> None:
    """E005 and W008 are silent about a task whose sends are not to be kept apart."""
    add_task(make_app(task_protocol=1), {}, base=Task)
    assert found() == {}


@pytest.mark.parametrize(
    ("protocol", "base", "number"), [(1, SafeTask, "W008"), (1, None, "E005"), (2, SafeTask, None)]
)
def test_messages_without_headers(
    make_app: MakeApp, protocol: int, base: type | None, number: str | None
) -> None:
    """W008 tells of a protocol whose messages can't carry the lock; E005 comes before it."""
    add_task(make_app(task_protocol=protocol), {"unique_until": "end"}, base=base)
    expected = {None: None, "W008": "task_protocol is 1", "E005": "it is not a SafeTask"}
    assert_said(expected[number], number or "")


@pytest.mark.parametrize(
    ("alone", "options", "conf", "said"),
    [
        ({"timeout": 60}, {}, {}, "of 60 s, but no time limit ends it"),
        ({"timeout": 60}, {"time_limit": 61}, {}, "of 60 s, but its time limit is 61 s"),
        ({"timeout": 60}, {"time_limit": 60}, {}, None),
        ({"timeout": timedelta(minutes=1)}, {"time_limit": 60}, {}, None),
        ({"timeout": 60}, {}, {"task_time_limit": 90}, "of 60 s, but its time limit is 90 s"),
        ({"timeout": 60}, {}, {"task_time_limit": 60}, None),
        ({"timeout": 60}, {"time_limit": 50}, {"task_time_limit": 90}, None),
        ({"timeout": 60}, {"time_limit": 70}, {"task_time_limit": 60}, "its time limit is 70 s"),
        ({}, {"time_limit": 31}, {}, "a lock of 30 s, but its time limit is 31 s"),
        ({}, {"time_limit": 30}, {}, None),
    ],
)
def test_a_run_that_may_outlive_its_lock(
    make_app: MakeApp,
    alone: dict[str, Any],
    options: dict[str, Any],
    conf: dict[str, Any],
    said: str | None,
) -> None:
    """W009: without renewal, a run has to end with its lease at the latest."""
    add_task(make_app(**conf), {"renew": False, **alone}, **options)
    assert_said(said, "W009")


def test_a_lock_that_is_renewed_needs_no_time_limit(make_app: MakeApp) -> None:
    """W009 is silent about a lock that lasts as long as its run."""
    add_task(make_app(), {"timeout": 60}, time_limit=HOUR)
    assert found() == {}


def test_a_lease_that_means_nothing_is_told_once(make_app: MakeApp, settings: Settings) -> None:
    """A LOCK_TIMEOUT that is not a valid lease is E001, whatever tasks there are."""
    settings.DJANGO_CELERY_SAFE = {"LOCK_TIMEOUT": None}
    add_task(make_app(), {"renew": False}, time_limit=90)
    assert set(found()) == {"E001"}


def test_the_lease_is_that_of_the_settings(make_app: MakeApp, settings: Settings) -> None:
    """W009 compares with LOCK_TIMEOUT where the task has no lease of its own."""
    add_task(make_app(), {"renew": False}, time_limit=90)
    assert_said("a lock of 30 s, but its time limit is 90 s", "W009")
    settings.DJANGO_CELERY_SAFE = {"LOCK_TIMEOUT": 90}
    assert found() == {}


@pytest.mark.parametrize(
    ("patience", "options", "conf", "limit"),
    [
        (10, {}, {}, None),
        (10, {"time_limit": 10}, {}, "10 s"),
        (10, {"time_limit": 10.5}, {}, None),
        (10, {"soft_time_limit": 10}, {}, "10 s"),
        (10, {"soft_time_limit": 11}, {}, None),
        (10, {"soft_time_limit": 8, "time_limit": 60}, {}, "8 s"),
        (10, {"soft_time_limit": 60, "time_limit": 9}, {}, "9 s"),
        (10, {}, {"task_time_limit": 7}, "7 s"),
        (10, {}, {"task_soft_time_limit": 6}, "6 s"),
        (10, {"time_limit": 20, "soft_time_limit": 20}, {"task_soft_time_limit": 6}, None),
        (0.5, {"time_limit": 0.25}, {}, "0.25 s"),
    ],
)
def test_a_run_that_is_ended_while_it_waits(
    make_app: MakeApp,
    patience: float,
    options: dict[str, Any],
    conf: dict[str, Any],
    limit: str | None,
) -> None:
    """W010: waiting counts for the time limits, the task's own before those of the app."""
    add_task(make_app(**conf), {**WAIT, "blocking_timeout": patience}, **options)
    said = limit and f"for up to {patience:g} s, but its time limit ends it after {limit}"
    assert_said(said, "W010")


def test_a_run_that_does_not_wait_may_be_short(make_app: MakeApp) -> None:
    """W010 is silent about a task that does not wait for its lock."""
    add_task(make_app(), {"on_conflict": "retry"}, time_limit=1)
    assert found() == {}


@pytest.mark.parametrize(
    ("broker", "timeout", "alone", "options", "conf", "longest"),
    [
        (REDIS_BROKER, None, {}, {**LATE, "time_limit": HOUR}, {}, None),
        (REDIS_BROKER, None, {}, {**LATE, "time_limit": HOUR + 1}, {}, 3601),
        (REDIS_BROKER, None, {}, {"time_limit": HOUR + 1}, {}, None),
        (REDIS_BROKER, None, {}, LATE, {}, None),
        (REDIS_BROKER, 2 * HOUR, {}, {**LATE, "time_limit": 2 * HOUR}, {}, None),
        (REDIS_BROKER, 60, {}, {**LATE, "time_limit": 61}, {}, 61),
        (REDIS_BROKER, 60, {}, LATE, {"task_time_limit": 90}, 90),
        (REDIS_BROKER, 60, {}, {"time_limit": 61}, {"task_acks_late": True}, 61),
        (
            REDIS_BROKER, 60, {}, {"acks_late": False, "time_limit": 61},
            {"task_acks_late": True}, None,
        ),
        (REDIS_BROKER, 60, {**WAIT, "blocking_timeout": 70}, LATE, {}, 70),
        (REDIS_BROKER, 60, {**WAIT, "blocking_timeout": 60}, LATE, {}, None),
        (RABBITMQ_BROKER, None, {}, {**LATE, "time_limit": 2 * HOUR}, {}, None),
        ("memory://", 60, {}, {**LATE, "time_limit": 61}, {}, None),
        ("no-such-broker://", 60, {}, {**LATE, "time_limit": 61}, {}, None),
    ],
)  # fmt: skip
def test_a_run_that_is_delivered_again(
    make_app: MakeApp,
    broker: str,
    timeout: int | None,
    alone: dict[str, Any],
    options: dict[str, Any],
    conf: dict[str, Any],
    longest: int | None,
) -> None:
    """W011: a run that acknowledges late has to end before a Redis gives its message again."""
    if timeout is not None:
        options_of_broker = {**TRANSPORT_OPTIONS, "visibility_timeout": timeout}
        conf = {**conf, "broker_transport_options": options_of_broker}
    add_task(make_app(broker, **conf), alone, **options)
    said = longest and (
        f"may run for {longest} s and acknowledges late, but after a visibility_timeout of "
        f"{timeout or HOUR} s"
    )
    assert_said(said or None, "W011")
    if longest:
        hint = re.search(r'"visibility_timeout": (\d+)', str(found()["W011"].hint))
        assert hint is not None
        assert int(hint[1]) > longest


@pytest.mark.parametrize("alone", [{"renew": False}, {"unique_until": "end"}])
def test_each_task_gets_its_own_message(make_app: MakeApp, alone: dict[str, Any]) -> None:
    """Two tasks with the same fault are two messages, each with its name."""
    app = make_app()
    names = {f"{NAME}_{number}" for number in range(2)}
    for name in names:
        add_task(app, alone, base=None, name=name)
    messages = find_messages()
    assert {message.msg.split()[1] for message in messages} == names
    assert len(messages) == 2


def test_tasks_without_a_lock_are_nobodys_business(make_app: MakeApp) -> None:
    """A task without a lock is not blamed for the faults of locks."""
    options = {"acks_late": True, "time_limit": 2 * HOUR, "soft_time_limit": 1}
    add_task(make_app(REDIS_BROKER, task_protocol=1), None, **options)
    assert found().keys() == {"W020"}  # whether with a lock or without


def test_only_the_current_app_is_checked(make_app: MakeApp) -> None:
    """Faults of another app of the process are not told, until it is the current one."""
    faulty, good = make_app(), make_app()
    add_task(faulty, {"renew": False})
    add_task(good, {})
    assert found() == {}
    faulty.set_current()
    assert set(found()) == {"W009"}


@pytest.mark.parametrize("by", ["include", "autodiscovery"])
def test_tasks_that_can_not_be_loaded(
    make_app: MakeApp, by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W007 has the error of a task module, whoever imports it, and nothing else is checked."""
    write_files(
        tmp_path, {"broken_shop/__init__.py": "", "broken_shop/tasks.py": "raise OSError('no key')"}
    )
    monkeypatch.syspath_prepend(tmp_path)
    app = make_app()
    add_task(app, {"renew": False})
    if by == "include":
        app.conf.include = ["broken_shop.tasks"]
    else:
        app.autodiscover_tasks(["broken_shop"])
    try:
        messages = found()
    finally:
        sys.modules.pop("broken_shop", None)
    assert set(messages) == {"W007"}
    assert "no key" in messages["W007"].msg
    assert "OSError" in messages["W007"].msg
    assert "A worker" in str(messages["W007"].hint)
    assert messages["W007"].level == checks.WARNING


@pytest.mark.parametrize(
    "task_cls", [AppTask, f"{__name__}:AppTask", f"{__name__}.AppTask", PlainAppTask]
)
def test_a_task_class_that_is_bypassed(make_app: MakeApp, task_cls: str | type) -> None:
    """W012 names the project's class, however it was given, and how many tasks do without it."""
    app = make_app(task_cls=task_cls)
    for number in range(3):
        add_task(app, {}, name=f"{NAME}_{number}")
    add_task(app, base=None)
    add_task(app, base=Task, name=f"{NAME}_plain")
    messages = found()
    assert set(messages) == {"W012"}
    name = "PlainAppTask" if task_cls is PlainAppTask else "AppTask"
    assert f"is {__name__}.{name}, but 3 task(s)" in messages["W012"].msg
    assert f"such as {NAME}_" in messages["W012"].msg
    assert f"class SafeAppTask(SafeTaskMixin, {name})" in str(messages["W012"].hint)
    assert messages["W012"].level == checks.WARNING


def test_a_safe_task_class_that_is_bypassed(make_app: MakeApp) -> None:
    """W012's hint can be followed too where the project's class derives from SafeTaskMixin."""
    app = make_app(task_cls=SafeAppTask)
    add_task(app, {})
    message = found()["W012"]
    assert "SafeAppTask, but 1 task(s)" in message.msg
    assert "(SafeTaskMixin, SafeAppTask)" not in str(message.hint)  # Python has no order for these


@pytest.mark.parametrize(
    ("task_cls", "base"),
    [
        (None, SafeTask),
        (DjangoTask, SafeTask),
        (Task, SafeTask),
        (None, PlainSafeTask),
        (SafeTask, SafeTask),
        (SafeTask, PlainSafeTask),
        (SafeTask, None),
        (AppTask, SafeAppTask),
        (AppTask, None),
        (SafeAppTask, None),
        (f"{__name__}:SafeAppTask", SafeAppTask),
    ],
)
def test_a_task_class_that_is_in_use(
    make_app: MakeApp, task_cls: str | type | None, base: type | None
) -> None:
    """W012 is silent without a class of the project's own, and where every task has it."""
    add_task(make_app(task_cls=task_cls), {}, base=base)
    assert found() == {}


@pytest.mark.parametrize("before", [None, "", "yes"])
def test_other_checks_are_not_run_within_ours(
    make_app: MakeApp, before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading the tasks runs none of the project's checks, and leaves the environment alone."""
    runs = []

    def count(**_: Any) -> list[checks.CheckMessage]:
        runs.append(1)
        return []

    if before is None:
        monkeypatch.delenv("CELERY_SKIP_CHECKS", raising=False)
    else:
        monkeypatch.setenv("CELERY_SKIP_CHECKS", before)
    add_task(make_app(), {"renew": False})
    checks.register(count, "the_projects_own")
    try:
        assert set(found()) == {"W009"}
    finally:
        checks.registry.registry.registered_checks.discard(count)
    assert runs == []
    assert os.environ.get("CELERY_SKIP_CHECKS") == before


#: A project whose tasks are imported by nothing but autodiscovery.
PROJECT = {
    "site_of_shop/__init__.py": "from .celery import app\n",
    "site_of_shop/celery.py": """
from celery import Celery

app = Celery("site_of_shop", broker="memory://")
app.autodiscover_tasks()
""",
    "site_of_shop/settings.py": f"""
SECRET_KEY = "for tests only"
INSTALLED_APPS = ["django_celery_safe", "shop"]
DATABASES = {{
    alias: {{"ENGINE": {SQLITE!r}, "NAME": alias + ".sqlite3", "OPTIONS": {IMMEDIATE!r}}}
    for alias in ("default", "locks")
}}
DJANGO_CELERY_SAFE = {{"LOCK_DATABASE": "locks"}}
""",
    "shop/__init__.py": "",
    "shop/apps.py": """
from django.apps import AppConfig
from django.core import checks


class ShopConfig(AppConfig):
    name = "shop"

    def ready(self):
        checks.register(note, "shop")


def note(**kwargs):
    with open("checked.txt", "a") as file:
        file.write("checked\\n")
    return []
""",
    "shop/tasks.py": """
from celery import shared_task
from django_celery_safe import SafeTask, single_instance


@shared_task
@single_instance(unique_until="end")
def reindex(): ...
""",
}


def write_files(folder: Path, files: dict[str, str]) -> None:
    """Write files into a folder, with the folders that they are in."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def log_of_worker_with(folder: Path, name: str, text: str) -> list[str]:
    """Return what a worker printed until it was ready that has a module with this text."""
    write_files(folder, {f"{name}.py": text})
    with CeleryWorker(
        "tests.app",
        pool="solo",
        concurrency=1,
        arguments=["--include", name],
        env={"PYTHONPATH": str(folder)},
    ) as worker:
        return worker.log.splitlines()


def check_project(folder: Path) -> tuple[int, str]:
    """Run ``manage.py check`` of the project in a folder; return its status and output."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("CELERY_")
    }
    done = subprocess.run(
        [sys.executable, "-m", "django", "check"],
        cwd=folder,
        env={
            **environment,
            "DJANGO_SETTINGS_MODULE": "site_of_shop.settings",
            "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


def test_manage_py_check_finds_tasks_that_only_a_worker_imports(tmp_path: Path) -> None:
    """``check`` fails with E005 of an autodiscovered task, passes when mended, checks all once."""
    write_files(tmp_path, PROJECT)
    status, output = check_project(tmp_path)
    assert status == 1, output
    assert "(django_celery_safe.E005) Task shop.tasks.reindex has unique_until='end'" in output
    assert "identified 1 issue " in output
    assert (tmp_path / "checked.txt").read_text() == "checked\n"

    mended = PROJECT["shop/tasks.py"].replace("@shared_task", "@shared_task(base=SafeTask)")
    write_files(tmp_path, {"shop/tasks.py": mended})
    status, output = check_project(tmp_path)
    assert status == 0, output
    assert "identified no issues" in output


def test_manage_py_check_survives_a_broken_task_module(tmp_path: Path) -> None:
    """A task module that can't be imported is W007 in ``check``, which goes on and passes."""
    write_files(tmp_path, {**PROJECT, "shop/tasks.py": "import no_such_library\n"})
    status, output = check_project(tmp_path)
    assert status == 0, output
    assert re.search(r"\(django_celery_safe.W007\) .*no_such_library", output)


def test_a_worker_logs_what_is_said_of_its_tasks(settings: Settings, tmp_path: Path) -> None:
    """A worker with faulty tasks starts, as Celery lets it, and logs each fault with its level."""
    settings.CELERY_BROKER_URL = "memory://"
    text = PROJECT["shop/tasks.py"] + (
        "@shared_task(base=SafeTask)\n@single_instance(renew=False)\ndef sweep(): ...\n"
    )
    lines = log_of_worker_with(tmp_path, "faulty_shop_tasks", text)
    for level, number, name in [("ERROR", "E005", "reindex"), ("WARNING", "W009", "sweep")]:
        (line,) = [each for each in lines if f"django_celery_safe.{number}" in each]
        assert level in line
        assert f"Task faulty_shop_tasks.{name} " in line


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"unique_until": "start"}, 'unique_until="start" and on_conflict="skip"'),
        ({"unique_until": "start", "on_conflict": "retry"}, None),
        ({"unique_until": "start", **WAIT, "blocking_timeout": 5}, None),
        ({"unique_until": "end"}, None),
        ({}, None),
    ],
    ids=str,
)
def test_what_is_sent_during_a_run_is_skipped(
    make_app: MakeApp, options: dict[str, Any], said: str | None
) -> None:
    """W013 tells of a task whose second message waits only to be skipped."""
    add_task(make_app(), options)
    assert_said(said, "W013")


def timed(function: Any) -> Any:
    """Decorate a function as many projects do, without functools.wraps."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return run


@pytest.mark.parametrize(
    ("base", "decorate", "said"),
    [
        (SafeTask, lambda alone: timed(alone), "a decorator between them lacks functools.wraps"),
        (Task, lambda alone: timed(timed(alone)), "a decorator between them lacks functools.wraps"),
        (SafeTask, lambda alone: functools.wraps(alone)(timed(alone)), None),
    ],
    ids=["without wraps", "twice", "with wraps"],
)
def test_a_decorator_hides_the_lock_from_the_task(
    make_app: MakeApp, base: type, decorate: Any, said: str | None
) -> None:
    """W024 tells of a decorator that does not say what it wraps."""

    @single_instance(on_conflict="retry")
    def reindex() -> None:
        """Do nothing."""

    make_app().task(decorate(reindex), name=NAME, base=base, shared=False)
    assert_said(said, "W024")
