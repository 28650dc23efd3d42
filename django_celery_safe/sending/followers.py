"""
What follows a carried run: the next link of a chain, callbacks, and the body of a chord.

If all of it is carried in the run's own database, its rows are written in the transaction that
ends the row of the run: a process that dies leaves both undone, or both done. Otherwise Celery
sends it before the row ends, and once more if the process dies in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from celery import group
from celery.app.task import Context
from celery.canvas import Signature, maybe_signature
from django.db import DEFAULT_DB_ALIAS
from django.db import Error as DatabaseError

from ..foreign_errors import describe_error
from ..texts import get_logger
from .outbox import UNTIL_DONE, task_wants_outbox

logger = get_logger(__name__)


def carried_followers(task: Any, request: Context, alias: str) -> bool:
    """Return whether a run has followers, none of a chord, that are all carried in ``alias``."""
    followers: list[Any] = [*(request.callbacks or ()), *(request.chain or ())[-1:]]
    if not followers or request.chord:
        return False
    return all(_is_carried(maybe_signature(one, app=task.app), alias) for one in followers)


def send_followers(task: Any, request: Context, result: Any) -> None:
    """Send the callbacks and the next link, as Celery's tracer does, which then finds none."""
    app, info = task.app, request.delivery_info or {}
    followers: Any = request
    options = {
        "parent_id": request.id,
        "root_id": request.root_id or request.id,
        "priority": info.get("priority") if app.conf.task_inherit_parent_priority else None,
    }
    callbacks: list[Any] = [maybe_signature(one, app=app) for one in followers.callbacks or ()]
    if len(callbacks) > 1:
        groups = [one for one in callbacks if isinstance(one, group)]
        others = [one for one in callbacks if one not in groups]
        callbacks = [*groups, *([group(others, app=app)] if others else [])]
    for callback in callbacks:
        callback.apply_async((result,), **options)
    if followers.chain:
        link: Any = maybe_signature(followers.chain[-1], app=app)
        link.apply_async((result,), chain=followers.chain[:-1], **options)


def end_with_body(
    task: Any, request: Context, alias: str, end: Callable[[Callable[[], Any]], bool]
) -> None:
    """
    Let the row of a chord's part end with the send of the chord's body, if this run sends it.

    Args:
        end: Ends the row in one transaction with what the function sends that it is given;
            returns whether it did.
    """
    chord: Any = request.chord
    body: Any = maybe_signature(chord, app=task.app)
    if body is None or not _is_carried(body, alias):
        return
    send = body.delay

    def delay(*results: Any) -> Any:
        sent: list[Any] = []
        try:
            if end(lambda: sent.append(send(*results))) and sent:
                return sent[-1]
        except DatabaseError as error:
            # Celery would fail the chord.
            logger.warning("The row of %s can't be ended: %s", task.name, describe_error(error))
        return send(*results)  # if it was sent before, that was rolled back

    body.delay = delay
    request.chord = body


def _is_carried(signature: Any, alias: str) -> bool:
    return all(_leaf_is_carried(leaf, alias) for leaf in _leaves(signature))


def _leaf_is_carried(leaf: Any, alias: str) -> bool:
    outbox = leaf.options.get("outbox")
    task = leaf.app.tasks.get(leaf.task)
    if not getattr(task, "_ends_rows", False):
        return False
    wants = task_wants_outbox(task) if outbox is None else outbox
    return bool(wants == UNTIL_DONE and leaf.options.get("using", DEFAULT_DB_ALIAS) == alias)


def _leaves(signature: Any) -> Iterator[Signature[Any]]:
    """Return the tasks of which a signature sends some now, and others later."""
    parts = [*(getattr(signature, "tasks", None) or ())]
    if signature.get("subtask_type") == "chord":
        parts.append(signature.body)
    if not parts:
        yield signature
    for part in parts:
        yield from _leaves(maybe_signature(part, app=signature.app))
