"""The system checks of tasks: each says what contradicts a task's lock, with its numbers."""

import functools
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, Task
from celery.contrib.django.task import DjangoTask
from django.core import checks
from pytest_django import Settings

from django_celery_safe import SafeTask, SafeTaskMixin, single_instance
from tests.checking import TRANSPORT_OPTIONS, app_without_tasks, find_messages, found, no_faults

ROOT = Path(__file__).resolve().parent.parent

#: Brokers whose URL alone says what they are; no server listens there.
REDIS_BROKER = "redis://127.0.0.1:1/0"
RABBITMQ_BROKER = "amqp://127.0.0.1:1//"
NAME = "shop.tasks.reindex"

HOUR = 3600
LATE = {"acks_late": True}
WAIT = {"on_conflict": "wait", "blocking_timeout": 10}
END = {"unique_until": "end"}

__all__ = ["no_faults"]

pytestmark = [
    pytest.mark.usefixtures("no_faults"),
    pytest.mark.filterwarnings("ignore:Overriding setting DATABASES"),
]


class AppTask(DjangoTask):
    """The task class of a project that does not know this package."""

    abstract = True


class SafeAppTask(SafeTaskMixin, AppTask):
    """The code that W012 advises to write."""

    abstract = True


#: Makes a Celery app without tasks, given a broker, a task class and Celery's configuration.
MakeApp = Callable[..., Celery]


@pytest.fixture
def make_app() -> Iterator[MakeApp]:
    """Make Celery apps for this test; after it the current app is the one before it."""
    with ExitStack() as stack:

        def make(broker: str = "memory://", task_cls: Any = None, **conf: Any) -> Celery:
            return stack.enter_context(app_without_tasks(broker, task_cls, **conf))

        yield make


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
    assert message.level == (checks.ERROR if number[0] == "E" else checks.WARNING)


#: A check, the options of a task's lock, those of the task and of its app, and what is said of it.
Case = tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], str | None]
CASES: list[Case] = [
    # Sends are not kept apart without a SafeTask, or without headers.
    ("E005", END, {"base": None}, {}, "unique_until='end', but it is not a SafeTask"),
    ("E005", END, {"base": SafeAppTask}, {}, None),
    ("E005", {}, {"base": Task, "outbox": True}, {}, "has outbox=True, but it is not a SafeTask"),
    ("E005", {}, {"base": Task, "max_deaths": 3}, {}, "has max_deaths=3, but it is not"),
    ("E005", END, {"base": None}, {"task_cls": SafeAppTask}, None),
    ("W008", END, {}, {"task_protocol": 1}, "task_protocol is 1"),
    # A message that is sent during a run only waits to be skipped.
    ("W013", {"unique_until": "start"}, {}, {}, 'unique_until="start" and on_conflict="skip"'),
    ("W013", {"unique_until": "start", "on_conflict": "retry"}, {}, {}, None),
    # Without renewal, a run has to end with its lease at the latest.
    ("W009", {"renew": False, "timeout": 60}, {}, {}, "of 60 s, but no time limit ends it"),
    ("W009", {"renew": False, "timeout": timedelta(minutes=1)}, {"time_limit": 60}, {}, None),
    ("W009", {"renew": False}, {}, {"task_time_limit": 90}, "its time limit is 90 s"),
    ("W009", {"timeout": 60}, {"time_limit": HOUR}, {}, None),
    # Waiting counts for the time limits, the task's own before those of the app.
    ("W010", WAIT, {"time_limit": 10}, {}, "for up to 10 s, but its time limit ends it after 10 s"),
    ("W010", WAIT, {"time_limit": 10.5, "soft_time_limit": 11}, {}, None),
    ("W010", WAIT, {"soft_time_limit": 8, "time_limit": 60}, {}, "after 8 s"),
    ("W010", WAIT, {"soft_time_limit": 20}, {"task_soft_time_limit": 6}, None),
    ("W010", {"on_conflict": "retry"}, {"time_limit": 1}, {}, None),
]


@pytest.mark.parametrize("case", CASES)
def test_a_task_that_contradicts_its_lock(make_app: MakeApp, case: Case) -> None:
    """The check names the task and the numbers, and is silent where nothing is wrong."""
    number, alone, options, conf, said = case
    add_task(make_app(**conf), alone, **options)
    assert_said(said, number)


def test_the_lease_is_that_of_the_settings(make_app: MakeApp, settings: Settings) -> None:
    """W009 compares with LOCK_TIMEOUT where the task has no lease; one that is none is E001."""
    add_task(make_app(), {"renew": False}, time_limit=90)
    assert_said("a lock of 30 s, but its time limit is 90 s", "W009")
    settings.DJANGO_CELERY_SAFE = {"LOCK_TIMEOUT": 90}
    assert found() == {}
    settings.DJANGO_CELERY_SAFE = {"LOCK_TIMEOUT": None}
    assert set(found()) == {"E001"}


def test_a_run_that_is_delivered_again(make_app: MakeApp) -> None:
    """W011: a run that acknowledges late has to end before a Redis gives its message again."""
    long = {**LATE, "time_limit": HOUR + 1}
    for broker, alone, options, longest in (
        (REDIS_BROKER, {}, {**LATE, "time_limit": HOUR}, None),
        (REDIS_BROKER, {}, {"time_limit": HOUR + 1}, None),
        (RABBITMQ_BROKER, {}, long, None),
        ("no-such-broker://", {}, long, None),
        (REDIS_BROKER, {**WAIT, "blocking_timeout": HOUR + 2}, LATE, 3602),
        (REDIS_BROKER, {}, long, 3601),
    ):
        app = make_app(broker)
        add_task(app, alone, **options)
        said = f"may run for {longest} s and acknowledges late, but after a "
        assert_said(said if longest else None, "W011")
    message = found()["W011"]
    assert "a visibility_timeout of 3600 s" in message.msg
    hint = re.search(r'"visibility_timeout": (\d+)', str(message.hint))
    assert hint is not None
    app.conf.broker_transport_options = {**TRANSPORT_OPTIONS, "visibility_timeout": int(hint[1])}
    assert found() == {}


def test_each_task_of_the_current_app_gets_its_own_message(make_app: MakeApp) -> None:
    """Two tasks with the same fault are two messages, each with its name; other apps' are none."""
    faulty, good = make_app(), make_app()
    names = {f"{NAME}_{number}" for number in range(2)}
    for name in names:
        add_task(faulty, {"renew": False}, name=name)
    # Without a lock, a task is not blamed for the faults of locks.
    add_task(good, None, soft_time_limit=1, time_limit=2 * HOUR)
    assert found() == {}
    faulty.set_current()
    assert sorted(message.msg.split()[1] for message in find_messages()) == sorted(names)


def test_tasks_that_can_not_be_loaded(
    make_app: MakeApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W007 has the error of a task module, whoever imports it, and nothing else is checked."""
    (tmp_path / "broken_shop").mkdir()
    (tmp_path / "broken_shop/__init__.py").touch()
    (tmp_path / "broken_shop/tasks.py").write_text("raise OSError('no key')")
    monkeypatch.syspath_prepend(tmp_path)
    app = make_app()
    add_task(app, {"renew": False})
    app.conf.include = ["no_such_module"]
    assert "no_such_module" in found()["W007"].msg
    app.conf.include = []
    app.autodiscover_tasks(["broken_shop"])
    try:
        messages = found()
    finally:
        sys.modules.pop("broken_shop", None)
    assert set(messages) == {"W007"}
    assert "OSError: no key" in messages["W007"].msg


def test_a_task_class_that_is_bypassed(make_app: MakeApp) -> None:
    """W012 names the project's class, however it was given, and how many tasks do without it."""
    for task_cls in (AppTask, f"{__name__}:AppTask"):
        app = make_app(task_cls=task_cls)
        for number in range(3):
            add_task(app, {}, name=f"{NAME}_{number}")
        add_task(app, base=None)
        add_task(app, base=Task, name=f"{NAME}_plain")
        message = found()["W012"]
        assert f"is {__name__}.AppTask, but 3 task(s)" in message.msg
        assert "class SafeAppTask(SafeTaskMixin, AppTask)" in str(message.hint)
    add_task(make_app(task_cls=SafeAppTask), {})
    # Python has no order for the bases of a class that would follow the other hint.
    assert "(SafeTaskMixin, SafeAppTask)" not in str(found()["W012"].hint)
    for task_cls, base in ((Task, SafeTask), (SafeTask, None), (AppTask, SafeAppTask)):
        add_task(make_app(task_cls=task_cls), {}, base=base)
        assert found() == {}


def timed(function: Any) -> Any:
    """Decorate a function as many projects do, without functools.wraps."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return run


def test_a_decorator_hides_the_lock_from_the_task(make_app: MakeApp) -> None:
    """W024 tells of a decorator that does not say what it wraps."""

    @single_instance(on_conflict="retry")
    def reindex() -> None:
        """Do nothing."""

    for base, function, is_hidden in (
        (SafeTask, timed(reindex), True),
        (SafeTask, functools.wraps(reindex)(timed(reindex)), False),
    ):
        make_app().task(function, name=NAME, base=base, shared=False)
        assert_said("a decorator between them lacks functools" if is_hidden else None, "W024")


# ``manage.py check``, and workers.


def test_other_checks_are_not_run_within_ours(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading the tasks runs none of the project's checks, and leaves the environment alone."""
    runs = []

    def count(**_: Any) -> list[checks.CheckMessage]:
        runs.append(1)
        return []

    add_task(make_app(), {"renew": False})
    checks.register(count, "the_projects_own")
    try:
        monkeypatch.delenv("CELERY_SKIP_CHECKS", raising=False)
        assert set(found()) == {"W009"}
        assert "CELERY_SKIP_CHECKS" not in os.environ
    finally:
        checks.registry.registry.registered_checks.discard(count)
    assert runs == []
