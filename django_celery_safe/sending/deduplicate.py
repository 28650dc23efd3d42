"""
Sends with a lock: the fields of their headers, and those that are sent once.

A message is published unless the same message is already on its way: then it is a duplicate.
``concurrency`` says what the fields of the header mean.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from celery._state import get_current_task
from celery.result import EagerResult
from celery.signals import before_task_publish
from celery.states import PENDING
from celery.utils.time import maybe_make_aware
from kombu.utils.uuid import uuid

from .. import conf
from ..compat import dump_models
from ..concurrency.guard import as_asked, find_guarded
from ..concurrency.keys import call_key
from ..concurrency.options import DEFAULTS, Guarded, check_key_names, options_of_call
from ..concurrency.sent import SentLock, find_lock_of, find_sent, leave_period
from ..delivery.call import is_as_sent
from ..delivery.header import HEADER, Header, read_header
from ..events import TASK_DUPLICATE, TASK_DUPLICATE_PUBLISHED
from ..locks import HeldLock
from .capture import CAPTURED
from .outbox import find_headers
from .typed import SentResult, as_sent_result

T = TypeVar("T")

#: Options with signatures that travel in the task's message.
SIGNATURES: Final = ("link", "link_error", "chain", "chord")

#: Options that only parts of a canvas have; other tasks wait for such a part.
_CANVAS = (*SIGNATURES, "group_id", "parent_id", "root_id")

#: Longest text of a call's arguments that is worth making: a lock keeps the first 200 characters.
LONGEST_SHOWN: Final = 400

#: How many arguments are shown without Celery's help, and the longest text and largest number.
MOST_PLAIN, LONGEST_PLAIN, LARGEST_PLAIN = 8, 64, 2**63

#: Options that replace the texts of the arguments.
_SHOWN = ("argsrepr", "kwargsrepr")


class Call(NamedTuple):
    """What is sent: a task with arguments, and the options of ``apply_async``."""

    task: Any
    args: Any
    kwargs: Any
    options: dict[str, Any]


def lock_fields(
    call: Call, guarded: Guarded | None, asked: Any, carried: Header, is_resent: bool
) -> Header:
    """Return the header fields for a message's locks."""
    task, args, kwargs, options = call
    guarded = guarded or Guarded(task.run, DEFAULTS, False)
    if asked is not None:
        guarded = guarded._replace(options=options_of_call(guarded.options, asked))
        check_key_names(guarded.function, guarded.options.key, plain=True)
    own = guarded.options
    key = carried.get("key")
    is_same = asked == carried.get("options") and kwargs is not None
    if key is None or not is_same or not is_as_sent(task.request, args or (), kwargs):
        key = _key(call, guarded)
    header = Header(task=task.name, key=key)
    if not isinstance(own.lock, conf.Unset):
        header["lock"] = own.lock
    if asked is not None:
        header["options"] = dict(asked)
    if carried or options.get("retries"):
        # A retry takes no new lock, which could be held by another message. With the same
        # key it keeps the old lock.
        if (carried.get("lock"), carried.get("key")) == (header.get("lock"), key):
            old = {name: carried[name] for name in carried if name != "copy"}
            header = {**old, **header}
    elif own.unique_until is not None:
        header["sent"] = os.urandom(16).hex()
        if is_resent or any(map(options.get, _CANVAS)):
            header["canvas"] = True
        if isinstance(own.unique_until, float):
            header["period"] = own.unique_until
        elif own.unique_until == "start":
            header["start"] = True
    return header


def _key(call: Call, guarded: Guarded) -> str:
    """Return the key of a call that is sent."""
    task, args, kwargs, options = call
    serializer = options.get("serializer") or task.serializer
    # The attribute exists since Celery 5.7, and is None for most tasks.
    has_models = getattr(task, "_dump_pydantic_arguments", True) is not None
    if has_models and serializer != "pickle":
        args, kwargs = dump_models(task, args, kwargs)
    args, kwargs = tuple(args or ()), kwargs or {}
    return call_key(task.name, guarded, args, kwargs, serializer=serializer, is_send=True)


def send_once(
    call: Call, send: Callable[[Call], SentResult[T]], *, again: bool = False
) -> SentResult[T]:
    """
    Send the task now, or run it eagerly, unless it is a duplicate.

    Args:
        send: Sends the call that it gets; if that waits for a commit, only the commit finds out
            whether it is a duplicate.
        again: Whether the running task re-sends its own message.
    """
    task, args, kwargs, options = call
    if not before_task_publish.receivers:  # one may redact what the message shows
        # The lock shows it too, and Celery would make the same texts in more than its time.
        options = {**_show_plain(args or (), kwargs), **options}
        call = call._replace(options=options)
    if CAPTURED.get() is not None:  # the commit finds out
        result = send(call)
        result.is_duplicate = None
        return result
    headers = _headers_to_be(call)
    sent: list[SentResult[T]] = []

    def publish() -> None:
        given = {**(options.get("headers") or {}), HEADER: headers[HEADER]}
        changed = {"task_id": headers["id"], "headers": given}
        sent.append(send(call._replace(options={**options, **changed})))

    runs = partial(getattr, task.app.conf, "task_always_eager")
    held = publish_once(headers, headers[HEADER], publish, again=again, runs=runs)
    result = sent[0] if sent else _make_result(task, headers["id"], options)
    settle(result, headers, held)
    if again:
        # A message that replaces its own run takes over that run's lock.
        pass_on(read_header(headers, task.name).get("sent"), options)
    return result


def pass_on(token: str | None, options: dict[str, Any]) -> SentLock | None:
    """Pass the lock of the running task's message to its re-send, if the token matches."""
    running = get_current_task()
    sent = None if running is None else find_sent(running.request)
    if sent is None or sent.token != token:
        return None
    delay = options.get("countdown") or options.get("eta")  # as Celery does
    sent.pass_on(sent.lease(delay, options.get("expires")))
    return sent


def _make_result(task: Any, task_id: str, options: dict[str, Any]) -> Any:
    """Return the result of a send that published nothing, as Celery makes one."""
    if task.app.conf.task_always_eager:
        return as_sent_result(EagerResult(task_id, None, PENDING))
    result = as_sent_result(task.AsyncResult(task_id))
    result.ignored = options.get("ignore_result", task.ignore_result)
    return result


def _headers_to_be(call: Call) -> dict[str, Any]:
    """Return those headers of a message to be built that the lock of its send needs."""
    task, args, kwargs, options = call
    delay = options.get("countdown") or options.get("eta")  # as Celery does
    moments = {"eta": delay, "expires": options.get("expires", task.expires)}
    for name, moment in moments.items():
        if isinstance(moment, datetime):
            moments[name] = maybe_make_aware(moment, task.app.timezone)
    headers = {"task": task.name, "id": options.get("task_id") or uuid()}
    headers[HEADER] = options["headers"][HEADER]
    given = {name: options[name] for name in _SHOWN if options.get(name)}
    # A receiver may redact what the message shows.
    if len(given) < len(_SHOWN) and not before_task_publish.receivers:
        given = _show(args or (), kwargs or {}) | given
    return headers | moments | given


def _show_plain(args: Any, kwargs: Any) -> dict[str, str]:
    """Return what Celery shows of a few numbers or words, in a tenth of its time; {}: of others."""
    is_short = type(args) is tuple and len(args) <= MOST_PLAIN and not kwargs
    if not is_short or not all(map(_is_short, args)):
        return {}
    return {"argsrepr": repr(args), "kwargsrepr": "{}"}


def _is_short(value: Any) -> bool:
    if type(value) is int:
        return -LARGEST_PLAIN < value < LARGEST_PLAIN
    return type(value) is str and len(value) <= LONGEST_PLAIN and value.isalnum()


def _show(args: Any, kwargs: Any) -> dict[str, str]:
    """Return the headers of a message that show its arguments."""
    from celery.utils.saferepr import saferepr  # not imported with Celery

    values = {"argsrepr": args, "kwargsrepr": kwargs}
    return {name: saferepr(value, LONGEST_SHOWN) for name, value in values.items()}


def run_with_lock(task: Any, header: Header, run: Callable[[], T]) -> T:
    """Run a task in this process, with the lock of its send if that has taken it."""
    sent = find_lock_of(task.name, header)
    if sent is None:
        return run()
    own = as_asked(find_guarded(task) or Guarded(task.run, DEFAULTS, False), header).options
    if own.unique_until == "start":
        sent.move(0)
    try:
        return run()
    finally:
        sent.end_run(task, None)


def publish_once(
    headers: dict[str, Any],
    header: Header,
    publish: Callable[[], object],
    *,
    again: bool = False,
    runs: Callable[[], bool] = lambda: False,
) -> HeldLock | None:
    """
    Publish a message, and take the lock that keeps the same message from being sent again.

    If the lock is held, the message is a duplicate. If a canvas waits for a duplicate,
    it is published anyway, and its run does nothing; any other duplicate is dropped.

    Args:
        headers: The headers of the message, which may be changed.
        header: Our header among them.
        publish: Publishes the message, with these headers.
        again: Whether this very message may have been published before.
        runs: Returns whether ``publish`` runs the task, so that its error may be the task's.

    Returns:
        None if the message was published; otherwise the lock of the message sent before.

    Raises:
        LockBackendError: The lock's store did not answer; nothing was published.
        kombu.exceptions.OperationalError: The broker can't be reached; the lock
            was released.
    """
    task = headers.get("task")
    sent = find_lock_of(task, header)
    if sent is None:
        publish()
        return None
    held = sent.claim(headers)
    if sent.period is not None:
        leave_period(headers)
    if held is None:
        try:
            publish()
        except BaseException:
            headers[HEADER] = header
            if sent.period is None or not runs():
                sent.move(0)
            raise
        return None
    first = held.holder.task_id
    if first == headers["id"] and (again or header.get("canvas")):
        # The same message again: it replaces its own run, or it is the next link of a chain
        # whose task was delivered twice. It shares the lock with the other copy, so the lock
        # is not released if publishing fails.
        if sent.period is None:
            headers[HEADER] = {**header, "sent": held.token}
    elif first is not None:
        published = header.get("canvas", False)
        if published:
            headers[HEADER] = {**header, "duplicate": first}
            publish()
        name = held.name.removeprefix("sent:")
        event = TASK_DUPLICATE_PUBLISHED if published else TASK_DUPLICATE
        facts = {"task": task, "task_id": headers["id"], "sent_id": first, "published": published}
        event.emit(publish_once, name=name, **facts)
        return None if published else held
    # The lock has no holder: it was freed a moment ago. Another sender may take it and send the
    # same message once more.
    publish()
    return None


def free_locks(messages: Iterable[tuple[str, str]]) -> None:
    """Free the locks of messages that are discarded, by their tasks and properties."""
    for task, properties in messages:
        sent = find_lock_of(task, read_header(find_headers(properties), task))
        if sent is not None and sent.period is None and not sent.move(0):
            return  # the store does not answer, and would be waited for again


def settle(result: Any, headers: dict[str, Any], held: HeldLock | None) -> None:
    """Record on the result of a send whether its message was published or was a duplicate."""
    ours = headers.get(HEADER)
    is_marked = isinstance(ours, dict) and "duplicate" in ours  # it was published for its canvas
    result.is_duplicate = held is not None or is_marked
    if held is not None and held.holder.task_id is not None:
        result.id = held.holder.task_id
