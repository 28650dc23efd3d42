"""Our header: passed on, garbled, or of another release, it harms nothing."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery, Task, shared_task
from django.db import transaction

from django_celery_safe import ConfigurationError, SafeTask, iter_locks, single_instance
from django_celery_safe.delivery.header import HEADER
from tests.concurrency.mailbox import Mailbox, Message
from tests.concurrency.test_options import held_names
from tests.locks.renewals import get_lock, get_remaining

#: Locks live in memory, unless a test says otherwise.
pytestmark = pytest.mark.usefixtures("locks_in_memory")

NAME = "tests.sending"
#: Options of one call.
CALL = {"key": "feed-42", "timeout": 100}


def names_of_locks(number: int) -> list[str]:
    """Return what is locked while it runs."""
    return held_names()


def make_unique(mailbox: Mailbox, function: Callable[..., Any], **options: Any) -> Any:
    """Return a bound task that is sent once for each number until it ends."""
    decorate = single_instance(key="{number}", unique_until="end", **options)
    return mailbox.task(decorate(function), base=SafeTask, bind=True, name=NAME)


# Passed on.


def send_to(other: Any) -> Callable[..., Any]:
    """Return a body that sends ``other`` twice, with all the headers that it got itself."""

    def sending(self: Any, number: int) -> list[str]:
        for one in (1, 2):
            other.apply_async((one,), headers=self.request.headers)
        return held_names()

    return sending


@pytest.mark.parametrize(
    ("base", "decorate", "key", "call"),
    [
        (Task, lambda body: body, None, {}),
        (SafeTask, lambda body: body, None, {"single_instance": CALL}),
        (Task, single_instance(key="{number}"), "{number}", {"single_instance": CALL}),
        (SafeTask, single_instance(key="{number}", unique_until="start"), "{number}", {}),
    ],
    ids=["plain", "undecorated", "decorated plain", "unique"],
)
def test_headers_passed_on_to_another_task_take_nothing_along(
    base: Any, decorate: Any, key: str | None, call: dict[str, Any], mailbox: Mailbox
) -> None:
    """A run's sends have the user's headers, and their own key, lock and options, if any."""
    other = mailbox.task(decorate(names_of_locks), base=base, name="tests.other")
    sending = make_unique(mailbox, send_to(other))
    for _ in range(2):  # a mark of a duplicate would show at the second
        run = mailbox.deliver(mailbox.send(sending, 7, headers={"x-user": "me"}, **call))
        assert run.state == "SUCCESS"
        messages = mailbox.take()
        assert [message.headers["x-user"] for message in messages] == ["me"] * 2
        for number, message in enumerate(messages, 1):
            expected = [] if key is None else [f"tests.other:{number}"]
            seen = mailbox.deliver(message)
            assert seen.state == "SUCCESS"
            assert [name for name in seen.value if not name.startswith("sent:")] == expected
        assert held_names() == []


def test_headers_passed_on_to_a_new_send_take_nothing_along(mailbox: Mailbox) -> None:
    """A task that sends itself makes a message of its own; the very same is a duplicate."""

    def sending(self: Any, number: int) -> list[Any]:
        if number == 8:
            return held_names()
        sends = [self.apply_async((n,), headers=self.request.headers) for n in (8, 7)]
        return [one.is_duplicate for one in sends]

    first = mailbox.send(make_unique(mailbox, sending), 7, single_instance={"timeout": 100})
    assert mailbox.deliver(first) == ("SUCCESS", [False, True])
    second = mailbox.take_one()
    assert second.id != first.id
    assert second.ours["key"] == "8"
    assert second.ours["sent"] != first.ours["sent"]
    assert "options" not in second.ours
    assert held_names() == [f"sent:{NAME}:8"]
    assert mailbox.deliver(second).value == [f"sent:{NAME}:8", f"{NAME}:8"]
    assert held_names() == []


@pytest.mark.parametrize("passed_on", [False, True])
def test_a_retry_takes_all_along(passed_on: bool, mailbox: Mailbox) -> None:
    """Its own retry has key, options and lock of the message, with or without its headers."""

    def retried(self: Any, number: int) -> str:
        if self.request.retries == 0:
            headers = {"headers": self.request.headers} if passed_on else {}
            raise self.retry(countdown=0, **headers)
        (run,) = [lock for lock in iter_locks() if not lock.name.startswith("sent:")]
        assert get_remaining(run.name) > 90
        return run.name

    first = mailbox.send(make_unique(mailbox, retried), 7, single_instance=CALL)
    assert mailbox.deliver(first).state == "RETRY"
    assert held_names() == [f"sent:{NAME}:feed-42"]
    again = mailbox.take_one()
    assert (again.id, again.ours) == (first.id, first.ours)
    assert mailbox.deliver(again) == ("SUCCESS", f"{NAME}:feed-42")
    assert held_names() == []


@pytest.mark.parametrize(
    "change", [{"args": (8,)}, {"single_instance": {"key": "8"}}], ids=["args", "key"]
)
def test_a_retry_under_another_key_is_no_duplicate(
    change: dict[str, Any], mailbox: Mailbox
) -> None:
    """Though the same was sent before, it runs, since the run that goes on in it was not done."""
    runs: list[int] = []

    def changing(self: Any, number: int) -> str:
        runs.append(self.request.retries)
        if self.request.retries == 0:
            raise self.retry(countdown=0, **change)
        return "done"

    task = make_unique(mailbox, changing)
    task.apply_async((8,), task_id="before")
    task.delay(7)
    before, first = mailbox.take()
    assert mailbox.deliver(first).state == "RETRY"
    # The other's is left alone, and its own is free: nothing of it is on its way.
    assert held_names() == [f"sent:{NAME}:8"]
    again = mailbox.take_one()
    assert again.id == first.id
    assert again.ours["key"] == "8"
    assert "duplicate" not in again.ours
    assert mailbox.deliver(again) == ("SUCCESS", "done")
    assert runs == [0, 1]
    assert get_lock(f"sent:{NAME}:8").token == before.ours["sent"]


def test_each_app_has_its_own_task_that_calls_can_ask() -> None:
    """A shared task of two apps runs alone in either, decorated or asked."""

    @shared_task(base=SafeTask, name="tests.shared")
    def shared(number: int) -> list[str]:
        return held_names()

    for app in [Celery(name, set_as_current=False) for name in ("one", "two")]:
        task = app.tasks[shared.name]
        assert task.apply((1,)).get() == []
        assert task.apply((1,), single_instance=CALL).get() == ["tests.shared:feed-42"]
        app.close()


# Garbled, or forged.

FORGED: dict[str, Any] = {
    "a list": ["sent"],
    "sent None": {"sent": None},
    "sent of another length": {"sent": "a" * 33},
    "period nan": {"period": float("nan")},
    "period below 0": {"period": -60},
    "period text": {"period": "an hour"},
    "options.on_conflict": {"options": {"on_conflict": [5]}},
    "options text": {"options": "skip"},
    "options.timeout nan": {"options": {"timeout": float("nan")}},
    "key list": {"key": ["7"]},
    "duplicate list": {"duplicate": ["x"]},
    "copy 3": {"copy": 3},
}


def forge(message: Message, name: str) -> Message:
    """Return the message with that header in place of its own, or of part of it."""
    forged = FORGED[name]
    if isinstance(forged, dict):
        forged = {**message.ours, **forged}
    return message.with_headers(**{HEADER: forged})


@pytest.mark.parametrize("name", FORGED)
def test_a_garbled_header_loses_no_run(
    name: str, mailbox: Mailbox, use_store: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    """The task runs under its own lock, and a warning names it; its run's lock is free then."""
    use_store("django-redis")

    def looking(self: Any, number: int) -> list[str]:
        return held_names()

    state, held = mailbox.deliver(forge(mailbox.send(make_unique(mailbox, looking), 7), name))
    assert state == "SUCCESS"
    assert f"{NAME}:7" in held
    assert f"{NAME}:7" not in held_names()
    said = [r for r in caplog.records if r.name.startswith("django_celery_safe")]
    assert {record.levelno for record in said} == {logging.WARNING}
    # The task's name, or that of its function.
    assert all(NAME in r.getMessage() or "looking" in r.getMessage() for r in said)


# Keys that can't be made.


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("template", "value", "decorated"),
    [
        ("{number:d}", "seven", False),
        ("{number.pk}", 7, True),
        ("{number[pk]}", {}, False),
        ("{number[2]}", [1], True),
    ],
)
def test_a_key_that_cant_be_made_is_refused_at_the_send(
    template: str, value: Any, decorated: bool, mailbox: Mailbox
) -> None:
    """A ConfigurationError at each kind of send names key and task; nothing is sent or locked."""
    decorate: Any = single_instance(key=template, unique_until="end")
    body = decorate(names_of_locks) if decorated else names_of_locks
    task = mailbox.task(body, base=SafeTask, name=NAME)
    call = {} if decorated else {"single_instance": {"key": template}}
    sentence = "can't be made from these arguments"
    for send in (task.apply_async, task.apply_async_on_commit):
        with transaction.atomic(), pytest.raises(ConfigurationError, match=sentence) as raised:
            send((value,), **call)
        assert template in str(raised.value)
        assert NAME in str(raised.value)
    assert mailbox.take() == []
    assert held_names() == []
