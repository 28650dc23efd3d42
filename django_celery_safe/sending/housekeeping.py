"""
A relay's housekeeping: its heartbeat, and deleting old rows, also those of other rooms.

A turn deletes a limited number of them, and the next one goes on. If that fails, the error is
logged, and neither the others nor the outbox stop.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from celery.exceptions import SoftTimeLimitExceeded
from django.utils.module_loading import import_string

from .. import conf
from ..databases import Now
from ..leases.holder import HOST
from ..pruning import BATCH, prune_some
from ..texts import describe_error, get_logger
from ..transactions import lacks_table

if TYPE_CHECKING:
    from ..models.message_states import OutboxMessages

logger = get_logger(__name__)

#: Time between two turns of a relay, s, and the time if a turn left rows to delete.
MINUTE: Final = 60.0
AGAIN: Final = 5.0


class Pruning(NamedTuple):
    """
    Rows that a relay deletes by their age.

    Attributes:
        rows: The plural name of the rows, such as "records".
        module: The module with ``get_prunable``, which gets an alias and returns querysets of the
            rows that may be deleted in that database now, each in the order of an index. As a
            text: this room knows nothing of higher ones.
        models: The names of the models whose tables it needs. In a database that lacks one of
            these tables, a failure is not logged.
        most: How many rows of each queryset a turn deletes at most.
        batch: How many rows a transaction deletes at most.
    """

    rows: str
    module: str
    models: tuple[str, ...]
    most: int = 10_000
    batch: int = BATCH


#: In the order of the chores. A run is deleted with its steps.
PRUNINGS: Final = (
    Pruning("messages", "sending.housekeeping", ("OutboxMessage",)),
    Pruning(
        "runs of stages", "stages.step_table", ("StageRun", "StageStep", "OutboxMessage"), 100, 1
    ),
    Pruning("records", "idempotency.records", ("IdempotencyRecord",)),
)


class Housekeeping:
    """
    The turns of one relay.

    Args:
        using: Alias of the database.
    """

    def __init__(self, using: str) -> None:
        self._using = using
        self._next_at = 0.0

    def take_turn_if_due(self) -> None:
        """
        Write the heartbeat and delete old rows, unless the last turn was a moment ago.

        Raises:
            django.db.Error: The heartbeat could not be written.
        """
        if time.monotonic() < self._next_at:
            return
        self._beat()
        self._next_at = time.monotonic() + MINUTE
        if True in [self._prune(pruning) for pruning in PRUNINGS]:
            self._next_at = time.monotonic() + AGAIN

    def _beat(self) -> None:
        from ..models.outbox_relay import OutboxRelay  # needs the app registry

        relays = OutboxRelay.objects.using(self._using)
        seen = {"host": HOST, "pid": os.getpid(), "seen_at": Now()}
        if not relays.filter(pk=1).update(**seen):
            relays.bulk_create([OutboxRelay(pk=1, **seen)], ignore_conflicts=True)
        _messages(self._using).recall()

    def _prune(self, pruning: Pruning) -> bool:
        """Delete some old rows; return whether the next turn should follow soon."""
        try:
            path = f"django_celery_safe.{pruning.module}.get_prunable"
            found = import_string(path)(self._using)
            return True in [prune_some(rows, pruning.most, pruning.batch) for rows in found]
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:  # noqa: BLE001 - it must not stop the outbox
            if not lacks_table(self._using, *pruning.models):
                logger.error(
                    "The old %s in %r could not be deleted: %s",
                    pruning.rows,
                    self._using,
                    describe_error(error),
                )
            return False


def get_prunable(alias: str) -> list[OutboxMessages]:
    """Return querysets of the messages whose retention has expired."""
    rows, found = _messages(alias), []
    if (age := conf.retention("sent")) is not None:
        found += [rows.sent_before(age), rows.done().ended_before(age)]
    if (age := conf.retention("failed")) is not None:
        found += [rows.failed().ended_before(age)]
    return found


def _messages(alias: str) -> OutboxMessages:
    from ..models.outbox import OutboxMessage  # needs the app registry

    return OutboxMessage.objects.using(alias)
