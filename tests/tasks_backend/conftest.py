"""Fixtures: the backend beside a mailbox, and beside real workers. All need Django 6.0."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import django
import pytest
from django.test import override_settings

from tests.concurrency.mailbox import Mailbox
from tests.conftest import NOT_RUN, MakeDatabase, app_on_redis
from tests.processes import CeleryWorker
from tests.servers import RedisServer
from tests.tasks_backend.scenes import ByHand, Scene, tasks_setting

#: The settings of the scenes: results are kept, and leases are short.
SETTINGS: dict[str, Any] = {"RETENTION": {"sent": 3600}, "LOCK_TIMEOUT": 2}


class _NotRun(pytest.Module):
    """A module of tests that this Django can't run."""

    def collect(self) -> Any:
        """Skip it, also under CI, whose corner of the newest versions runs it."""
        needed = f"Django 6.0 or later, this is {django.get_version()}"
        pytest.skip(f"{NOT_RUN}django.tasks ({needed})", allow_module_level=True)


if django.VERSION < (6, 0):

    def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> Any:
        """Skip each module of tests here."""
        return _NotRun.from_parent(parent, path=module_path)


@pytest.fixture
def by_hand(mailbox: Mailbox, locks_in_memory: None, db_alias: str) -> Iterator[ByHand]:
    """The backend with its rows in a database; messages are delivered by hand."""
    with override_settings(TASKS=tasks_setting(db_alias), DJANGO_CELERY_SAFE=SETTINGS):
        yield ByHand(mailbox, db_alias)


@pytest.fixture(scope="module")
def scene(redis_server: RedisServer, make_module_database: MakeDatabase) -> Iterator[Scene]:
    """The backend with its rows in a SQLite file, and Redis as the broker."""
    alias = make_module_database("sqlite-immediate")
    with (
        app_on_redis(redis_server),
        override_settings(TASKS=tasks_setting(alias), DJANGO_CELERY_SAFE=SETTINGS),
    ):
        yield Scene(alias)
        gc.collect()  # Results unsubscribe when they go.


@pytest.fixture(scope="module")
def worker(scene: Scene) -> Iterator[CeleryWorker]:
    """A worker with two children that knows the tasks in ``work``, and takes all their queues."""
    arguments = ["--include", "tests.tasks_backend.work", "--queues", "celery,mails"]
    with CeleryWorker("tests.app", concurrency=2, arguments=arguments) as worker:
        yield worker
