"""
Pytest fixtures of what ``django_celery_safe.testing`` has; pytest loads them by an entry point.

It does so in every project that the package is installed beside, also where no Django settings
are. So this module is not a part of the package, and imports it when a test asks for a fixture.
``-p no:django_celery_safe`` turns them off.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from django_celery_safe import CacheLock
    from django_celery_safe.models import StageRun
    from django_celery_safe.testing import Delivery, Sent


@pytest.fixture
def locks_in_memory() -> Iterator[None]:
    """Keep locks in memory for one test; none is held before and after."""
    from django_celery_safe import testing

    with testing.locks_in_memory():
        yield


@pytest.fixture
def lock_name() -> Callable[..., str]:
    """The name of the lock of a single-instance task, for given arguments."""
    from django_celery_safe import testing

    return testing.lock_name


@pytest.fixture
def hold_lock() -> Iterator[Callable[..., AbstractContextManager[CacheLock]]]:
    """Let someone else hold a lock during a ``with`` block."""
    from django_celery_safe import testing

    with _entered(testing.hold_lock) as hold:
        yield hold


@pytest.fixture
def on_commit_now(db: None) -> Iterator[None]:
    """Send what waits for a commit when the code under test leaves its ``atomic()``."""
    from django_celery_safe import testing

    with testing.on_commit_now():
        yield


@pytest.fixture
def waiting_for_commit(db: None) -> Callable[..., int]:
    """The number of callbacks that wait for the commit of a database."""
    from django_celery_safe import testing

    return testing.waiting_for_commit


@pytest.fixture
def assert_sent_on_commit(
    db: None,
) -> Iterator[Callable[..., AbstractContextManager[list[Sent]]]]:
    """Fail unless a ``with`` block sends a task on commit."""
    from django_celery_safe import testing

    with _entered(testing.assert_sent_on_commit) as check:
        yield check


@pytest.fixture
def deliver_twice() -> Callable[..., tuple[Delivery, Delivery]]:
    """Run one message of a task twice, as workers do when it is delivered again."""
    from django_celery_safe import testing

    return testing.deliver_twice


@pytest.fixture
def drain_outbox(db: None) -> Iterator[Callable[..., list[Delivery]]]:
    """Run what is in the outbox, as a worker would; nothing of it is published in the test."""
    from django_celery_safe.testing import drain_outbox
    from django_celery_safe.testing.messages import outbox_held

    with outbox_held():
        yield drain_outbox


@pytest.fixture
def run_stages(db: None) -> Iterator[Callable[..., StageRun]]:
    """Run a plan of stages to its end, as workers would; nothing of it is published in the test."""
    from django_celery_safe.testing import run_stages
    from django_celery_safe.testing.messages import outbox_held

    with outbox_held():
        yield run_stages


@contextmanager
def _entered(make: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Fail a test that makes a context manager and forgets its ``with``: nothing happened."""
    made: list[Any] = []

    @functools.wraps(make)
    def remembering(*args: Any, **kwargs: Any) -> Any:
        made.append(make(*args, **kwargs))
        return made[-1]

    yield remembering
    if any(inspect.getgeneratorstate(each.gen) == inspect.GEN_CREATED for each in made):
        pytest.fail(f"{make.__name__}(...) did nothing: write `with {make.__name__}(...):`.")
