"""Mistakes of new users, one row for each, and the error or check that answers it."""

from collections.abc import Callable, Iterator

import celery
import pytest
from celery import Celery, Task, _state
from django.apps import apps
from pytest_django import Settings

from django_celery_safe import (
    ConfigurationError,
    NotSerializable,
    SafeTask,
    idempotent,
    single_instance,
)
from django_celery_safe.checks.project import is_fallback
from tests.app.models import Person
from tests.app.tasks import add
from tests.checking import NAME, add_task, app, find_messages, found, no_faults
from tests.test_checks import LOCMEM

__all__ = ["app", "no_faults"]

pytestmark = [
    pytest.mark.usefixtures("no_faults"),
    pytest.mark.filterwarnings("ignore:Overriding setting DATABASES"),
]


@pytest.fixture
def fallback_app(monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    """Have the app that Celery makes in a process which has not loaded the project's."""
    monkeypatch.setattr(_state, "default_app", None)
    before = celery.current_app._get_current_object()
    monkeypatch.delenv("CELERY_BROKER_URL", raising=False)
    _state._set_current_app(None)
    app = celery.current_app._get_current_object()
    yield app
    before.set_current()
    app.close()


def test_a_missing_app_is_an_error(fallback_app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    E004 reports that no Celery app of the project is loaded, and W006 does not mislead.

    It is silent without tasks of the project; a broker from the environment is meant.
    """
    messages = found()
    assert "No Celery app of the project is loaded" in messages["E004"].msg
    assert "amqp://localhost" in messages["E004"].msg
    assert "from .celery import app" in (messages["E004"].hint or "")
    assert "W006" not in found(deploy=True)
    monkeypatch.setattr(apps, "get_app_configs", list)
    for name in [name for name in fallback_app.tasks if not name.startswith("celery.")]:
        del fallback_app.tasks[name]
    assert "E004" not in found()
    monkeypatch.setenv("CELERY_BROKER_URL", "memory://")
    assert not is_fallback(fallback_app)


def test_a_wrong_value_of_a_task_option(app: Celery) -> None:
    """An option of a task with a value of the wrong kind is an error when the task is made."""
    for option, value, words in (
        ("send_on_commit", "yes", "send_on_commit of shop.*='yes' .*: give True or False"),
        ("outbox", "until-done", "use of the outbox: give True.* Did you mean 'until_done'?"),
        ("max_deaths", "3", "whole number of at least 1, or None for no limit. Did you mean 3?"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            repr(add_task(app, **{option: value}))  # which is made when it is used


def test_a_misspelt_task_option(app: Celery) -> None:
    """W001 names an option that does nothing, and the one that was meant; other names are fine."""
    misspelt = {"outbx": "outbox", "timelimit": "time_limit", "autoretry": "autoretry_for"}
    known = {"shop_id": 7, "retry_backoff_max": 60, "autoretry_for": (KeyError,)}
    for base in (SafeTask, Task):
        app.tasks.clear()
        add_task(app, base=base, **known)
        assert "W001" not in found()
        app.tasks.clear()
        add_task(app, base=base, **known, **dict.fromkeys(misspelt, True))
        messages = [one for one in find_messages() if str(one.id).endswith("W001")]
        assert {one.msg: one.hint for one in messages} == {
            f"Task {NAME} has the option {name!r}, which does nothing.": f"Did you mean {meant!r}?"
            for name, meant in misspelt.items()
        }


def greet(user: int) -> None:
    """Stand for a task."""


def _with_no_key() -> None:
    with idempotent():  # type: ignore[attr-defined]
        pass


#: Mistakes in code, by what was done; the error that answers each of them, and words of it.
CALLS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "a set as an argument": (
        lambda: add.delay({1}),  # type: ignore[arg-type]
        NotSerializable,
        r"args\[0\] of task tests.app.tasks.add is an instance of set.*json.*plain data",
    ),
    "arguments without a comma": (
        lambda: add.apply_async_on_commit(5),
        TypeError,
        r"arguments of task tests.app.tasks.add are 5.*comma: \(5,\)",
    ),
    "an unknown database": (
        lambda: add.apply_async_on_commit((1,), using="defalt"),
        ConfigurationError,
        "using='defalt' .* DATABASES .* It has: 'default'.* Did you mean 'default'",
    ),
    "a key with an attribute": (
        lambda: single_instance(key="{user.id}")(greet)(5),
        ConfigurationError,
        "{user.id}.*plain data.* user_id, and write {user_id}",
    ),
    "a key function that fails": (
        lambda: single_instance(key=lambda user: user.id)(greet)(5),
        AttributeError,
        r"no attribute 'id'\nRaised by the key function .* of task .*greet",
    ),
    "idempotent without a key": (_with_no_key, ConfigurationError, "got no key: it needs a string"),
    "do_once with a row": (
        lambda: Person.do_once(Person(pk=7), "is_welcome_email_sent"),
        TypeError,
        "app.Person.do_once got a row, .*7.* instead of its primary key. Give row.pk",
    ),
}


@pytest.mark.django_db
@pytest.mark.parametrize("mistake", CALLS)
def test_a_mistake_in_code(mistake: str, settings: Settings) -> None:
    """The call raises an error that names the value, its meaning and the remedy."""
    settings.CACHES = {"default": {"BACKEND": LOCMEM}}
    call, error, words = CALLS[mistake]
    with pytest.raises(error, match=words):
        call()


def test_a_misspelt_option_of_a_send(app: Celery) -> None:
    """A misspelt option of ours is an error that names the one that was meant."""
    task = add_task(app)
    with pytest.raises(ConfigurationError, match=r"usin=.* Did you mean 'using'"):
        task.apply_async_on_commit((), usin="default")
