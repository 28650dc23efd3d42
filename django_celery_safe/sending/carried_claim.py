"""Claiming a carried message for a run, unless it has ended or another process runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from celery.app.task import Context
from django.db import DEFAULT_DB_ALIAS, connections
from django.db import Error as DatabaseError

from .. import conf
from ..delivery.copies import resend_later
from ..delivery.header import Header
from ..exceptions import ConfigurationError
from ..leases.claim import Claim
from ..leases.lease import clock
from ..texts import describe_error
from .followed import NOTHING
from .message_table import Claimed, MessageTable, message_table

if TYPE_CHECKING:
    from ..stages.follower import StepFollower

#: Delay of a message that is re-sent because the database with its row did not answer, s.
DATABASE_AWAY: Final = 5.0


class MessageClaim(Claim):
    """
    The claim of a carried message.

    ``finish()`` writes the result into the row, which stays until the run has ended: if the
    process dies in between, the next run returns that result and does nothing else.
    """

    table: MessageTable
    is_carried = True
    #: What follows the message; None: nothing.
    follower: StepFollower | None = None

    def __init__(self, alias: str, attempt: str, task: Any, request: Context) -> None:
        key = f"{task.name}[{request.id}]"
        super().__init__(message_table(alias), attempt, key, conf.get("LOCK_TIMEOUT"))
        #: The result that ``finish()`` has recorded.
        self.text = ""

    def _encode(self, result: Any) -> str:
        follower = self.follower
        return super()._encode(result) if follower is None else follower.encode(result, self.key)

    def _write_done(self, text: str) -> bool:
        self.text = text or NOTHING
        ours: bool = self.table.at(self.name).finish(self.token, self.text)
        return ours


def claim_message(
    task: Any, request: Context, header: Header
) -> tuple[MessageClaim, Claimed] | str:
    """Claim the message; return the claim and its row, or why the message must not run."""
    alias = header.get("using", DEFAULT_DB_ALIAS)
    if alias not in connections.settings:
        raise ConfigurationError(
            f"The row of this message of {task.name} is in the database {alias!r}, which DATABASES "
            f"of this worker has not, so it can't know whether the task is to run. Add it there, "
            f"or let a worker that has it take the queue."
        )
    claim = MessageClaim(alias, header["attempt"], task, request)
    table = claim.table

    def ask() -> Any:
        claim.asked_at = clock.now()
        claimed = table.claim(claim.name, claim.token, claim.seconds, holder)
        return table.find(claim.name) if claimed is None else claimed

    try:
        holder = claim.prepare(
            task, request, f"The task {task.name}", "Put atomic() inside the function."
        )
        found = claim.ask(ask)
    except DatabaseError as error:
        table.check_migrated(error)
        resend_later(task, request, DATABASE_AWAY, f"No answer: {describe_error(error)}")
    if isinstance(found, Claimed):
        return claim, found
    if found is None:
        return "its row is gone, so it is done, was discarded, or was rolled back"
    if found.token == claim.token:  # it was claimed, but the answer got lost
        return claim, Claimed(*(getattr(found, name) for name in Claimed._fields))
    return "another process runs it" if found.state == "running" else f"it is {found.state}"
