"""Running messages in this process as a worker runs them."""

from __future__ import annotations

import copy
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple
from unittest import mock

from celery import Celery, current_app
from celery.app import trace
from celery.states import REVOKED, SUCCESS
from celery.worker.request import Request
from django.db import DEFAULT_DB_ALIAS
from kombu.message import Message as Delivered
from kombu.serialization import prepare_accept_content

from ..delivery.call import load_tasks
from ..delivery.header import read_header
from ..exceptions import WrongTransaction
from ..resuming.checkpoints import Cursor
from ..sending.deduplicate import publish_once
from ..sending.outbox import Next, message_table, resend_delay, to_message
from ..transactions import aliases_in_atomic
from .messages import Sent, as_sent, check_task, committing, kept_from_broker


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
        sent: The messages that the run sent, in order, with RETRY its own again. They were not run.
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

    The message is made as ``.delay(*args, **kwargs)`` makes it, and Celery's own tracer runs it in
    this process. The second run has the same id, and ``delivery_info["redelivered"]`` is True. In
    a TestCase, which never commits, the ``on_commit`` callbacks of a run are called when it has
    ended. Time limits are not enforced, a retried task is not run again, and an exception in the
    task is not raised, but the ``error`` of its delivery.

    Returns:
        The outcomes of the first and the second delivery.

    Raises:
        WrongTransaction: It was called inside ``atomic()``, where no worker runs a task.
        AssertionError: The send was a duplicate (``unique_until``), so there is no message.
    """
    with _taking(task, "deliver_twice", args, kwargs) as (message, sent):
        first = deliver(task.app, message, sent)
        return first, deliver(task.app, message, sent, redelivered=True)


@contextmanager
def _taking(task: Any, name: str, args: Any, kwargs: Any) -> Iterator[tuple[Sent, list[Sent]]]:
    """Send a task; yield its message, and the list in which all sends of the block end up."""
    check_task(task, name)
    refuse_transaction(name)
    with kept_from_broker(task.app) as sent:
        with committing():
            task.apply_async(args, kwargs)
        message = next((one for one in sent if one.task == task.name), None)
        if message is None:
            raise AssertionError(
                f"{task.name} was sent before with these arguments, and is a duplicate until that "
                f"message is done: nothing is sent, so nothing can be delivered. A test inside of "
                f"locks_in_memory() begins without the locks of others."
            )
        yield message, sent


def deliver_killed(task: Any, at: int, /, *args: Any, **kwargs: Any) -> Delivery:
    """
    Run one message of a task that dies at a checkpoint, and run it again as after a kill.

    The first run ends where it would commit its ``at``-th checkpoint: the end of a chunk of
    ``resumable()``, or a call of ``checkpoint()``.

    Returns:
        The outcome of the second run.

    Raises:
        AssertionError: The first run ended before that checkpoint.
        WrongTransaction: It was called inside ``atomic()``, where no worker runs a task.
    """
    with _taking(task, "deliver_killed", args, kwargs) as (message, sent):
        left, encode = iter(range(1, at)), Cursor.encode

        def die_at_last(cursor: Cursor) -> str:
            if next(left, None) is None:
                raise _Killed
            return encode(cursor)

        with suppress(_Killed), mock.patch.object(Cursor, "encode", die_at_last):
            first = deliver(task.app, message, sent)
            raise AssertionError(f"{task.name} ended before its checkpoint {at}: {first}")
        return deliver(task.app, message, sent, redelivered=True)


class _Killed(SystemExit):
    """The end of a process, which counts as a death."""


@contextmanager
def drain_outbox(using: str = DEFAULT_DB_ALIAS, *, limit: int = 1000) -> Iterator[list[Delivery]]:
    """
    Run the messages in the outbox at the end of the block, in this process, as a worker would.

    Inside the block no message is published, and no task runs eagerly. In a TestCase, which never
    commits, the block's ``on_commit`` callbacks are called at its end. Then the messages run in
    the order in which they were written, even before their ``eta``, followed by those that their
    tasks add to the outbox; dead messages are not run. Messages that tasks send without the outbox
    are in ``sent`` of their deliveries, and are not run.

    Args:
        using: Alias of the database with the outbox.
        limit: How many messages may be run at most.

    Returns:
        A list, which has the outcome of each message when the block has ended.

    Raises:
        AssertionError: The outbox has more messages, most likely because a task re-sends itself.
        WrongTransaction: It was called inside ``atomic()``, where no worker runs a task.
    """
    refuse_transaction("drain_outbox")
    deliveries: list[Delivery] = []
    with kept_from_broker(current_app, outbox_too=True) as sent:
        with committing():
            yield deliveries
        while (found := take(message_table(using).all())) is not None:
            if len(deliveries) == limit:
                raise AssertionError(
                    f"The outbox of {using!r} is not empty after {limit} messages; the next is "
                    f"{found[1]}. Does a task send itself again? Otherwise raise the limit."
                )
            deliveries.append(deliver(*found, sent))


def take(rows: Any) -> tuple[Celery, Sent] | None:
    """Take the oldest message out of the outbox, as a relay would; None: the outbox is empty."""
    while (row := rows.pending().order_by("pk").first()) is not None:
        message = to_message(row)
        headers = message.options["headers"]
        header = read_header(headers, message.task)
        duplicate = publish_once(headers, header, lambda: None, again=True)
        message_table(rows.db).record_sent(row.token, {row.pk: Next(resend_delay(message))})
        if duplicate is None:
            return message.app, as_sent(
                message.data,
                content_type=message.content_type,
                content_encoding=message.content_encoding,
                **message.options,
            )
    return None


def deliver(app: Celery, message: Sent, sent: list[Sent], *, redelivered: bool = False) -> Delivery:
    """Run a message as a worker process does; ``sent`` is the list that its sends end up in."""
    sent.append(message)  # so its lock is freed at the end, if the run does not do it
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
        properties=properties,
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
    before, run = len(sent), trace.build_tracer(task.name, task, app=app, hostname=host)
    # As in a worker, super().__call__() of a project's task class runs the message's request.
    trace._install_stack_protection()  # type: ignore[attr-defined]
    try:
        with committing():
            traced = run(message.task_id, args, kwargs, about)
    finally:
        trace.reset_worker_optimizations(app)
    outcome: tuple[str, Any, Any] = SUCCESS, traced.retval, None
    if traced.info is not None:
        outcome = traced.info.state, None, traced.info.retval
    return Delivery(task.name, message.task_id, *outcome, sent[before:])


def refuse_transaction(name: str) -> None:
    """
    Refuse a test's own ``atomic()``.

    Raises:
        WrongTransaction: There is one.
    """
    if aliases := aliases_in_atomic():
        raise WrongTransaction(
            f"{name}() is called inside atomic() of {aliases[0]!r}. A worker runs a task when what "
            f"sent it was committed, outside of every transaction: call it after the block."
        )
