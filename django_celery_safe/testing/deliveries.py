"""Messages that are run in this process as a worker runs them."""

from __future__ import annotations

import copy
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple
from unittest import mock

from celery import Celery, current_app
from celery.app.trace import build_tracer
from celery.states import REVOKED, SUCCESS
from celery.worker.request import Request
from django.db import DEFAULT_DB_ALIAS
from kombu.message import Message as Delivered
from kombu.serialization import prepare_accept_content

from ..delivery.call import load_tasks
from ..exceptions import WrongTransaction
from ..sending import outbox
from ..sending.capture import Message, capture
from ..sending.deduplicate import publish_once
from ..sending.serialization import to_message
from ..transactions import aliases_in_atomic
from .commits import on_commit_now
from .messages import Sent, as_sent, check_task, free_locks_of, kept_from_broker, shown


class Delivery(NamedTuple):
    """
    What came of one message that was run as a worker runs it.

    Attributes:
        task: Name of the task.
        task_id: Its id.
        state: Celery's: SUCCESS, FAILURE, RETRY, IGNORED, REJECTED; REVOKED: the message's
            ``expires`` was past, so it was not run.
        result: What the task returned; None unless it succeeded.
        error: What it raised; None if it succeeded. With RETRY, Celery's ``Retry``.
        sent: What the run sent, in order: other tasks, the next link of its chain, and with
            RETRY its own message again. None of that was run.
    """

    task: str
    task_id: str
    state: str
    result: Any
    error: BaseException | None
    sent: list[Sent]


def deliver_twice(task: Any, /, *args: Any, **kwargs: Any) -> tuple[Delivery, Delivery]:
    """
    Run one message of a task twice, as workers do when the broker delivers it again.

    The message is made as ``.delay(*args, **kwargs)`` makes it, and run in this process by Celery's
    own tracer, so that what stands around the task's function does its part: the second
    time with the same id, and ``delivery_info["redelivered"]`` True. What waits for a commit runs
    as in :func:`on_commit_now`. Time limits are not kept.

    A task that is retried is not run again: its delivery has the state RETRY, and the message
    that comes back is in its ``sent``. An exception of the task is no exception here: it is
    the ``error`` of its delivery.

    Returns:
        What came of the first delivery, and of the second.

    Raises:
        WrongTransaction: Inside ``atomic()``, where no worker runs a task.
        AssertionError: The send was a duplicate (``unique_until``), so there is no message.
    """
    check_task(task, "deliver_twice")
    refuse_transaction("deliver_twice")
    app = task.app
    with kept_from_broker(app) as sent, on_commit_now():
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
    Run what is in the outbox, in this process, as a worker would, until nothing is left.

    In the order in which it was written, and whatever its ``eta``; what its tasks put into the
    outbox follows. Rows of the test's own transaction count, dead ones don't. What the
    tasks send past the outbox is in ``sent`` of their deliveries, and is not run.

    Args:
        using: Alias of the database with the outbox.
        limit: How many messages may be run.

    Returns:
        What came of each message, in order. A task's exception is the ``error`` of its delivery.

    Raises:
        AssertionError: There are more, since tasks send themselves again, most likely.
        WrongTransaction: Inside ``atomic()``, where no worker runs a task.
    """
    refuse_transaction("drain_outbox")
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
                free_locks_of([message])
    return deliveries


def take(rows: Any) -> tuple[Celery, Sent] | None:
    """Take the oldest message out of the outbox, as a relay would; None: nothing is left."""
    while (row := rows.pending().order_by("pk").first()) is not None:
        message, chord_calls = to_message(row)
        for call in chord_calls:
            call.register()
        published = _publish(message)
        wait = outbox.seconds_until_eta(message) if row.attempt else None
        outbox.settle_rows(rows, {row.pk: wait})
        if published is not None:
            return message.app, published
    return None


def rows_of(using: str) -> Any:
    from ..models.outbox import OutboxMessage  # needs the app registry

    return OutboxMessage.objects.using(using)


def _publish(message: Message) -> Sent | None:
    """Do what a publication does for a message that only is to be run here; None: a duplicate."""
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
    """Run a message as a worker's process does; ``sent`` is where what it sends is kept."""
    if message.task not in app.tasks:
        load_tasks(app)
    task: Any = app.tasks[message.task]
    properties = message.properties
    received = Delivered(
        body=message.data,
        content_type=message.content_type,
        content_encoding=message.content_encoding,
        # Copied: what a run changes in its request is not in the message.
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
    before = len(sent)
    traced = build_tracer(task.name, task, app=app, hostname=host)(
        message.task_id, args, kwargs, about
    )
    outcome: tuple[str, Any, Any] = SUCCESS, traced.retval, None
    if traced.info is not None:
        outcome = traced.info.state, None, traced.info.retval
    return Delivery(task.name, message.task_id, *outcome, sent[before:])


#: Of a message's properties, what a request has.
_PROPERTIES: Final = ("correlation_id", "reply_to", "priority")


@contextmanager
def relaying(app: Celery) -> Iterator[list[Sent]]:
    """Keep what is sent: in the outbox what goes through it, the rest in what is yielded."""
    nobody_sends = mock.patch.object(outbox.OutboxBatch, "begin", return_value=False)
    with kept_from_broker(app) as sent, on_commit_now(), nobody_sends:
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
