"""
Workers and relays with one deliberate fault each.

Each is put in the place of the right one in the processes of workers and relays alone.
"""

import uuid
from typing import Any, Final

from django.db.models import Q

from django_celery_safe.databases import Now
from django_celery_safe.models.outbox import OutboxMessages
from django_celery_safe.sending import carried_run
from django_celery_safe.sending import relay as relaying
from django_celery_safe.sending.carried_run import MessageClaim


def end_without_token(run: carried_run.Run, follow: Any = None) -> bool:
    """End a task's row, whoever has it by now."""
    ended = bool(run.claim.table.at(run.claim.name).erase())
    if ended and follow is not None:
        follow()
    return ended


def begin_done(claim: Any) -> None:
    """Record that a task is done when its run begins; the end of the run finds the row."""
    begin(claim)
    claim.stop_renewing()
    ours = claim.table.at(claim.name).filter(token=claim.token)
    ours.update(state="done", ended_at=Now(), due_at=None)


begin: Final = MessageClaim.begin


def read_again(cls: Any, row: Any) -> Any:
    """Give a message that is sent again an id of its own."""
    one = read(row)
    if row.why_again:
        one.message.task_id = one.message.options["headers"]["id"] = str(uuid.uuid4())
    return one


read: Final = relaying.ClaimedMessage.of


def due_or_running(rows: Any) -> Any:
    """Return what is due, and what a worker runs just now; once, or no task would ever end."""
    running = Q(state="running", deaths=0)
    return rows.filter(Q(due_at__lte=Now()) | running).order_by("due_at", "pk")


#: The wrong code that each fault puts in place of ours, in workers or in relays.
FAULTS: Final[dict[str, tuple[Any, str, Any]]] = {
    "no-token": (carried_run.Run, "end", end_without_token),
    "done-first": (MessageClaim, "begin", begin_done),
    "ignores-leases": (OutboxMessages, "due", due_or_running),
    "new-id": (relaying.ClaimedMessage, "of", classmethod(read_again)),
}
