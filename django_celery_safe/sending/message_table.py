"""The outbox as a table of leases, for runs of carried tasks and the thread that renews them."""

from __future__ import annotations

from datetime import timedelta
from functools import lru_cache
from typing import Any, Final, NamedTuple

from django.db.models import DurationField, F, Q

from ..databases import Now
from ..leases.lease_table import LeaseTable
from ..statements import Param, Statement

#: The states of a message whose task has ended.
ENDED: Final = ("done", "failed")


class Claimed(NamedTuple):
    """
    The columns of a claimed row that its run needs.

    Attributes:
        deaths: How many processes died in the task.
        last_death: The process that died last, as JSON like ``holder``.
        result: The result that the task was finished with, as JSON; "": it was not finished.
        starts: How many times the task was started, this run included.
    """

    deaths: int
    last_death: str
    result: str
    starts: int


class MessageTable(LeaseTable):
    """The outbox of one database, for runs and the thread that renews their leases."""

    purpose = "hold an outbox"
    models = ("OutboxMessage",)

    def __init__(self, alias: str) -> None:
        super().__init__("messages", alias)

    def at(self, name: str) -> Any:
        """Return a queryset of this attempt's message; it has one row or none."""
        return _rows(self.alias).filter(attempt=name)

    def find(self, name: str) -> Any:
        """Return a message, with the server's time as ``asked_at``; None: it was deleted."""
        return _FIND.find(self.alias, attempt=name)

    def claim(self, name: str, token: str, seconds: float, holder: str) -> Claimed | None:
        """
        Claim a message for a run, if no other run has it and its task has not ended.

        Returns:
            The claimed columns; None: the message must not run.
        """
        values = {"attempt": name, "token": token, "holder": holder}
        row = _CLAIM.update_returning(self.alias, lease=timedelta(seconds=seconds), **values)
        return None if row is None else Claimed(*row)

    def goes_on(self, task_id: str) -> bool:
        """Return whether any attempt of a task has not ended; slow, because no index helps."""
        return bool(_rows(self.alias).filter(task_id=task_id).exclude(state__in=ENDED).exists())

    def delete(self, name: str, token: str) -> bool:
        """Delete a message that is not kept; return whether the claim still held it."""
        return _DELETE.execute(self.alias, attempt=name, token=token)


def _rows(alias: str) -> Any:
    from ..models.outbox import OutboxMessage  # needs the app registry

    return OutboxMessage.objects.using(alias)


def _message(alias: str) -> Any:
    return _rows(alias).filter(attempt=Param("attempt"))


_FIND: Final = Statement(
    lambda alias: (_message(alias).defer("body", "properties").annotate(asked_at=Now()), None)
)

_DELETE: Final = Statement(
    lambda alias: (_message(alias).filter(token=Param("token")), None), deletes=True
)


def _claim(alias: str) -> tuple[Any, dict[str, Any]]:
    from ..models.message_states import COUNT_DEATH, State  # needs the app registry

    free = Q(state__in=[State.PENDING, State.SENT]) | Q(state=State.RUNNING, due_at__lt=Now())
    sets = {
        "state": State.RUNNING,
        "token": Param("token"),
        "due_at": Now() + Param("lease", DurationField()),
        "holder": Param("holder"),
        "started_at": Now(),
        "starts": F("starts") + 1,
        "resent": 0,
        # If the row was still running, its process died and the lease expired.
        **COUNT_DEATH,
    }
    return _message(alias).filter(free), sets


_CLAIM: Final = Statement(
    _claim,
    lambda quote: ", ".join(map(quote, Claimed._fields)),
    changed=lambda alias: _message(alias).filter(token=Param("token")),
)


@lru_cache
def message_table(alias: str) -> MessageTable:
    """Return the one ``MessageTable`` of a database."""
    # The renewing thread tells stores apart by identity.
    return MessageTable(alias)
