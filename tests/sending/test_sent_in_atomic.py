"""``WARN_IN_ATOMIC``: sends that leave before the transaction around them commits are told."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery, chord, group, shared_task
from django.db import transaction
from django.test import TestCase
from pytest_django import Settings

from django_celery_safe import send_on_commit
from django_celery_safe.events import SENT_IN_ATOMIC
from tests.app.tasks import add, total
from tests.conftest import MakeDatabase
from tests.sending.published import Sent
from tests.sending.test_commit import SENDS, deferring

pytestmark = pytest.mark.django_db(transaction=True)

Warned = Callable[[], list[logging.LogRecord]]

ON = {"WARN_IN_ATOMIC": True}


@shared_task
def plain(*args: object) -> None:
    """Have Celery's own base."""


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture, settings: Settings, broker: Celery) -> Warned:
    """Take the warnings of sends inside a transaction; the setting is on."""
    settings.DJANGO_CELERY_SAFE = ON

    def take() -> list[logging.LogRecord]:
        found = [one for one in caplog.records if one.name == SENT_IN_ATOMIC.logger.name]
        caplog.clear()
        return found

    return take


def test_it_is_off_by_default(sent: Sent, warned: Warned, settings: Settings) -> None:
    """Without the setting a plain send is Celery's business."""
    settings.DJANGO_CELERY_SAFE = {}
    with transaction.atomic():
        add.delay(1)
    assert (warned(), len(sent())) == ([], 1)


@pytest.mark.parametrize(("send", "count"), SENDS.values(), ids=SENDS.keys())
def test_a_plain_send_in_a_transaction_is_told(
    send: Callable[[Any], Any], count: int, sent: Sent, warned: Warned, make_database: MakeDatabase
) -> None:
    """A WARNING for each task names the place in the code; it is sent all the same."""
    other = make_database("sqlite")
    with transaction.atomic(using=other), transaction.atomic(using=other):
        send(add)
    # Not before a transaction, nor after it, nor when its callbacks run.
    send(add)
    with transaction.atomic():
        transaction.on_commit(lambda: send(add))
    place = f"{send.__code__.co_filename}:{send.__code__.co_firstlineno} in <lambda>"
    records = warned()
    assert [record.levelname for record in records] == ["WARNING"] * count
    for record in records:
        assert f"{add.name} is sent inside atomic() of '{other}', by {place}: " in record.message
        assert vars(record)["safe_place"] == place
    assert len(sent()) == 3 * count


@pytest.mark.parametrize("outbox", [False, True])
def test_sends_on_commit_are_not_told(
    outbox: bool, warned: Warned, sent: Sent, settings: Settings
) -> None:
    """They do what the warning asks for; and a task of Celery's own class says nothing."""
    with transaction.atomic():
        add.apply_async_on_commit((1,), outbox=outbox)
        send_on_commit(chord([add.s(1), add.s(2)], total.s()), outbox=outbox)
        group(deferring.s(1), deferring.s(2)).delay()
        plain.delay(1)
        settings.DJANGO_CELERY_SAFE = {**ON, "SEND_ON_COMMIT": True}
        add.delay(1)
    assert (warned(), len(sent())) == ([], 7)


class TestCaseTests(TestCase):
    """The warnings in a plain Django TestCase."""

    @pytest.fixture(autouse=True)
    def use_private_broker(self, warned: Warned) -> None:
        """Send to the private Redis."""
        self.warned = warned

    def test_its_own_transactions_do_not_count(self) -> None:
        """The test's own atomic() does not count, but the one of the code under test does."""
        add.delay(1)
        with self.captureOnCommitCallbacks(execute=True):
            add.delay(1)
            add.delay_on_commit(1)
        assert self.warned() == []
        with transaction.atomic():
            add.delay(1)
        assert len(self.warned()) == 1
