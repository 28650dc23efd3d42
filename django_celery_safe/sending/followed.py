"""
The work that depends on a carried message: a step, or the tasks that Celery sends after it.

A step is recorded before its message ends: a process that dies in between leaves a message that
comes back, finds what is recorded, and only goes on from there.
"""

from __future__ import annotations

from traceback import format_exception
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from celery.canvas import signature
from django.db import DEFAULT_DB_ALIAS, DatabaseError

from ..delivery.call import find_higher
from ..delivery.header import Header
from ..events import MESSAGE_FAILED
from ..exceptions import find_soft_time_limit
from ..texts import describe_error, get_logger, text_of
from .outbox import UNTIL_DONE, is_ours, iter_leaves, leaf_wants_outbox

if TYPE_CHECKING:
    from ..stages.engine import StepFollower
    from .carried_run import Run

logger = get_logger(__name__)

#: The result None as JSON. An empty text would mean that the task is not finished.
NOTHING: Final = "null"


class Fault(NamedTuple):
    """An error as a row stores it: type, text, and traceback ("": none)."""

    type: str
    text: str
    traceback: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Fault:
        """Return the fault of an error, or of the soft time limit that it hides."""
        error = find_soft_time_limit(error) or error
        # Celery also makes errors to report an event; these were never raised.
        trace = "".join(format_exception(error)) if error.__traceback__ else ""
        return cls(type(error).__name__, text_of(error).strip(), trace)

    def __str__(self) -> str:
        return f"{self.type}: {self.text}".strip(": ")


#: The attempt of a message, and the token of the claim that must still hold it.
Held: TypeAlias = tuple[str, str]


def find_follower(header: Header) -> StepFollower | None:
    """Return what follows the message with this header; None: nothing of this package."""
    if "step" not in header:
        return None
    cls: type[StepFollower] = find_higher("stages.engine.StepFollower")
    return cls(header["step"], header.get("using", DEFAULT_DB_ALIAS))


def fail_message(
    follower: StepFollower | None, task_id: str, row: Any, token: str, fault: Fault
) -> bool:
    """
    Fail a message and what follows it, which then keeps the error instead of the message.

    Args:
        row: A queryset with the message.
        token: The claim that must still hold it.

    Returns:
        Whether the claim still held the message.
    """
    if follower is None:
        return bool(row.fail_task(token, *fault))
    return follower.fail(task_id, lambda: bool(row.claimed(token).erase()), fault)


def fail_unrun(header: Header, message: Any, row: Any, token: str, fault: Fault) -> bool:
    """
    Fail a message, and what follows it, without a run that could; see :func:`fail_message`.

    Args:
        message: The message, as it was found.
    """
    follower, task_id = find_follower(header), message.task_id
    ours = fail_message(follower, task_id, row, token, fault)
    if ours and follower is None:
        MESSAGE_FAILED.emit(fail_unrun, task=message.task, task_id=task_id, error=str(fault))
    return ours


def is_carried(app: Any, follower: Any, alias: str) -> bool:
    """Return whether all tasks of what follows are carried in a database."""
    return all(
        is_ours(app, str(leaf.task))
        and leaf_wants_outbox(app, leaf) == UNTIL_DONE
        and leaf.options.get("using", DEFAULT_DB_ALIAS) == alias
        for leaf in iter_leaves(app, signature(follower, app=app))
    )


def send_followers(task: Any, request: Any, result: Any) -> None:
    """Send the callbacks and the next link, as Celery's tracer does, which then finds none."""
    app, info = task.app, request.delivery_info or {}
    options = {
        "parent_id": request.id,
        "root_id": request.root_id or request.id,
        "priority": info.get("priority") if app.conf.task_inherit_parent_priority else None,
    }
    for callback in request.callbacks or ():
        signature(callback, app=app).apply_async((result,), **options)
    if request.chain:
        link = signature(request.chain[-1], app=app)
        link.apply_async((result,), chain=request.chain[:-1], **options)


def end_with_body(run: Run, request: Any) -> None:
    """Let the row of a chord's part end with the send of the chord's body, if this run sends it."""
    body: Any = signature(request.chord, app=run.task.app)
    send, sent = body.delay, list[Any]()

    def delay(*results: Any) -> Any:
        try:
            if run.end(lambda: sent.append(send(*results))):
                run.claim.end()
                run.emit_done()
            else:
                sent.clear()  # an earlier try was rolled back
        except DatabaseError as error:
            # Celery would fail the chord.
            text = "The row of %s can't be ended: %s"
            logger.warning(text, run.task.name, describe_error(error))
            sent.clear()  # that was rolled back
        return sent[-1] if sent else send(*results)

    body.delay = delay
    request.chord = body
