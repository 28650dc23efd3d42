"""Publishing a message if the same is not on its way already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..concurrency.sent import find_lock_of
from ..delivery.header import HEADER, read_header
from ..events import TASK_DUPLICATE, TASK_DUPLICATE_PUBLISHED
from ..leases.holder import describe_arguments
from ..locks import HeldLock


def publish_once(
    headers: dict[str, Any], publish: Callable[[], object], *, again: bool = False
) -> HeldLock | None:
    """
    Publish a message, and take the lock that keeps the same from being sent again.

    If that is held, the message is a duplicate. One for which a canvas waits is
    published all the same, and its run does nothing; any other is dropped.

    Args:
        headers: The message's own, which may be changed.
        publish: Publishes it, with these headers.
        again: Whether this very message may have been published before.

    Returns:
        None if it was published; else the lock of the message that was sent before.

    Raises:
        LockBackendError: The lock's store did not answer; nothing was published.
        kombu.exceptions.OperationalError: The broker can't be reached; the lock
            was given back.
    """
    task = headers.get("task")
    header = read_header(headers, task)
    sent = find_lock_of(task, header)
    seconds = 0.0 if sent is None else sent.lease(headers.get("eta"), headers.get("expires"))
    if task is None or sent is None or not seconds:
        publish()
        return None
    arguments = describe_arguments(headers.get("argsrepr"), headers.get("kwargsrepr"))
    held = sent.claim(task, headers["id"], seconds, arguments)
    if held is None:
        try:
            publish()
        except BaseException:
            sent.move(0)
            raise
        return None
    first = held.holder.task_id
    if first == headers["id"] and (again or header.get("canvas")):
        # The very message again: one that replaces its own run, or the next link of a chain
        # whose task was delivered twice. It goes on with that lock, and if it can't be
        # published leaves it to the other.
        headers[HEADER] = {**header, "sent": held.token}
    elif first is not None:
        published = header.get("canvas", False)
        if published:
            headers[HEADER] = {**header, "duplicate": first}
            publish()
        _emit_duplicate(headers, held, published)
        return None if published else held
    # Nobody: it was freed a moment ago, and who takes it next sends the same once more.
    publish()
    return None


def is_claiming(headers: dict[str, Any]) -> bool:
    """Return whether it shows only at its publication if a message is a duplicate."""
    return "sent" in read_header(headers, headers.get("task"))


def is_marked(headers: dict[str, Any]) -> bool:
    """Return whether a message is a duplicate that was published for its canvas."""
    found = headers.get(HEADER)
    return isinstance(found, dict) and "duplicate" in found


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
