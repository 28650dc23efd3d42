"""
For the tests of projects that use django_celery_safe.

Context managers for any test runner, and pytest fixtures of the same. In
``conftest.py``: ``pytest_plugins = ["django_celery_safe.testing"]``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest import mock

from django.conf import settings
from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.test import override_settings

from . import conf
from .locks.stores import local
from .transactions import in_testcase_only

logger = logging.getLogger(__name__)

#: Alias of the cache that :func:`locks_in_memory` adds.
MEMORY: Final = "django_celery_safe_testing"


@contextmanager
def locks_in_memory() -> Iterator[None]:
    """
    Keep locks in this process's memory, and begin and end with none held.

    Whatever ``LOCK_CACHE`` and ``LOCK_DATABASE`` say is left alone meanwhile.
    """
    backend = {"BACKEND": "django.core.cache.backends.locmem.LocMemCache", "LOCATION": MEMORY}
    ours = {**conf.given(), "LOCK_CACHE": MEMORY, "LOCK_DATABASE": None}
    caches = {**settings.CACHES, MEMORY: backend}
    with override_settings(CACHES=caches, **{conf.NAME: ours}):
        local.clear()
        try:
            yield
        finally:
            local.clear()


@contextmanager
def on_commit_now() -> Iterator[None]:
    """
    Run what waits for a commit as if there were no TestCase around it.

    Inside ``TestCase`` (and pytest-django's ``db``) nothing is ever committed,
    so nothing sent on commit goes out. Here it does: at the end of the
    outermost ``atomic()`` of the code under test, or at once outside one. What
    is rolled back stays unsent.
    """
    on_commit, leave = BaseDatabaseWrapper.on_commit, transaction.Atomic.__exit__

    def on_commit_or_now(
        self: BaseDatabaseWrapper, func: Callable[[], object], robust: bool = False
    ) -> None:
        if in_testcase_only(self.alias):
            _run(func, robust)
        else:
            on_commit(self, func, robust)

    def leave_and_run(self: transaction.Atomic, *error: Any) -> None:
        leave(self, *error)
        connection = transaction.get_connection(self.using)
        if in_testcase_only(connection.alias):
            _run_callbacks(connection)

    with (
        mock.patch.object(BaseDatabaseWrapper, "on_commit", on_commit_or_now),
        mock.patch.object(transaction.Atomic, "__exit__", leave_and_run),
    ):
        yield


def _run_callbacks(connection: Any) -> None:
    waiting, connection.run_on_commit = connection.run_on_commit, []
    for _, callback, robust in waiting:
        _run(callback, robust)


def _run(callback: Callable[[], object], robust: bool) -> None:
    try:
        callback()
    except Exception as error:
        if not robust:
            raise
        logger.error("A robust on_commit callback raised.", exc_info=error)


def waiting_for_commit(using: str = "default") -> int:
    """Return how many callbacks wait for the commit of ``using``."""
    return len(connections[using].run_on_commit)


try:
    import pytest
except ImportError:
    # unittest projects have the context managers above.
    pass
else:

    @pytest.fixture(name="locks_in_memory")
    def locks_in_memory_fixture() -> Iterator[None]:
        """Keep locks in memory for one test; none is held before and after."""
        with locks_in_memory():
            yield

    @pytest.fixture(name="on_commit_now")
    def on_commit_now_fixture(db: None) -> Iterator[None]:
        """Send what waits for a commit when the code under test leaves its ``atomic()``."""
        with on_commit_now():
            yield
