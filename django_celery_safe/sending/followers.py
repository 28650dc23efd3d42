"""
What follows a carried run: the next link of a chain, callbacks, and the body of a chord.

If all of it is carried in the run's own database, its rows are written in the transaction that
ends the row of the run: a process that dies leaves both undone, or both done. Otherwise Celery
sends it before the row ends, and once more if the process dies in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import group
from celery.app.task import Context
from celery.canvas import maybe_signature
from django.db import DEFAULT_DB_ALIAS
from django.db import Error as DatabaseError

from ..texts import describe_error, get_logger
from .outbox import UNTIL_DONE, is_ours, iter_leaves, task_wants_outbox

logger = get_logger(__name__)


def carried_followers(task: Any, request: Context, alias: str) -> bool:
    """Return whether a run has followers, none of a chord, that are all carried in ``alias``."""
    followers: list[Any] = [*(request.callbacks or ()), *(request.chain or ())[-1:]]
    if not followers or request.chord:
        return False
    return all(
        _is_carried(task.app, maybe_signature(one, app=task.app), alias) for one in followers
    )


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
    if body is None or not _is_carried(task.app, body, alias):
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


def _is_carried(app: Any, signature: Any, alias: str) -> bool:
    return all(_leaf_is_carried(leaf, alias) for leaf in iter_leaves(app, signature))


def _leaf_is_carried(leaf: Any, alias: str) -> bool:
    if not is_ours(leaf.app, leaf.task):
        return False
    wanted = leaf.options.get("outbox")
    wanted = task_wants_outbox(leaf.app.tasks[leaf.task]) if wanted is None else wanted
    return bool(wanted == UNTIL_DONE and leaf.options.get("using", DEFAULT_DB_ALIAS) == alias)
