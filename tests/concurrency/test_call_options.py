"""Options of one call: ``apply_async(args, single_instance={...})``, whatever the task says."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from celery import chain, chord
from django.db import transaction
from django.utils import timezone

from django_celery_safe import (
    ConfigurationError,
    SafeTask,
    iter_locks,
    send_on_commit,
    single_instance,
)
from django_celery_safe.concurrency.guard import find_guarded
from tests.concurrency.mailbox import Mailbox, Message, Outcome
from tests.concurrency.test_options import held_names
from tests.locks.renewals import held_by

pytestmark = pytest.mark.usefixtures("locks_in_memory")

NAME = "tests.called"

#: Options of a call, with values that differ from every default.
CALL = {"key": "feed-42", "on_conflict": "raise", "timeout": 100}
LOCK = f"{NAME}:feed-42"


def work(number: int, note: str = "") -> list[Any]:
    """Return name and remaining lease of each lock that is held."""
    return [[lock.name, lock.remaining] for lock in iter_locks()]


@pytest.fixture
def plain(mailbox: Mailbox) -> Any:
    """A SafeTask that says nothing itself."""
    return mailbox.task(work, base=SafeTask, name=NAME)


@pytest.fixture(params=["undecorated", "decorated"])
def task(request: pytest.FixtureRequest, mailbox: Mailbox) -> Any:
    """A SafeTask that says nothing itself, and one that has options of its own."""
    decorate = single_instance(key="{number}", on_conflict="retry", retry_delay=9, timeout=50)
    function = work if request.param == "undecorated" else decorate(work)
    return mailbox.task(function, base=SafeTask, name=NAME)


def names(outcome: Outcome) -> list[str]:
    """Return the names of the locks that a run of ``work`` saw."""
    assert outcome.state == "SUCCESS"
    return [name for name, _ in outcome.value]


def call(mailbox: Mailbox, task: Any, *args: Any, **options: Any) -> Message:
    """Send one call with these options; return its message."""
    return mailbox.send(task, *(args or (7,)), single_instance=options)


# Options of one call.


def test_the_call_decides(task: Any, mailbox: Mailbox) -> None:
    """Key and lease are those of the call alone: neither arguments nor the next call know it."""
    message = call(mailbox, task, **CALL)
    assert (message.args, message.kwargs) == ([7], {})
    state, ((name, remaining),) = mailbox.deliver(message)
    assert (state, name) == ("SUCCESS", LOCK)
    assert 90 < remaining <= 100
    assert held_names() == []
    after = mailbox.send(task, 7)
    assert after.ours == {}
    assert names(mailbox.deliver(after)) == ([f"{NAME}:7"] if find_guarded(task) else [])


def test_no_options_are_those_of_the_task(task: Any, mailbox: Mailbox) -> None:
    """An empty dict asks for the lock: with the task's options, or the defaults."""
    first, same, other = (
        names(mailbox.deliver(call(mailbox, task, *args))) for args in [(7,), (7, ""), (8,)]
    )
    assert len(first) == 1
    assert first == same != other


@pytest.mark.parametrize(
    ("key", "name"),
    [("feed 42: ünï", "feed 42: ünï"), ("{number}-{note}", "7-"), ("{{number}}", "{number}")],
)
def test_a_text_may_be_plain_or_a_template(
    key: str, name: str, plain: Any, mailbox: Mailbox
) -> None:
    """For one call a text that names no argument is a key like any other."""
    assert names(mailbox.deliver(call(mailbox, plain, key=key))) == [f"{NAME}:{name}"]


def test_a_call_may_come_back(task: Any, mailbox: Mailbox) -> None:
    """After the call's delay, else the task's, else the default; still with the call's options."""
    own = 9 if find_guarded(task) else 5
    for options, expected in (({}, own), ({"retry_delay": 60}, 60)):
        first = call(mailbox, task, key="feed-42", on_conflict="retry", **options)
        began = timezone.now()
        with held_by(LOCK, "other"):
            mailbox.deliver(first)
        again = mailbox.take_one()
        assert began + timedelta(seconds=expected * 0.75) <= again.eta
        assert again.delay <= expected * 1.25
        assert (again.id, again.ours) == (first.id, first.ours)
        assert names(mailbox.deliver(again)) == [LOCK]


@pytest.mark.parametrize(
    ("own", "given", "state"),
    [
        ({"on_conflict": "wait", "blocking_timeout": 60}, {"blocking_timeout": 0.1}, "FAILURE"),
        ({"on_conflict": "wait", "blocking_timeout": 60}, {"on_conflict": "retry"}, "RETRY"),
        ({"on_conflict": "retry", "retry_delay": 9}, {"on_conflict": "raise"}, "FAILURE"),
        ({"on_conflict": "reject"}, {"key": "{number}"}, "REJECTED"),
    ],
)
def test_what_the_call_does_not_say_the_task_does(
    own: dict[str, Any], given: dict[str, Any], state: str, mailbox: Mailbox
) -> None:
    """And what the task says of a way that the call does not go is no contradiction."""
    task = mailbox.task(single_instance(key="{number}", **own)(work), base=SafeTask, name=NAME)
    message = call(mailbox, task, **given)
    with held_by(f"{NAME}:7", "other"):
        assert mailbox.deliver(message).state == state


def test_a_unique_task_is_sent_once_for_each_key_of_a_call(mailbox: Mailbox) -> None:
    """The lock at the send goes by the call's key, too."""
    decorated = single_instance(key="{number}", unique_until="end")(work)
    task = mailbox.task(decorated, base=SafeTask, name=NAME)
    first, same, other = (
        task.apply_async((number,), single_instance={"key": key})
        for number, key in ((1, "a"), (2, "a"), (1, "b"))
    )
    assert [one.is_duplicate for one in (first, same, other)] == [False, True, False]
    assert [message.id for message in mailbox.take()] == [first.id, other.id]


# How it can be told.


WAYS: dict[str, Callable[[Any], Any]] = {
    "apply_async": lambda task: task.apply_async((7,), single_instance=CALL),
    "later in a chain": lambda task: chain(
        task.si(0), task.si(7).set(single_instance=CALL)
    ).delay(),
    "chord header": lambda task: chord(
        [task.si(7).set(single_instance=CALL), task.si(0)], task.si(0)
    ).delay(),
    "apply_async_on_commit": transaction.atomic(
        lambda task: task.apply_async_on_commit((7,), single_instance=CALL)
    ),
    "send_on_commit": transaction.atomic(
        lambda task: send_on_commit(task.s(7), single_instance=CALL)
    ),
}


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_send_takes_options(way: str, plain: Any, mailbox: Mailbox) -> None:
    """The run of number 7, and no other, has the options of its call."""
    WAYS[way](plain)
    seen: dict[int, list[Any]] = {}
    messages = mailbox.take()
    while messages:
        message = messages.pop(0)
        seen[message.args[0]] = mailbox.deliver(message).value
        messages += mailbox.take()
    ((name, remaining),) = seen[7]
    assert name == LOCK
    assert 90 < remaining <= 100
    assert LOCK not in [lock[0] for lock in seen.get(0, [])]
    assert len(seen) == (2 if way in ("later in a chain", "chord header") else 1)


@pytest.mark.parametrize("run", ["signature", "eager on commit"])
@pytest.mark.django_db(transaction=True)
def test_runs_without_a_message_take_options(run: str, plain: Any, mailbox: Mailbox) -> None:
    """``.apply(single_instance=...)`` and eager mode run under the lock of the call."""
    if run == "signature":
        result = plain.s(7).set(single_instance=CALL).apply()
    else:
        mailbox.app.conf.task_always_eager = True
        with transaction.atomic():
            result = plain.apply_async_on_commit((7,), single_instance=CALL)
    ((name, remaining),) = result.get()
    assert name == LOCK
    assert 90 < remaining <= 100


# Mistakes.


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("retry", r"single_instance='retry' is not a dict"),
        ({"on_conflit": "skip"}, r"no option 'on_conflit' .* Did you mean 'on_conflict'\?"),
        ({"unique_until": "end"}, r"no option 'unique_until' for one call"),
        ({"timeout": timedelta(seconds=5)}, r"timeout=datetime\.timedelta\(seconds=5\)"),
        ({"on_conflict": "wait"}, r"blocking_timeout=None is not a valid time to wait"),
        ({"key": ""}, r"key=''"),
        ({"key": work}, r"key=<function work at"),
        ({"key": "{nubmer}"}, r"'nubmer'.*number, note\. Did you mean 'number'\?"),
    ],
)
def test_options_without_a_meaning_are_refused(
    options: Any, sentence: str, plain: Any, mailbox: Mailbox
) -> None:
    """At the call, with the value that was given; nothing is sent, and no body runs."""
    for send in (plain.apply_async, plain.apply):
        with pytest.raises(ConfigurationError, match=sentence):
            send((7,), single_instance=options)
    assert mailbox.take() == []
