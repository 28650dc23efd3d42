"""Messages of our system checks, which people can read, and an app to be checked."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery import Celery, _state, current_app
from django.core import checks
from pytest_django import Settings

from django_celery_safe import SafeTask

PREFIX = "django_celery_safe"

#: Options that no check complains of, with any broker.
TRANSPORT_OPTIONS = {"socket_timeout": 10, "socket_connect_timeout": 5, "confirm_publish": True}

#: A broker whose URL alone says what it is; no server listens there.
REDIS_BROKER = "redis://127.0.0.1:1/0"

#: django-redis, and where there is no server.
REDIS = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": REDIS_BROKER}

#: The name of the task that is checked.
NAME = "shop.tasks.reindex"

#: Characters of three lines of a terminal; how many a text may have at the most.
THREE_LINES = 3 * 110

#: An error of a driver, which stands behind our text.
WORDS_OF_A_SERVER = re.compile(r" \(\w+Error: .*\)", re.DOTALL)


def find_messages(*, deploy: bool = False) -> list[checks.CheckMessage]:
    """Return what our checks say, those for ``check --deploy`` too if asked."""
    said = checks.run_checks(tags=[PREFIX], include_deployment_checks=deploy)
    for message in said:
        text = WORDS_OF_A_SERVER.sub("", message.msg)
        assert len(text) <= THREE_LINES, f"{len(text)} characters: {message}"
        assert message.hint, message
        is_error = str(message.id).startswith(f"{PREFIX}.E")
        assert message.level == (checks.ERROR if is_error else checks.WARNING)
    return said


def found(*, deploy: bool = False) -> dict[str, checks.CheckMessage]:
    """Return the same by id, without the prefix."""
    return {str(one.id).removeprefix(f"{PREFIX}."): one for one in find_messages(deploy=deploy)}


@contextmanager
def app_without_tasks(
    broker: str, task_cls: str | type | None = None, **conf: Any
) -> Iterator[Celery]:
    """Have an app of our own, which no other test gave a faulty task, as all threads' current."""
    before, default = current_app._get_current_object(), _state.default_app
    app = Celery("shop", broker=broker, task_cls=task_cls, set_as_current=False)
    app.conf.update({"broker_transport_options": TRANSPORT_OPTIONS, **conf})
    app.finalize()
    # The shared tasks of other tests are in every app.
    app.tasks.clear()
    app.set_current()
    app.set_default()
    try:
        yield app
    finally:
        before.set_current()
        _state.set_default_app(default)
        app.close()


def reindex(pk: int = 0) -> None:
    """Do a thing as often as asked to."""
    print(pk)


def add_task(app: Celery, function: Callable[..., Any] = reindex, **options: Any) -> Any:
    """Give the app one task."""
    return app.task(function, **{"name": NAME, "base": SafeTask, "shared": False, **options})


@pytest.fixture
def no_faults(settings: Settings) -> None:
    """Begin with settings that no check complains of, in a form that needs no server."""
    settings.CACHES = {"default": REDIS}
    settings.DATABASES = {"default": {"ENGINE": "django.db.backends.postgresql", "NAME": "data"}}
    settings.DJANGO_CELERY_SAFE = {}


@pytest.fixture
def app() -> Iterator[Celery]:
    """An app without tasks, on a Redis that nobody is asked for."""
    with app_without_tasks(REDIS_BROKER) as app:
        yield app
