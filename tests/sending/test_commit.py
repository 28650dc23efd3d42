"""When a task is sent: at the commit it belongs to, and only then."""

from collections.abc import Callable
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from typing import Any

import pytest
from celery import Celery, chain, chord, group, shared_task
from celery.exceptions import SoftTimeLimitExceeded
from celery.exceptions import TimeoutError as TimeIsOver
from django.db import DEFAULT_DB_ALIAS, connections, transaction
from pytest_django import Settings

from django_celery_safe import SafeTask, WrongTransaction, send_on_commit, single_instance
from django_celery_safe.delivery.copies import resending
from django_celery_safe.models import OutboxMessage
from tests.app.tasks import add
from tests.concurrency.mailbox import Mailbox
from tests.conftest import MakeDatabase
from tests.interruption import Interruption
from tests.sending.conftest import ids, rolled_back
from tests.sending.published import Sent, ids_in
from tests.servers.databases import without_autocommit

pytestmark = pytest.mark.django_db(transaction=True)


@shared_task(base=SafeTask, send_on_commit=True)
def deferring(*args: object, **kwargs: object) -> None:
    """Wait for the commit with every send."""


@shared_task(base=SafeTask, send_on_commit=False)
def immediate(*args: object) -> None:
    """Never wait for a commit, whatever the setting says."""


@shared_task(base=SafeTask)
def undecided(*args: object, **kwargs: object) -> None:
    """Leave it to the setting."""


@shared_task(base=SafeTask)
@single_instance(key="{number}", unique_until="start")
def once(number: int) -> None:
    """Be sent once for each number."""


@pytest.mark.parametrize("outbox", [False, True])
def test_a_rollback_takes_only_its_own_sends_back(outbox: bool, sent: Sent) -> None:
    """
    A send that was rolled back is not made, now or with a later commit.

    If a savepoint is rolled back, what was sent around it goes out in its order.
    """

    def send(number: int) -> Any:
        return add.apply_async_on_commit((number,), outbox=outbox)

    with rolled_back():
        send(0)
        send_on_commit(group(add.s(1), add.s(2)), outbox=outbox)
    with transaction.atomic():
        before = send(1)
        with rolled_back():
            send(2)
            with transaction.atomic():
                send(3)
        with transaction.atomic():
            inside = send(4)
        assert sent() == []
        after = send(5)
        canvas = send_on_commit(group(add.s(6), add.s(7)), outbox=outbox)
        left = [before.id, inside.id, after.id, *(part.id for part in canvas)]
        kept = OutboxMessage.objects.order_by("pk").values_list("task_id", flat=True)
        assert list(kept) == (left if outbox else [])
    assert ids(sent()) == left
    assert not OutboxMessage.objects.exists()


def switched_on() -> list[str]:
    """Return the names of the package's context variables that have a value here."""
    values = copy_context().items()
    ours = "django_celery_safe_"
    return [one.name for one, value in values if one.name.startswith(ours) and value]


def test_a_soft_time_limit_in_a_send_changes_no_later_send(
    sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later sends of the process are published, or wait for their commit, as before."""

    def send() -> None:
        with transaction.atomic():
            add.delay_on_commit(1)
        once.delay(number)
        resending(None, str)
        with monkeypatch.context() as patch, transaction.atomic():
            patch.setitem(once.app.conf, "task_always_eager", True)
            once.delay_on_commit(-number)

    places = set()
    for number in range(1, 100):
        interruption = Interruption(number, {send.__code__}, after=(ContextVar, Context))
        with suppress(SoftTimeLimitExceeded), interruption.watching():
            send()
        assert switched_on() == [], interruption.place
        sent()
        plain = immediate.delay()
        with rolled_back():
            add.delay_on_commit(2)
        assert ids(sent()) == [plain.id], interruption.place
        if not interruption.place:
            break
        places.add(interruption.place.partition(":")[0])
    assert places >= {"capture", "resending", "send_once", "run_for"}


def test_outside_of_a_transaction_a_send_goes_out_at_once(sent: Sent) -> None:
    """There is nothing to wait for, as in a callback of a commit."""
    results = [add.delay_on_commit(1), send_on_commit(add.s(2)), deferring.delay()]
    assert ids(sent()) == [result.id for result in results]
    assert [result.send_error for result in results] == [None] * 3
    with transaction.atomic():
        transaction.on_commit(lambda: results.append(add.delay_on_commit(1)))
        transaction.on_commit(lambda: results.append(ids(sent())))
    assert results[-1] == [results[-2].id]


def test_using_names_the_database_to_wait_for(sent: Sent, make_database: MakeDatabase) -> None:
    """With ``using`` the commit of that database counts, whatever happens to the default one."""
    other = make_database("sqlite")
    canvas = chain(deferring.s(1), deferring.s(2))
    with transaction.atomic(using=other):
        with rolled_back(using=DEFAULT_DB_ALIAS):
            task = add.apply_async_on_commit((1,), using=other)
            result = send_on_commit(canvas, using=other)
        assert sent() == []
    assert ids(sent()) == [task.id, result.parent.id]
    with transaction.atomic(), rolled_back(using=other):
        send_on_commit(canvas, using=other)
    assert sent() == []


def test_waiting_for_the_wrong_database_is_an_error(
    sent: Sent, make_database: MakeDatabase
) -> None:
    """In autocommit there, inside atomic() elsewhere: the error names the database meant."""
    other = make_database("sqlite")
    with transaction.atomic(using=other):
        for send in (
            lambda: add.delay_on_commit(1),
            lambda: deferring.delay(1),
            lambda: send_on_commit(add.s(1)),
        ):
            with pytest.raises(WrongTransaction, match=f"Pass using='{other}'"):
                send()
    with transaction.atomic(), pytest.raises(WrongTransaction, match="using='default'"):
        add.apply_async_on_commit((1,), using=other)
    assert sent() == []


def test_a_connection_without_autocommit_is_an_error(
    sent: Sent, make_database: MakeDatabase
) -> None:
    """Django does not know when a transaction ends that it did not begin."""
    with without_autocommit("default"):
        with pytest.raises(WrongTransaction, match="autocommit is off"):
            add.delay_on_commit(1)
        with transaction.atomic():
            add.delay_on_commit(2)
    assert sent() == []
    # AUTOCOMMIT=False counts before the connection is opened, and no send opens one.
    alias = make_database("sqlite")
    add.apply_async_on_commit((1,), using=alias)
    assert len(sent()) == 1
    connections[alias].settings_dict["AUTOCOMMIT"] = False
    with pytest.raises(WrongTransaction, match="autocommit is off"):
        add.apply_async_on_commit((1,), using=alias)
    assert (connections[alias].connection, sent()) == (None, [])


#: Ways to send a task plainly, and how many messages each publishes.
SENDS: dict[str, tuple[Callable[[Any], Any], int]] = {
    "delay": (lambda task: task.delay(1), 1),
    "group": (lambda task: group(task.s(1), task.s(2)).delay(), 2),
    "chain": (lambda task: chain(task.s(1), task.s(2)).delay(), 1),
    "chord": (lambda task: chord([task.s(1), task.s(2)], task.s()).delay(), 2),
}


@pytest.mark.parametrize(("send", "count"), SENDS.values(), ids=SENDS.keys())
def test_the_task_option_defers_plain_sends(
    send: Callable[[Any], Any], count: int, sent: Sent
) -> None:
    """With ``send_on_commit=True`` every way to send the task waits for the commit."""
    with rolled_back():
        send(deferring)
    assert sent() == []
    with transaction.atomic():
        result = send(deferring)
        assert sent() == []
    messages = ids(sent())
    assert len(messages) == count
    assert set(messages) <= {*ids_in(result), result.id}


def test_the_setting_defers_plain_sends(sent: Sent, settings: Settings) -> None:
    """SEND_ON_COMMIT does it for every SafeTask that does not say otherwise."""
    with transaction.atomic():
        undecided.delay(1)
        assert len(sent()) == 1
    settings.DJANGO_CELERY_SAFE = {"SEND_ON_COMMIT": True}
    with transaction.atomic():
        result = undecided.delay(1)
        now = immediate.delay()
        assert ids(sent()) == [now.id]
        deferred = immediate.apply_async((1,), send_on_commit=True)
        assert sent() == []
    assert ids(sent()) == [result.id, deferred.id]


#: Sends of a task that the call wants to go out now.
NOW: dict[str, Callable[[], Any]] = {
    "signature": lambda: deferring.s(1).set(send_on_commit=False).delay(),
    "outbox": lambda: undecided.apply_async((1,), send_on_commit=False, outbox=False),
}


@pytest.mark.parametrize("send", NOW.values(), ids=NOW)
def test_one_call_can_say_now(
    send: Callable[[], Any], sent: Sent, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """send_on_commit=False sends inside atomic(), whatever the task and settings say."""
    settings.DJANGO_CELERY_SAFE = {
        "SEND_ON_COMMIT": True, "OUTBOX": "until_done" if send is NOW["outbox"] else False,
        "WARN_IN_ATOMIC": True,
    }  # fmt: skip
    with rolled_back():
        send()
        assert [one.body[0] for one in sent()] == [[1]]
        # The outbox and ``using`` wait for a commit, whoever asks for them.
        settings.DJANGO_CELERY_SAFE = {"OUTBOX": "until_done"}
        for options in ({}, {"outbox": True}, {"outbox": "until_done"}, {"using": "default"}):
            with pytest.raises(TypeError, match=r"send_on_commit=False.*now"):
                undecided.apply_async((1,), send_on_commit=False, **options)
    assert (sent(), caplog.records) == ([], [])


def retrying(self: Any) -> None:
    """Ask for another run, inside a transaction."""
    with transaction.atomic():
        raise self.retry(countdown=0)


def failing(self: Any) -> None:
    """Be retried by Celery, from inside a transaction."""
    with transaction.atomic():
        self.delay()
        raise ConnectionError


def replacing(self: Any) -> Any:
    """Put a chord in its place, inside a transaction."""
    with transaction.atomic():
        return self.replace(chord([self.s()], self.s()))


@pytest.mark.parametrize("function", [retrying, failing, replacing])
def test_a_run_that_goes_on_is_sent_in_spite_of_the_rollback(
    function: Callable[..., Any],
    mailbox: Mailbox,
    settings: Settings,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What else it sent is dropped; its retry or replacement goes out, and no warning tells so."""
    settings.DJANGO_CELERY_SAFE = {**settings.DJANGO_CELERY_SAFE, "WARN_IN_ATOMIC": True}
    task = mailbox.task(
        function, base=SafeTask, bind=True, send_on_commit=True, autoretry_for=(ConnectionError,)
    )
    task.delay()
    message = mailbox.take_one()
    state = mailbox.deliver(message).state
    assert state == ("IGNORED" if function is replacing else "RETRY")
    following = mailbox.take_one()
    assert (following.id == message.id) is (function is not replacing)
    assert [record for record in caplog.records if record.name.startswith("django_celery")] == []


@pytest.mark.parametrize("eager", [False, True])
def test_waiting_for_what_was_not_sent_yet_is_an_error(eager: bool, broker: Celery) -> None:
    """Inside the transaction get() raises at once; after the commit it is Celery's own."""
    broker.conf.task_always_eager = eager
    with transaction.atomic():
        result: Any = add.delay_on_commit(1, 2)
        several = send_on_commit(group(add.s(1, 2), chain(add.s(1), add.s(2))))
        waiting = [result, several, *several.results]
        if not eager:
            last = send_on_commit(chain(add.s(1), add.s(2)))
            waiting += [add.apply_async_on_commit((1, 2), outbox=True), last, last.parent]
        for one in waiting:
            with pytest.raises(WrongTransaction, match="after the block"):
                one.get(timeout=60)
    if eager:
        assert (result.get(), several.get()) == (3, [3, 3])
    else:
        with pytest.raises(TimeIsOver):
            result.get(timeout=0.1)


def test_arguments_are_those_of_the_call(sent: Sent) -> None:
    """Later changes of arguments or headers do not change the message."""
    numbers, options, headers = [1], {"deep": {"er": [1]}}, {"trace": {"span": [1]}}
    signature = chain(deferring.s(numbers), deferring.s(options=options))
    with transaction.atomic():
        deferring.apply_async((numbers,), {"options": options}, headers=headers)
        send_on_commit(signature)
        numbers.append(2)
        options["deep"]["er"].append(2)
        headers["trace"]["span"].append(2)
        signature.tasks[0].set(queue="elsewhere")
    task, first = sent()
    assert task.body[:2] == [[[1]], {"options": {"deep": {"er": [1]}}}]
    assert task.headers["trace"] == {"span": [1]}
    assert first.queue == "celery"
    assert first.body[0] == [[1]]
    assert first.body[2]["chain"][0]["kwargs"] == {"options": {"deep": {"er": [1]}}}


def test_only_signatures_are_sent(sent: Sent) -> None:
    """Anything else is a TypeError that says what to write."""
    for wrong in (None, add, "tests.app.tasks.add", {"task": add.name}, lambda: add.delay(1)):
        with transaction.atomic(), pytest.raises(TypeError, match=r"Write task\.si\(\.\.\.\)"):
            send_on_commit(wrong)
        with pytest.raises(TypeError, match="instead of a signature"):
            send_on_commit(wrong)
    assert sent() == []
