"""``WARN_IN_ATOMIC``: sends that leave before the transaction around them commits are told."""

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from celery import Celery, chain, chord, group, shared_task
from django.db import transaction
from django.test import TestCase, override_settings

from django_celery_safe import SafeTask, send_on_commit
from django_celery_safe.events import SENT_IN_ATOMIC
from django_celery_safe.signals import sent_in_atomic
from django_celery_safe.usage import calling_line
from tests.app.tasks import add, total
from tests.concurrency.mailbox import Mailbox
from tests.conftest import MakeDatabase
from tests.sending.conftest import hearing, line_above, take_records
from tests.sending.published import Published

if TYPE_CHECKING:
    from pytest_django import Settings

pytestmark = pytest.mark.django_db(transaction=True)

Sent = Callable[[], list[Published]]
Warned = Callable[[], list[logging.LogRecord]]

ON = {"WARN_IN_ATOMIC": True}


@shared_task(base=SafeTask, send_on_commit=True)
def deferring(*args: object) -> None:
    """Wait for the commit with every send."""


@shared_task
def plain(*args: object) -> None:
    """Have Celery's own base."""


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Warned:
    """Take the warnings of sends inside a transaction."""
    return partial(take_records, caplog, SENT_IN_ATOMIC)


@pytest.fixture
def switched_on(settings: "Settings", broker: Celery) -> None:
    """The setting is on, and there is a broker."""
    settings.DJANGO_CELERY_SAFE = ON


def test_it_is_off_by_default(broker: Celery, sent: Sent, warned: Warned) -> None:
    """Without the setting a plain send is Celery's business."""
    with hearing(sent_in_atomic) as told, transaction.atomic():
        add.delay(1)
    assert (warned(), told, len(sent())) == ([], [], 1)


#: Plain ways to send tasks, and of how many tasks each is told.
SENDS: dict[str, tuple[Callable[[], Any], int]] = {
    "delay": (lambda: add.delay(1), 1),
    "apply_async": (lambda: add.apply_async((1,), countdown=5), 1),
    "signature": (lambda: add.s(1).delay(), 1),
    "signature called": (lambda: add.s(1).apply_async(), 1),
    "group": (lambda: group(add.s(1), add.s(2)).delay(), 2),
    "group applied": (lambda: group(add.s(1), add.s(2)).apply_async(), 2),
    "chain": (lambda: chain(add.s(1), add.s(2)).delay(), 1),
    "chord": (lambda: chord([add.s(1), add.s(2)], total.s()).delay(), 2),
}


@pytest.mark.parametrize(("send", "count"), SENDS.values(), ids=SENDS.keys())
@pytest.mark.usefixtures("switched_on")
def test_a_plain_send_in_a_transaction_is_told(
    send: Callable[[], Any], count: int, sent: Sent, warned: Warned
) -> None:
    """A WARNING and a signal for each task name the place in the code; it is sent all the same."""
    with hearing(sent_in_atomic) as told, transaction.atomic():
        send()
    place = f"{__file__}:{send.__code__.co_firstlineno} in <lambda>"
    records = warned()
    assert [record.levelname for record in records] == ["WARNING"] * count
    for record in records:
        assert f"{add.name} is sent inside atomic() of 'default', by {place}: " in record.message
        assert record.message.endswith("Use .delay_on_commit(...), or send_on_commit=True.")
        assert vars(record)["safe_place"] == place
    said = [(one["task"], one["using"], one["place"]) for one in told]
    assert said == [(add.name, "default", place)] * count
    assert len(sent()) == count


@pytest.mark.usefixtures("switched_on")
def test_the_place_is_the_line_of_the_call(warned: Warned) -> None:
    """Not one of this package or Celery's, nor the beginning of the function."""
    with transaction.atomic():
        add.delay(1)
        first = line_above()
        group(add.s(1)).delay()
        second = line_above()
    assert [vars(record)["safe_place"] for record in warned()] == [first, second]


@pytest.mark.parametrize(
    ("path", "passed"),
    [
        ("manage.py", False),
        ("/srv/shop/manage.py", False),
        ("/srv/shop/celery_report.py", False),
        ("/srv/shop/__main__.py", False),
        ("/srv/shop/venv/bin/celery", True),
        ("C:/shop/celery/__main__.py", True),
        ("/usr/lib/python3/dist-packages/celery/__main__.py", True),
    ],
)
def test_a_program_of_the_project_is_a_place(path: str, passed: bool) -> None:
    """A module run as a program counts as the project's code, unless it is Celery's own."""
    names: dict[str, Any] = {"__name__": "__main__", "calling_line": calling_line}
    exec(compile("place = calling_line()", path, "exec"), names)
    here = f"{__file__}:{inspect.stack(context=0)[0].lineno - 1} in "
    assert names["place"].startswith(here if passed else f"{path}:1 in <module>")


@pytest.mark.usefixtures("switched_on")
def test_the_database_is_named(warned: Warned, make_database: MakeDatabase) -> None:
    """An open transaction of any database counts; a nested one is the same as its outermost."""
    other = make_database("sqlite")
    with transaction.atomic(using=other), transaction.atomic(using=other):
        add.delay(1)
    (record,) = warned()
    assert f"inside atomic() of '{other}'" in record.message


@pytest.mark.parametrize("send", [send for send, _ in SENDS.values()], ids=SENDS.keys())
@pytest.mark.usefixtures("switched_on")
def test_outside_of_a_transaction_there_is_nothing_to_tell(
    send: Callable[[], Any], warned: Warned
) -> None:
    """Before one, after one, and when its callbacks run."""
    with hearing(sent_in_atomic) as told:
        send()
        with transaction.atomic():
            transaction.on_commit(send)
        send()
    assert (warned(), told) == ([], [])


@pytest.mark.usefixtures("switched_on")
@pytest.mark.parametrize("outbox", [False, True])
def test_sends_on_commit_are_not_told(outbox: bool, warned: Warned, sent: Sent) -> None:
    """They do what the warning asks for, canvases and deferring tasks, too."""
    with hearing(sent_in_atomic) as told, transaction.atomic():
        add.delay_on_commit(1)
        add.apply_async_on_commit((1,), outbox=outbox)
        send_on_commit(group(add.s(1), add.s(2)), outbox=outbox)
        send_on_commit(chord([add.s(1), add.s(2)], total.s()), outbox=outbox)
        deferring.delay(1)
        group(deferring.s(1), deferring.s(2)).delay()
    assert (warned(), told) == ([], [])
    assert len(sent()) == 9


@pytest.mark.usefixtures("switched_on")
def test_the_setting_that_defers_leaves_nothing_to_tell(
    settings: "Settings", warned: Warned
) -> None:
    """With SEND_ON_COMMIT every send waits."""
    settings.DJANGO_CELERY_SAFE = {**ON, "SEND_ON_COMMIT": True}
    with transaction.atomic():
        add.delay(1)
    assert warned() == []


@pytest.mark.usefixtures("switched_on")
def test_tasks_of_celery_are_left_alone(warned: Warned, sent: Sent) -> None:
    """Only a SafeTask tells; Celery's own tasks are as they were."""
    with transaction.atomic():
        plain.delay(1)
    assert (warned(), len(sent())) == ([], 1)


@pytest.fixture
def mailbox(locks_in_memory: None, settings: "Settings") -> Iterator[Mailbox]:
    """A mailbox, with the setting on."""
    settings.DJANGO_CELERY_SAFE = {**settings.DJANGO_CELERY_SAFE, **ON}
    with closing(Mailbox()) as mailbox:
        yield mailbox


def retrying(self: Any) -> None:
    """Ask for another run, inside a transaction."""
    with transaction.atomic():
        raise self.retry(countdown=60)


def failing(self: Any) -> None:
    """Be retried by Celery, from inside a transaction."""
    with transaction.atomic():
        raise ConnectionError


def replacing(self: Any) -> Any:
    """Put another task in its place, inside a transaction."""
    with transaction.atomic():
        return self.replace(self.s().set(task_id="another"))


def sending(self: Any) -> None:
    """Send itself anew, inside a transaction."""
    with transaction.atomic():
        self.delay()


@pytest.mark.parametrize(
    ("function", "count"), [(retrying, 0), (failing, 0), (replacing, 0), (sending, 1)]
)
def test_a_run_that_is_sent_again_is_not_told(
    function: Callable[..., Any], count: int, mailbox: Mailbox, warned: Warned
) -> None:
    """Retries and replacements have to leave at once; any other send of a run is told."""
    task = mailbox.task(
        function, base=SafeTask, bind=True, autoretry_for=(ConnectionError,), max_retries=3
    )
    task.delay()
    mailbox.deliver(mailbox.take_one())
    assert len(mailbox.take()) == 1
    assert len(warned()) == count


@pytest.mark.usefixtures("switched_on")
def test_an_eager_run_at_the_commit_is_not_told(
    broker: Celery, warned: Warned, make_database: MakeDatabase
) -> None:
    """An eager run at a commit has waited for it, also while another transaction is open."""
    broker.conf.task_always_eager = True
    other = make_database("sqlite")
    with hearing(sent_in_atomic) as told, transaction.atomic(using=other):
        with transaction.atomic():
            results = [
                add.delay_on_commit(1, 2),
                deferring.delay(1),
                send_on_commit(chain(add.s(1), add.s(2))),
                send_on_commit(group(add.s(1), add.s(2))),
            ]
        assert results[0].get() == 3
    assert (warned(), told) == ([], [])


class TestCaseTests(TestCase):
    """The warnings in a plain Django TestCase."""

    @pytest.fixture(autouse=True)
    def use_private_broker(self, broker: Celery, warned: Warned) -> None:
        """Send to the private Redis."""
        self.warned = warned

    @override_settings(DJANGO_CELERY_SAFE=ON)
    def test_its_own_transactions_do_not_count(self) -> None:
        """The test's own atomic() does not count, but the one of the code under test does."""
        with hearing(sent_in_atomic) as told:
            add.delay(1)
            with self.captureOnCommitCallbacks(execute=True):
                add.delay(1)
                add.delay_on_commit(1)
            assert (self.warned(), told) == ([], [])
            with transaction.atomic():
                add.delay(1)
        assert (len(self.warned()), len(told)) == (1, 1)
