"""Its tests for ``manage.py test``."""

from unittest.mock import ANY

from django.test import TestCase, TransactionTestCase

from django_celery_safe import stages
from django_celery_safe.testing import (
    assert_sent_on_commit,
    deliver_twice,
    drain_outbox,
    hold_lock,
    locks_in_memory,
    on_commit_now,
    run_stages,
)

from . import tasks
from .models import Customer


class Tests:
    """The same tests in each kind of TestCase."""

    def test_sign_up_sends_on_commit(self) -> None:
        """The message leaves at the commit."""
        with assert_sent_on_commit(tasks.welcome, ANY) as sent:
            customer = tasks.sign_up()
        assert sent[0].args == [customer.pk]

    def test_welcome_is_sent_once(self) -> None:
        """A message that is delivered twice sends one e-mail."""
        customer = Customer.objects.create()
        deliver_twice(tasks.welcome, customer.pk)
        customer.refresh_from_db()
        assert customer.mails == 1, customer.mails

    def test_outbox_is_run(self) -> None:
        """The messages in the outbox are run."""
        with on_commit_now():
            customer = tasks.buy()
            assert [one.state for one in drain_outbox()] == ["SUCCESS"]
        customer.refresh_from_db()
        assert customer.mails == 1, customer.mails

    def test_full_import_waits(self) -> None:
        """Two imports of one feed exclude each other."""
        tasks.imported.clear()
        with hold_lock(tasks.import_feed, "here", full=True):
            tasks.import_feed("here")
        assert tasks.imported == []
        tasks.import_feed("here")
        assert tasks.imported == ["here"]

    def test_report_in_memory(self) -> None:
        """A lock of the project's own is held."""
        with locks_in_memory(), hold_lock("report"):
            assert not tasks.report()

    def test_album_gets_ready(self) -> None:
        """A plan is run to its end."""
        run = run_stages([(tasks.fetch, 2), (tasks.resize, 1)])
        assert run.status == stages.Status.SUCCEEDED, run.error_step
        assert run.params == {"pictures": 3, "thumbnails": 3}


class InTransaction(Tests, TestCase):
    """Each test in a transaction that is rolled back."""


class WithCommits(Tests, TransactionTestCase):
    """Each test with real commits."""
