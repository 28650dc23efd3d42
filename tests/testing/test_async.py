"""The parts of ``testing`` in async tests, whose database is used from another thread."""

import pytest
from asgiref.sync import sync_to_async
from django.db import transaction
from django.test import TestCase, TransactionTestCase

from django_celery_safe.testing import assert_sent_on_commit
from tests.app.models import Person
from tests.testing.tasks import greet


@sync_to_async
def view(name: str) -> None:
    """Write, and send at the commit."""
    with transaction.atomic():
        Person.everyone.create()
        greet.delay_on_commit(name)


@sync_to_async
def plain_view(name: str) -> None:
    """Send at once."""
    greet.delay(name)


@pytest.mark.usefixtures("unreachable")
class Sends:
    """The same tests in each kind of TestCase."""

    async def test_an_async_view_sends_on_commit(self) -> None:
        """The block stands in the coroutine, and the view's transaction in a thread."""
        with assert_sent_on_commit(greet, "ann") as sent:
            await view("ann")
        assert [one.on_commit for one in sent] == [True]

    async def test_a_plain_send_is_found(self) -> None:
        """It is reported as one that did not wait."""
        with (
            pytest.raises(AssertionError, match="without waiting for a commit"),
            assert_sent_on_commit(greet, "ann"),
        ):
            await plain_view("ann")

    async def test_a_send_in_the_coroutine_itself(self) -> None:
        """Without a transaction it is sent on commit all the same."""
        with assert_sent_on_commit(greet, "ann"):
            greet.delay_on_commit("ann")


class InTestCase(Sends, TestCase):
    """Nothing is committed."""


class InTransactionTestCase(Sends, TransactionTestCase):
    """Commits are real."""
