"""Its tests for pytest, with fixtures alone."""

from collections.abc import Callable
from typing import Any
from unittest.mock import ANY

import pytest
from django.db import connection
from shop import tasks

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


def test_each_fixture(
    assert_sent_on_commit: Callable[..., Any],
    deliver_twice: Callable[..., Any],
    drain_outbox: Callable[..., Any],
    hold_lock: Callable[..., Any],
    lock_name: Callable[..., str],
    locks_in_memory: None,
    run_stages: Callable[..., Any],
) -> None:
    """Each is the helper of its name."""
    with assert_sent_on_commit(tasks.welcome, ANY):
        customer = tasks.sign_up()
    deliver_twice(tasks.welcome, customer.pk)
    bought = tasks.buy()
    assert [one.state for one in drain_outbox()] == ["SUCCESS"]
    for each in (customer, bought):
        each.refresh_from_db()
        assert each.mails == 1
    tasks.imported.clear()
    with hold_lock(lock_name(tasks.import_feed, "here", full=True)), hold_lock("report"):
        tasks.import_feed("here")
        assert not tasks.report()
    assert tasks.imported == []
    assert run_stages([(tasks.fetch, 2), (tasks.resize, 1)]).status == stages.Status.SUCCEEDED


def test_what_waits_is_run(
    on_commit_now: None, waiting_for_commit: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An eager task runs at the commit, and nothing waits after that."""
    monkeypatch.setitem(tasks.welcome.app.conf.changes, "task_always_eager", True)
    customer = tasks.sign_up()
    customer.refresh_from_db()
    assert (customer.mails, waiting_for_commit()) == (1, 0)
