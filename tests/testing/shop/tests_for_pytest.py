"""Its tests for pytest, with fixtures alone."""

from collections.abc import Callable
from typing import Any
from unittest.mock import ANY

import pytest
from django.db import connection
from shop import tasks
from shop.models import Customer

from django_celery_safe import stages

pytestmark = pytest.mark.parametrize(
    "commits",
    [
        pytest.param(False, marks=pytest.mark.django_db),
        pytest.param(True, marks=pytest.mark.django_db(transaction=True)),
    ],
)


@pytest.fixture(autouse=True)
def _as_said(commits: bool) -> None:
    """Each test runs in a transaction, and with real commits."""
    assert connection.in_atomic_block is not commits


def test_sign_up_sends_on_commit(assert_sent_on_commit: Callable[..., Any]) -> None:
    """The message leaves at the commit."""
    with assert_sent_on_commit(tasks.welcome, ANY):
        tasks.sign_up()


def test_welcome_is_sent_once(deliver_twice: Callable[..., Any]) -> None:
    """A message that is delivered twice sends one e-mail."""
    customer = Customer.objects.create()
    deliver_twice(tasks.welcome, customer.pk)
    customer.refresh_from_db()
    assert customer.mails == 1


def test_outbox_is_run(drain_outbox: Callable[..., Any]) -> None:
    """The messages in the outbox are run."""
    customer = tasks.buy()
    assert [one.state for one in drain_outbox()] == ["SUCCESS"]
    customer.refresh_from_db()
    assert customer.mails == 1


def test_full_import_waits(hold_lock: Callable[..., Any], lock_name: Callable[..., str]) -> None:
    """Two imports of one feed exclude each other."""
    tasks.imported.clear()
    with hold_lock(lock_name(tasks.import_feed, "here", full=True)):
        tasks.import_feed("here")
    assert tasks.imported == []


def test_report_in_memory(locks_in_memory: None, hold_lock: Callable[..., Any]) -> None:
    """A lock of the project's own is held."""
    with hold_lock("report"):
        assert not tasks.report()


def test_album_gets_ready(run_stages: Callable[..., Any]) -> None:
    """A plan is run to its end."""
    run = run_stages([(tasks.fetch, 2), (tasks.resize, 1)])
    assert run.status == stages.Status.SUCCEEDED


def test_what_waits_is_run(
    on_commit_now: None, waiting_for_commit: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An eager task runs at the commit, and nothing waits after that."""
    monkeypatch.setitem(tasks.welcome.app.conf.changes, "task_always_eager", True)
    customer = tasks.sign_up()
    customer.refresh_from_db()
    assert (customer.mails, waiting_for_commit()) == (1, 0)
    assert not tasks.WRONG
