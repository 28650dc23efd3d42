"""Running messages in this process as a worker runs them."""

from __future__ import annotations

import copy
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from celery import Celery, Task, current_app
from celery.app.trace import build_tracer
from celery.states import REVOKED, SUCCESS
from celery.worker.request import Request
from django.db import DEFAULT_DB_ALIAS
from kombu.message import Message as Delivered
from kombu.serialization import prepare_accept_content

from ..delivery.call import load_tasks
from ..exceptions import WrongTransaction
from ..sending.capture import Message, capture
from ..sending.deduplicate import publish_once
from ..sending.departure import rows_of
from ..sending.outbox import CarriedAttempt
from ..sending.serialization import to_message
from ..transactions import aliases_in_atomic, in_testcase_only
from .commits import commits_now, on_commit_now
from .messages import (
    Sent,
    as_sent,
    check_task,
    free_locks_of,
    free_own_lock,
    is_outbox_held,
    kept_from_broker,
    shown,
)


class Delivery(NamedTuple):
    """
    The outcome of one message that was run as a worker runs it.

    Attributes:
        task: Name of the task.
        task_id: Its id.
        state: Celery's state: SUCCESS, FAILURE, RETRY, IGNORED, REJECTED; REVOKED: the message
            had expired, so it was not run.
        result: The result of the task; None: the task did not succeed.
        error: The exception that the task raised, with RETRY Celery's ``Retry``; None: the task
            succeeded.
        sent: The messages that the run sent, in order: other tasks, the next link of its chain,
            and with RETRY its own message again. They were not run.
    """

    task: str
    task_id: str
    state: str
    result: Any
    error: BaseException | None
    sent: list[Sent]


def deliver_twice(task: Any, /, *args: Any, **kwargs: Any) -> tuple[Delivery, Delivery]:
    """
    Run one message of a task twice, as workers do when the broker redelivers it.

    The message is made as ``.delay(*args, **kwargs)`` makes it. Celery's own tracer runs it in
    this process, so everything that wraps the task's function runs too. The second run has the
    same id, and ``delivery_info["redelivered"]`` is True. ``on_commit`` callbacks run as in
    :func:`on_commit_now`. Time limits are not enforced.

    A retried task is not run again: its delivery has the state RETRY, and the message of the
    retry is in its ``sent``. An exception in the task is not raised here: it is the ``error``
    of its delivery.

    Returns:
        The outcomes of the first and the second delivery.

    Raises:
        WrongTransaction: It was called inside ``atomic()``, where no worker runs a task.
        AssertionError: The send was a duplicate (``unique_until``), so there is no message.
    """
    check_task(task, "deliver_twice")
    refuse_transaction("deliver_twice")
    app = task.app
    with kept_from_broker(app) as sent, commits_now():
        with capture(app) as captured:
            task.apply_async(args, kwargs)
        message = _publish(captured.messages[0])
        if message is None:
            raise AssertionError(
                f"{shown(task.name, args, kwargs)} was sent before, and is a duplicate until that "
                f"one is done: nothing is sent, so nothing can be delivered."
            )
        try:
            first = deliver(app, message, sent)
            return first, deliver(app, message, sent, redelivered=True)
        finally:
            free_locks_of([message])


def drain_outbox(using: str = DEFAULT_DB_ALIAS, *, limit: int = 1000) -> list[Delivery]:
    """
    Run the messages in the outbox, in this process, as a worker would, until none is left.

    The messages run in the order in which they were written, even before their ``eta``,
    followed by the messages that their tasks add to the outbox. Uncommitted rows of the test's
    own transaction are run too; dead messages are not. Messages that the tasks send without the
    outbox are in ``sent`` of their deliveries, and are not run.

    Where the test commits, as in a ``TransactionTestCase``, the code that sends and this call
    belong inside of :func:`on_commit_now`, which keeps the messages in the outbox. The pytest
    fixture of this name does that by itself.

    Args:
        using: Alias of the database with the outbox.
        limit: How many messages may be run at most.

    Returns:
        The outcome of each message, in order. A task's exception is the ``error`` of its delivery.

    Raises:
        AssertionError: The outbox has more messages, most likely because a task re-sends itself.
            Or the test commits outside of :func:`on_commit_now`, so that a broker may have the
            messages.
        WrongTransaction: It was called inside ``atomic()``, where no worker runs a task.
    """
    refuse_transaction("drain_outbox")
    if not (is_outbox_held() or in_testcase_only(using)):
        raise AssertionError(
            f"drain_outbox() can't know what was sent: this test commits on {using!r}, and each "
            f"commit gives its messages to a broker, if one answers. Put `with on_commit_now():` "
            f"around the code that sends and around drain_outbox(), or use the pytest fixture."
        )
    deliveries: list[Delivery] = []
    with relaying(get_app()) as sent:
        while (found := take(rows_of(using))) is not None:
            if len(deliveries) == limit:
                raise AssertionError(
                    f"The outbox of {using!r} is not empty after {limit} messages; the next is "
                    f"{found[1]}. Does a task send itself again? Else raise the limit."
                )
            app, message = found
            try:
                deliveries.append(deliver(app, message, sent))
            finally:
                free_own_lock(message)
    return deliveries


def take(rows: Any) -> tuple[Celery, Sent] | None:
    """Take the oldest message out of the outbox, as a relay would; None: the outbox is empty."""
    while (row := rows.pending().order_by("pk").first()) is not None:
        message, chord_calls = to_message(row)
        for call in chord_calls:
            call.register()
        published = _publish(message)
        rows.record_sent({row.pk: CarriedAttempt.of(message, row.starts)})
        if published is not None:
            return message.app, published
    return None


def _publish(message: Message) -> Sent | None:
    """Return a message as it would be published, to be run here; None: it is a duplicate."""
    headers = message.options["headers"]
    if publish_once(headers, lambda: None, again=True) is not None:
        return None
    return as_sent(
        message.data,
        content_type=message.content_type,
        content_encoding=message.content_encoding,
        **message.options,
    )


def deliver(app: Celery, message: Sent, sent: list[Sent], *, redelivered: bool = False) -> Delivery:
    """Run a message as a worker process does; ``sent`` is the list that its sends end up in."""
    if message.task not in app.tasks:
        load_tasks(app)
    task: Any = app.tasks[message.task]
    properties = message.properties
    received = Delivered(
        body=message.data,
        content_type=message.content_type,
        content_encoding=message.content_encoding,
        # A copy, so a run that changes its request does not change the message.
        headers=copy.deepcopy(dict(message.headers)),
        properties={name: properties.get(name) for name in _PROPERTIES},
        delivery_info={
            "exchange": getattr(properties["exchange"], "name", properties["exchange"]),
            "routing_key": properties["routing_key"],
            "redelivered": redelivered,
        },
        accept=prepare_accept_content(app.conf.accept_content),
    )
    host = f"testing@{socket.gethostname()}"
    request = Request(received, app=app, task=task, hostname=host)
    if request.revoked():
        return Delivery(task.name, message.task_id, REVOKED, None, None, [])
    args, kwargs, embed = received.payload
    about = {**request.request_dict, "is_eager": False, **(embed or {})}
    before, trace = len(sent), build_tracer(task.name, task, app=app, hostname=host)
    with _calls_of_worker():
        traced = trace(message.task_id, args, kwargs, about)
    outcome: tuple[str, Any, Any] = SUCCESS, traced.retval, None
    if traced.info is not None:
        outcome = traced.info.state, None, traced.info.retval
    return Delivery(task.name, message.task_id, *outcome, sent[before:])


@contextmanager
def _calls_of_worker() -> Iterator[None]:
    """
    Let ``super().__call__()`` of a project's task class run its message, as in a worker.

    Elsewhere Celery takes it for a direct call of the task, with an empty request.
    """
    call: Any = Task.__call__

    def protected(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = self.request_stack.top
        if request is None or request._protected or request.called_directly:
            return call(self, *args, **kwargs)
        request._protected = 1
        return self.run(*args, **kwargs)

    Task.__call__ = protected  # type: ignore[method-assign]
    try:
        yield
    finally:
        Task.__call__ = call  # type: ignore[method-assign]


#: The properties of a message that Celery's request reads.
_PROPERTIES: Final = ("correlation_id", "reply_to", "priority")


@contextmanager
def relaying(app: Celery) -> Iterator[list[Sent]]:
    """Leave outbox messages in the outbox, and keep all other messages in the yielded list."""
    with kept_from_broker(app) as sent, on_commit_now():
        yield sent


def refuse_transaction(name: str) -> None:
    aliases = aliases_in_atomic()
    if aliases:
        raise WrongTransaction(
            f"{name}() is called inside atomic() of {aliases[0]!r}. A worker runs a task when what "
            f"sent it was committed, outside of every transaction: call it after the block."
        )


def get_app() -> Celery:
    app: Celery = current_app._get_current_object()  # type: ignore[attr-defined]
    return app
