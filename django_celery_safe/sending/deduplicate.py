"""Publishing a message unless the same message is already on its way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery._state import get_current_task

from ..concurrency.sent import SentLock, find_lock_of, find_sent, leave_period
from ..delivery.header import HEADER, Header, read_header
from ..events import TASK_DUPLICATE, TASK_DUPLICATE_PUBLISHED
from ..leases.holder import describe_arguments
from ..locks import HeldLock
from .unsent import as_sent_result


def publish_once(
    headers: dict[str, Any],
    publish: Callable[[], object],
    *,
    again: bool = False,
    header: Header | None = None,
) -> HeldLock | None:
    """
    Publish a message, and take the lock that keeps the same message from being sent again.

    If the lock is held, the message is a duplicate. If a canvas waits for a duplicate,
    it is published anyway, and its run does nothing; any other duplicate is dropped.

    Args:
        headers: The headers of the message, which may be changed.
        publish: Publishes the message, with these headers.
        again: Whether this very message may have been published before.
        header: Our header among them; None: read it.

    Returns:
        None if the message was published; otherwise the lock of the message sent before.

    Raises:
        LockBackendError: The lock's store did not answer; nothing was published.
        kombu.exceptions.OperationalError: The broker can't be reached; the lock
            was released.
    """
    task = headers.get("task")
    header = read_header(headers, task) if header is None else header
    sent = find_lock_of(task, header)
    seconds = 0.0 if sent is None else sent.lease(headers.get("eta"), headers.get("expires"))
    if task is None or sent is None or not seconds:
        publish()
        return None
    arguments = describe_arguments(headers.get("argsrepr"), headers.get("kwargsrepr"))
    held = sent.claim(task, headers["id"], seconds, arguments)
    if sent.is_period:
        leave_period(headers)
    if held is None:
        try:
            publish()
        except BaseException:
            headers[HEADER] = header
            sent.move(0)
            raise
        return None
    first = held.holder.task_id
    if first == headers["id"] and (again or header.get("canvas")):
        # The same message again: it replaces its own run, or it is the next link of a chain
        # whose task was delivered twice. It shares the lock with the other copy, so the lock
        # is not released if publishing fails.
        if not sent.is_period:
            headers[HEADER] = {**header, "sent": held.token}
    elif first is not None:
        published = header.get("canvas", False)
        if published:
            headers[HEADER] = {**header, "duplicate": first}
            publish()
        _emit_duplicate(headers, held, published)
        return None if published else held
    # The lock has no holder: it was freed a moment ago. Another sender may take it and send the
    # same message once more.
    publish()
    return None


def pass_on(token: str | None, options: dict[str, Any]) -> SentLock | None:
    """Pass the lock of the running task's message to its re-send, if the token matches."""
    running = get_current_task()
    sent = None if running is None else find_sent(running.request)
    if sent is None or sent.token != token:
        return None
    delay = options.get("countdown") or options.get("eta")  # as Celery does
    sent.pass_on(sent.lease(delay, options.get("expires")))
    return sent


def make_result(task: Any, task_id: str, options: dict[str, Any]) -> Any:
    """Return the result of a send that published nothing, as Celery makes one."""
    result = as_sent_result(task.AsyncResult(task_id))
    ignores = options.get("ignore_result")
    result.ignored = task.ignore_result if ignores is None else ignores
    parent = get_current_task()
    if parent is not None and options.get("add_to_parent", True):
        parent.add_trail(result)
    return result


def _emit_duplicate(headers: dict[str, Any], held: HeldLock, published: bool) -> None:
    name = held.name.removeprefix("sent:")
    event = TASK_DUPLICATE_PUBLISHED if published else TASK_DUPLICATE
    event.emit(
        publish_once,
        name=name,
        task=headers["task"],
        task_id=headers["id"],
        sent_id=held.holder.task_id,
        published=published,
    )
