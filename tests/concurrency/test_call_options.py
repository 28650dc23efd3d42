"""Options of one call: ``apply_async(args, single_instance={...})``, whatever the task says."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
from celery import chain, chord, group
from celery.exceptions import Reject
from django.db import transaction

from django_celery_safe import (
    AlreadyRunning,
    AlreadySent,
    ConfigurationError,
    SafeTask,
    iter_locks,
    release_lock,
    send_on_commit,
    single_instance,
)
from django_celery_safe.concurrency import guard
from django_celery_safe.concurrency.guard import find_guarded
from django_celery_safe.delivery.header import FORMAT
from django_celery_safe.leases.holder import place_names
from tests.concurrency.holders import held_by
from tests.concurrency.mailbox import Mailbox, Message, Outcome
from tests.concurrency.test_options import KINDS, held_names
from tests.concurrency.test_without_message import by_apply, eagerly

pytestmark = pytest.mark.usefixtures("locks_in_memory")

NAME = "tests.called"

#: Options of a call, with values that differ from every default.
CALL = {"key": "feed-42", "on_conflict": "raise", "timeout": 100}
LOCK = f"{NAME}:feed-42"


def work(number: int, note: str = "") -> list[Any]:
    """Return name and remaining lease of each lock that is held."""
    return [[lock.name, lock.remaining] for lock in iter_locks()]


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
    task.apply_async(args or (7,), single_instance=options)
    return mailbox.take_one()


# Options of one call.


def test_the_call_decides(task: Any, mailbox: Mailbox) -> None:
    """Key and lease are those of the call, and the task's arguments know nothing of it."""
    message = call(mailbox, task, **CALL)
    assert (message.args, message.kwargs) == ([7], {})
    state, ((name, remaining),) = mailbox.deliver(message)
    assert (state, name) == ("SUCCESS", LOCK)
    assert 90 < remaining <= 100
    assert held_names() == []


def test_the_next_call_is_as_before(task: Any, mailbox: Mailbox) -> None:
    """The options of one call do not apply to others."""
    task.delay(7)
    before = mailbox.take_one()
    mailbox.deliver(call(mailbox, task, **CALL))
    task.delay(7)
    after = mailbox.take_one()
    assert after.ours == before.ours
    assert names(mailbox.deliver(after)) == ([f"{NAME}:7"] if find_guarded(task) else [])


def test_arguments_may_have_any_names(mailbox: Mailbox) -> None:
    """A wrapper that a message asks for takes no name from the task's arguments."""

    def anything(request: int, task: int, wrapper: int, inner: int) -> list[int]:
        return [request, task, wrapper, inner]

    kwargs = {"request": 1, "task": 2, "wrapper": 3, "inner": 4}
    named = mailbox.task(anything, base=SafeTask, name=NAME)
    named.apply_async(kwargs=kwargs, single_instance={"on_conflict": "raise"})
    assert mailbox.deliver(mailbox.take_one()) == ("SUCCESS", [1, 2, 3, 4])


def test_no_options_are_those_of_the_task(task: Any, mailbox: Mailbox) -> None:
    """An empty dict asks for the lock: with the task's options, or the defaults."""
    first, same, other = (
        names(mailbox.deliver(call(mailbox, task, *args))) for args in [(7,), (7, ""), (8,)]
    )
    assert len(first) == 1
    assert first == same != other


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("feed-42", "feed-42"),
        ("feed 42: ünï", "feed 42: ünï"),
        ("{number}", "7"),
        ("{number}-{note}", "7-"),
        ("{{number}}", "{number}"),
    ],
)
def test_a_text_may_be_plain_or_a_template(
    key: str, name: str, task: Any, mailbox: Mailbox
) -> None:
    """For one call a text that names no argument is a key like any other."""
    assert names(mailbox.deliver(call(mailbox, task, key=key))) == [f"{NAME}:{name}"]


@pytest.mark.parametrize("key", [["number"], ("number",), []])
def test_a_list_names_the_arguments_that_count(key: Any, task: Any, mailbox: Mailbox) -> None:
    """The key is that of ``@single_instance(key=[...])``, and the other arguments don't matter."""
    decorated = mailbox.task(single_instance(key=key)(work), base=SafeTask, name="tests.decorated")
    expected = decorated.lock_name(7).removeprefix("tests.decorated:")
    for args in [(7,), (7, "another")]:
        assert names(mailbox.deliver(call(mailbox, task, *args, key=key))) == [f"{NAME}:{expected}"]
    (other,) = names(mailbox.deliver(call(mailbox, task, 8, key=key)))
    assert (other == f"{NAME}:{expected}") is (key == [])


@pytest.mark.parametrize(
    ("options", "state", "error"),
    [
        ({"on_conflict": "skip"}, "SUCCESS", None),
        ({"on_conflict": "retry"}, "RETRY", None),
        ({"on_conflict": "wait", "blocking_timeout": 0.2}, "FAILURE", AlreadyRunning),
        ({"on_conflict": "reject"}, "REJECTED", Reject),
        ({"on_conflict": "raise"}, "FAILURE", AlreadyRunning),
    ],
    ids=lambda value: value.get("on_conflict") if isinstance(value, dict) else None,
)
@pytest.mark.parametrize("limit", [1, 3])
def test_a_conflict_ends_as_the_call_says(
    options: dict[str, Any], state: str, error: Any, limit: int, task: Any, mailbox: Mailbox
) -> None:
    """Every way out, against whatever the task says itself, once all places are held."""
    message = call(mailbox, task, key="feed-42", limit=limit, **options)
    with ExitStack() as stack:
        for place in place_names(LOCK, limit):
            stack.enter_context(held_by(place, f"other at {place}"))
        outcome = mailbox.deliver(message)
    assert outcome.state == state
    if error is not None:
        assert isinstance(outcome.value, error)
        assert LOCK in str(outcome.value)
    assert len(mailbox.take()) == (state == "RETRY")


@pytest.mark.parametrize("unique_until", [None, "start"])
def test_a_call_may_run_beside_others(unique_until: Any, task: Any, mailbox: Mailbox) -> None:
    """It takes the first place that is free, and the next one of its key is as the task says."""
    message = call(mailbox, task, key="feed-42", limit=3, unique_until=unique_until)
    with held_by(LOCK, "other"):
        assert set(names(mailbox.deliver(message))) == {LOCK, f"{LOCK}:place:2"}
        assert held_names() == [LOCK]
        message = call(mailbox, task, key="feed-42", on_conflict="raise")
        assert mailbox.deliver(message).state == "FAILURE"


def test_a_call_may_wait(task: Any, mailbox: Mailbox) -> None:
    """It runs as soon as the other has ended."""
    message = call(mailbox, task, key="feed-42", on_conflict="wait", blocking_timeout=20)
    with held_by(LOCK, "other") as lock:
        ending = threading.Timer(0.3, release_lock, [lock])
        ending.start()
        assert names(mailbox.deliver(message)) == [LOCK]
        ending.join()


@pytest.mark.parametrize(("options", "seconds"), [({}, None), ({"retry_delay": 60}, 60)])
def test_a_call_may_come_back(
    options: dict[str, Any], seconds: float | None, task: Any, mailbox: Mailbox
) -> None:
    """After the call's delay, else the task's, else the default; still with the call's options."""
    first = call(mailbox, task, key="feed-42", on_conflict="retry", **options)
    with held_by(LOCK, "other"):
        mailbox.deliver(first)
    again = mailbox.take_one()
    own = find_own(task)
    expected = seconds if seconds is not None else (5 if own is None else own.retry_delay)
    assert expected * 0.8 < again.delay <= expected * 1.25
    assert (again.id, again.ours) == (first.id, first.ours)
    assert names(mailbox.deliver(again)) == [LOCK]


def find_own(task: Any) -> Any:
    """Return the options that the task has of its own."""
    guarded = guard.find_guarded(task)
    return None if guarded is None else guarded.options


def test_the_own_copy_keeps_the_options(
    task: Any, mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message that meets the lock of its own id comes back under the call's key."""
    monkeypatch.setattr(guard, "OWN_RUN_WAIT", 0.01)
    first = call(mailbox, task, **CALL)
    with held_by(LOCK, first.id):
        assert mailbox.deliver(first).state == "IGNORED"
    copy = mailbox.take_one()
    assert copy.ours["options"] == CALL
    assert names(mailbox.deliver(copy)) == [LOCK]


@pytest.mark.parametrize(
    ("own", "given", "state"),
    [
        ({"on_conflict": "wait", "blocking_timeout": 60}, {"blocking_timeout": 0.1}, "FAILURE"),
        ({"on_conflict": "wait", "blocking_timeout": 60}, {"on_conflict": "skip"}, "SUCCESS"),
        ({"on_conflict": "wait", "blocking_timeout": 60}, {"on_conflict": "retry"}, "RETRY"),
        ({"on_conflict": "retry", "retry_delay": 9}, {"on_conflict": "raise"}, "FAILURE"),
        ({"on_conflict": "retry", "retry_delay": 9}, {"timeout": 5}, "RETRY"),
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


def test_the_counterparts_of_a_task_that_reads_its_callers_wishes(mailbox: Mailbox) -> None:
    """
    A key, a lease, and whether and how long to wait, for one call of any task.

    Source:
        Seed 003: ``celery_once_key``, ``celery_once_timeout``,
        ``celery_once_enable_wait``, ``celery_once_blocking_timeout``.
    """
    task = mailbox.task(work, base=SafeTask, name=NAME)
    rejected = call(mailbox, task, key="once", on_conflict="reject")
    waiting = call(mailbox, task, key="once", timeout=60, on_conflict="wait", blocking_timeout=20)
    with held_by(f"{NAME}:once", "first") as lock:
        assert mailbox.deliver(rejected).state == "REJECTED"
        ending = threading.Timer(0.3, release_lock, [lock])
        ending.start()
        state, ((name, remaining),) = mailbox.deliver(waiting)
        ending.join()
    assert (state, name) == ("SUCCESS", f"{NAME}:once")
    assert 50 < remaining <= 60


def test_a_unique_task_is_sent_once_for_each_key_of_a_call(mailbox: Mailbox) -> None:
    """The lock at the send goes by the call's key too."""
    decorated = single_instance(key="{number}", unique_until="end")(work)
    task = mailbox.task(decorated, base=SafeTask, name=NAME)
    first, same, other = (
        task.apply_async((number,), single_instance={"key": key})
        for number, key in [(1, "a"), (2, "a"), (1, "b")]
    )
    assert [one.is_duplicate for one in (first, same, other)] == [False, True, False]
    assert [message.id for message in mailbox.take()] == [first.id, other.id]


def test_a_call_can_be_sent_once(task: Any, mailbox: Mailbox) -> None:
    """One call asks for what the task does not do, and says what its duplicates do."""
    asked = {"key": "a", "unique_until": "end", "sent_timeout": 100}
    first, again = (task.apply_async((7,), single_instance=asked) for _ in range(2))
    with pytest.raises(AlreadySent) as raised:
        task.apply_async((7,), single_instance={**asked, "on_duplicate": "raise"})
    assert (first.is_duplicate, again.is_duplicate, again.id) == (False, True, first.id)
    assert raised.value.task_id == first.id
    assert raised.value.remaining is not None
    assert 90 < raised.value.remaining <= 100
    assert f"Its lock ends in {raised.value.remaining:.3g} s, unless" in str(raised.value)
    (message,) = mailbox.take()
    assert set(names(mailbox.deliver(message))) == {f"{NAME}:a", f"sent:{NAME}:a"}
    assert held_names() == []


def test_a_call_can_be_sent_as_often_as_one_likes(mailbox: Mailbox) -> None:
    """One call of a task that is sent once is published whatever is on its way."""
    decorated = single_instance(key="{number}", unique_until="end", sent_timeout=100)(work)
    task = mailbox.task(decorated, base=SafeTask, name=NAME)
    task.delay(7)
    result = task.apply_async((7,), single_instance={"unique_until": None})
    assert result.is_duplicate is False
    assert len(mailbox.take()) == 2


# How it can be told.


def later_in_a_chain(task: Any) -> None:
    """Send a chain whose last member has the options."""
    chain(task.si(0), task.si(7).set(single_instance=CALL)).delay()


def as_a_link(task: Any) -> None:
    """Send a task with a link that has the options."""
    task.apply_async((0,), link=task.si(7).set(single_instance=CALL))


def on_commit(send: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Send in a transaction."""

    def sending(task: Any) -> None:
        with transaction.atomic():
            send(task)

    return sending


WAYS: dict[str, Callable[[Any], Any]] = {
    "apply_async": lambda task: task.apply_async((7,), single_instance=CALL),
    "signature": lambda task: task.s(7).apply_async(single_instance=CALL),
    "set": lambda task: task.s(7).set(single_instance=CALL).delay(),
    "set, then more": lambda task: task.s().set(single_instance=CALL, priority=3).delay(7),
    "first of a chain": lambda task: chain(
        task.si(7).set(single_instance=CALL), task.si(0)
    ).delay(),
    "later in a chain": later_in_a_chain,
    "group": lambda task: group(task.s(7).set(single_instance=CALL)).delay(),
    "chord header": lambda task: chord(
        [task.si(7).set(single_instance=CALL), task.si(0)], task.si(0)
    ).delay(),
    "link": as_a_link,
    "apply_async_on_commit": on_commit(
        lambda task: task.apply_async_on_commit((7,), single_instance=CALL)
    ),
    "send_on_commit": on_commit(lambda task: send_on_commit(task.s(7), single_instance=CALL)),
    "send_on_commit of set": on_commit(
        lambda task: send_on_commit(task.s(7).set(single_instance=CALL))
    ),
    "send_on_commit of a chain": on_commit(
        lambda task: send_on_commit(chain(task.si(0), task.si(7).set(single_instance=CALL)))
    ),
    "autocommit": lambda task: task.apply_async_on_commit((7,), single_instance=CALL),
}


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_send_takes_options(way: str, task: Any, mailbox: Mailbox) -> None:
    """The run of number 7, and no other, has the options of its call."""
    WAYS[way](task)
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
    assert len(seen) == (2 if "chain" in way or way in ("link", "chord header") else 1)


@pytest.mark.parametrize("run", ["apply", "eager", "signature", "eager on commit"])
@pytest.mark.django_db(transaction=True)
def test_runs_without_a_message_take_options(run: str, task: Any, mailbox: Mailbox) -> None:
    """``.apply(single_instance=...)`` and eager mode run under the lock of the call."""
    mailbox.app.conf.task_always_eager = run.startswith("eager")
    if run == "apply":
        result = task.apply((7,), single_instance=CALL)
    elif run == "signature":
        result = task.s(7).set(single_instance=CALL).apply()
    elif run == "eager":
        result = task.apply_async((7,), single_instance=CALL)
    else:
        with transaction.atomic():
            result = task.apply_async_on_commit((7,), single_instance=CALL)
    ((name, remaining),) = result.get()
    assert name == LOCK
    assert 90 < remaining <= 100


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("way", ["skip", "retry", "wait", "reject", "raise"])
def test_a_conflict_without_a_message(way: str, eager: bool, task: Any, mailbox: Mailbox) -> None:
    """There is nothing to send again or to reject: skipped, or AlreadyRunning."""
    mailbox.app.conf.task_always_eager = eager
    options = {"key": "feed-42", "on_conflict": way}
    if way == "wait":
        options["blocking_timeout"] = 5  # type: ignore[assignment]
    run = task.apply_async if eager else task.apply
    with held_by(LOCK, "other"):
        result = run((7,), single_instance=options)
    if way == "skip":
        assert result.get() is None
        return
    with pytest.raises(AlreadyRunning) as raised:
        result.get()
    assert (raised.value.name, raised.value.task_id) == (LOCK, "other")


# Mistakes.


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("retry", r"single_instance='retry' is not a dict"),
        (True, r"single_instance=True is not a dict"),
        (["key"], r"single_instance=\['key'\] is not a dict"),
        ({"on_conflit": "skip"}, r"no option 'on_conflit' .* Did you mean 'on_conflict'\?"),
        ({"block_timeout": 5}, r"no option 'block_timeout'.*Did you mean 'blocking_timeout'\?"),
        (
            {"sleep": 0.1},
            r"no option 'sleep' for one call. It has: key, lock, limit, timeout",
        ),
        ({"renew": False}, r"no option 'renew' for one call"),
        ({"cache": "default"}, r"no option 'cache' for one call"),
        ({"unique_until": "ends"}, r"unique_until='ends' is not known.*mean 'end'\?"),
        ({"on_duplicate": "raise"}, r"on_duplicate='raise' has no meaning without unique_until"),
        ({"sent_timeout": 5}, r"sent_timeout=5 has no meaning without unique_until"),
        ({"unique_until": "end", "sent_timeout": timedelta(1)}, r"sent_timeout=datetime\."),
        ({"limit": 0}, r"limit=0 can't say how many"),
        ({"limit": "3"}, r"limit='3' can't say how many"),
        ({"limit": 3, "unique_until": "end"}, r'limit=3 has no meaning with unique_until="end"'),
        ({"lock": ""}, r"lock='' can't stand before the key"),
        ({"lock": "sent:x"}, r"lock='sent:x' can't stand before the key"),
        ({7: 7}, r"no option 7 for one call"),
        ({"on_conflict": "retyr"}, r"on_conflict='retyr' is not known.*mean 'retry'\?"),
        ({"on_conflict": None}, r"on_conflict=None is not known"),
        ({"on_conflict": True}, r"on_conflict=True is not known"),
        ({"timeout": None}, r"timeout=None"),
        ({"timeout": True}, r"timeout=True"),
        ({"timeout": "5"}, r"timeout='5'"),
        ({"timeout": timedelta(seconds=5)}, r"timeout=datetime\.timedelta\(seconds=5\)"),
        ({"timeout": abs}, r"timeout=<built-in function abs>"),
        ({"timeout": 0}, r"timeout=0"),
        ({"timeout": -1.5}, r"timeout=-1\.5"),
        ({"timeout": float("nan")}, r"timeout=nan"),
        ({"timeout": float("inf")}, r"timeout=inf"),
        ({"on_conflict": "wait"}, r'on_conflict="wait" with no blocking_timeout'),
        ({"on_conflict": "wait", "blocking_timeout": 0}, r"with blocking_timeout=0"),
        ({"on_conflict": "wait", "blocking_timeout": None}, r"blocking_timeout=None"),
        ({"on_conflict": "wait", "blocking_timeout": True}, r"blocking_timeout=True"),
        (
            {"on_conflict": "wait", "blocking_timeout": timedelta(1)},
            r"blocking_timeout=datetime\.timedelta\(days=1\)",
        ),
        ({"on_conflict": "wait", "blocking_timeout": float("inf")}, r"blocking_timeout=inf"),
        ({"on_conflict": "skip", "blocking_timeout": 5}, r"blocking_timeout=5 has no meaning"),
        ({"on_conflict": "skip", "retry_delay": 5}, r"retry_delay=5 has no meaning"),
        ({"on_conflict": "retry", "retry_delay": None}, r"retry_delay=None"),
        ({"on_conflict": "retry", "retry_delay": timedelta(1)}, r"retry_delay=datetime\."),
        ({"on_conflict": "retry", "retry_delay": -1}, r"retry_delay=-1"),
        ({"key": None}, r"key=None"),
        ({"key": ""}, r"key=''"),
        ({"key": 7}, r"key=7"),
        ({"key": True}, r"key=True"),
        ({"key": b"feed"}, r"key=b'feed'"),
        ({"key": work}, r"key=<function work at"),
        ({"key": [7]}, r"key=\[7\]"),
        ({"key": {"number"}}, r"key=\{'number'\}"),
        ({"key": "{nubmer}"}, r"'nubmer'.*number, note\. Did you mean 'number'\?"),
        ({"key": "feed-{}"}, r"'feed-\{\}' of .* names ''"),
        ({"key": ["number", "user"]}, r"names 'user'.*It takes: number, note"),
        ({"key": "{number"}, r"is not a format string"),
    ],
)
def test_options_without_a_meaning_are_refused(
    options: Any, sentence: str, task: Any, mailbox: Mailbox
) -> None:
    """At the call, with the value that was given; nothing is sent, and no body runs."""
    for send in (task.apply_async, task.apply):
        with pytest.raises(ConfigurationError, match=sentence):
            send((7,), single_instance=options)
    assert mailbox.take() == []


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("eager", [False, True])
def test_a_deferred_call_is_refused_before_the_commit(
    eager: bool, task: Any, mailbox: Mailbox
) -> None:
    """A mistake raises at the call, like one in the arguments."""
    mailbox.app.conf.task_always_eager = eager
    with transaction.atomic(), pytest.raises(ConfigurationError, match="'sleep'"):
        task.apply_async_on_commit((7,), single_instance={"sleep": 1})
    assert mailbox.take() == []


# Tasks that are not decorated.


@pytest.fixture(params=[kind for kind in KINDS if kind != "class"])
def kind(request: pytest.FixtureRequest) -> str:
    """Every way to make a task of a function."""
    return str(request.param)


def make_undecorated(mailbox: Mailbox, kind: str) -> Any:
    """Return a SafeTask of that kind, without ``@single_instance``."""
    function, _, _, options = KINDS[kind]
    assert function is not None
    return mailbox.task(function, base=SafeTask, name=NAME, **options)


def test_every_kind_of_task_can_be_asked(kind: str, mailbox: Mailbox) -> None:
    """Bound, retried by itself, with models: it runs under the lock that the call names."""
    task = make_undecorated(mailbox, kind)
    _, template, argument, _ = KINDS[kind]
    task.apply_async((argument,), single_instance={"key": template})
    assert mailbox.deliver(mailbox.take_one()) == ("SUCCESS", [f"{NAME}:7"])
    assert held_names() == []


@pytest.mark.parametrize("run", [by_apply, eagerly])
def test_every_kind_of_task_can_be_asked_without_a_message(
    kind: str, run: Callable[..., Any], mailbox: Mailbox
) -> None:
    """The same by ``.apply()`` and in eager mode."""
    task = make_undecorated(mailbox, kind)
    _, template, argument, _ = KINDS[kind]
    options = {"single_instance": {"key": template}}
    assert run(task, argument) == []
    send = task.apply if run is by_apply else task.apply_async
    assert send((argument,), **options).get() == [f"{NAME}:7"]


def test_the_key_of_all_arguments_is_that_of_the_decorator(kind: str, mailbox: Mailbox) -> None:
    """Asked for without a key, calls are the same that would be with ``@single_instance``."""
    task = make_undecorated(mailbox, kind)
    function, _, argument, options = KINDS[kind]
    assert function is not None
    decorated = mailbox.task(
        single_instance(function), base=SafeTask, name="tests.decorated", **options
    )
    for args in [(argument,), (argument, 10), (argument, 11)]:
        task.apply_async(args, single_instance={})
        decorated.apply_async(args)
        asked, plain = mailbox.take()
        assert plain.ours == {}
        expected = decorated.lock_name(*args).removeprefix("tests.decorated:")
        assert asked.ours["key"] == expected
        assert mailbox.deliver(plain).value == [f"tests.decorated:{expected}"]


def test_a_task_that_nobody_asks_is_left_alone(kind: str, mailbox: Mailbox) -> None:
    """No header, no lock, and Celery's check of the arguments."""
    task = make_undecorated(mailbox, kind)
    task.delay(KINDS[kind][2])
    message = mailbox.take_one()
    assert message.ours == {}
    assert mailbox.deliver(message) == ("SUCCESS", [])
    if "pydantic" in kind:
        return  # whose arguments Celery itself does not check
    for options in ({}, {"single_instance": CALL}):
        with pytest.raises(TypeError, match="missing"):
            task.apply_async((), **options)
        with pytest.raises(TypeError, match="speed"):
            task.apply_async((KINDS[kind][2],), {"speed": 1}, **options)
    assert mailbox.take() == []


@pytest.mark.parametrize("way", ["skip", "reject", "retry"])
def test_autoretry_leaves_a_conflict_alone(way: str, mailbox: Mailbox) -> None:
    """Celery's own retry is for errors of the body only, as with the decorator."""
    task = make_undecorated(mailbox, "autoretry")
    message = call(mailbox, task, key="feed-42", on_conflict=way)
    with held_by(LOCK, "other"):
        state = mailbox.deliver(message).state
    assert state == {"skip": "SUCCESS", "reject": "REJECTED", "retry": "RETRY"}[way]
    again = mailbox.take()
    assert [one.headers["retries"] for one in again] == ([0] if way == "retry" else [])


class Parent(SafeTask):
    """A task class with a run method."""

    name = "tests.parent"

    def run(self, pk: int, limit: int = 10) -> Any:
        """Return what is locked."""
        return held_names()


class Child(Parent):
    """One that builds on it."""

    name = "tests.child"

    def run(self, pk: int, limit: int = 10) -> Any:
        """Return what is locked here, and in the parent's run."""
        return [held_names(), super().run(pk)]


def test_a_class_and_its_parent_are_two_tasks(mailbox: Mailbox) -> None:
    """The run of the parent that a class calls is a part of its own run."""
    parent, child = (mailbox.app.register_task(cls()) for cls in (Parent, Child))
    for task, expected in ((parent, ["tests.parent:7"]), (child, [["tests.child:7"]] * 2)):
        task.apply_async((7,), single_instance={"key": "{pk}"})
        assert mailbox.deliver(mailbox.take_one()) == ("SUCCESS", expected)
    child.delay(7)
    assert mailbox.deliver(mailbox.take_one()) == ("SUCCESS", [[], []])


def test_a_call_inside_its_own_run_asks_for_nothing(mailbox: Mailbox) -> None:
    """A direct call of an undecorated task takes no lock, and so meets none."""

    def counting(self: Any, number: int) -> list[Any]:
        direct = [self(number - 1), self.run(number - 1)] if number else []
        return [number, held_names(), direct]

    task = mailbox.task(counting, base=SafeTask, bind=True, name=NAME)
    message = call(mailbox, task, 1, **CALL)
    ground = [0, [LOCK], []]
    assert mailbox.deliver(message) == ("SUCCESS", [1, [LOCK], [ground, ground]])


@pytest.mark.parametrize(("way", "expected"), [("skip", None), ("raise", "AlreadyRunning")])
def test_a_run_inside_its_own_run_that_asks_meets_the_lock(
    way: str, expected: Any, mailbox: Mailbox
) -> None:
    """Asked for again under the same key, the lock is held: by the run itself."""

    def nesting(self: Any, number: int) -> Any:
        if number == 0:
            return "never reached"
        options = {"key": "feed-42", "on_conflict": way}
        result = self.apply((0,), single_instance=options)
        other = self.apply((0,), single_instance={"key": "another"})
        return [type(result.result).__name__ if result.failed() else result.result, other.result]

    task = mailbox.task(nesting, base=SafeTask, bind=True, name=NAME)
    outcome = mailbox.deliver(call(mailbox, task, 1, key="feed-42"))
    assert outcome == ("SUCCESS", [expected, "never reached"])


# Retries.


@pytest.mark.parametrize("decorated", [False, True])
@pytest.mark.parametrize("by", ["retry", "autoretry"])
def test_a_retry_keeps_the_options(by: str, decorated: bool, mailbox: Mailbox) -> None:
    """Each run of one call is under the lock of that call, and ends a conflict as it says."""

    def failing(self: Any, number: int) -> Any:
        if self.request.retries == 2:
            return work(number)
        assert held_names() == [LOCK]
        if by == "retry":
            raise self.retry(countdown=0)
        raise KeyError(number)

    function = single_instance(key="{number}")(failing) if decorated else failing
    autoretry: dict[str, Any] = {"autoretry_for": (KeyError,)} if by == "autoretry" else {}
    task = mailbox.task(
        function, base=SafeTask, bind=True, name=NAME, default_retry_delay=0, **autoretry
    )
    message = call(mailbox, task, **CALL)
    for retries in (1, 2):
        assert mailbox.deliver(message).state == "RETRY"
        assert held_names() == []
        message = mailbox.take_one()
        assert message.headers["retries"] == retries
        ours = {"task": NAME, "key": "feed-42", "options": CALL, "format": FORMAT}
        assert message.ours == ours
    with held_by(LOCK, "other"):
        state, error = mailbox.deliver(message)
    assert (state, type(error)) == ("FAILURE", AlreadyRunning)
    state, ((name, remaining),) = mailbox.deliver(message)
    assert (state, name) == ("SUCCESS", LOCK)
    assert 90 < remaining <= 100
