"""
A relay's chores besides sending: its heartbeat, deleting old rows, and chores of other packages.

The other packages register their chores here. A chore does a limited amount of work in each
turn, and continues in the next. If a chore fails, the error is logged, and neither the other
chores nor the outbox stop.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from celery.exceptions import SoftTimeLimitExceeded

from .. import conf
from ..databases import Now
from ..foreign_errors import describe_error
from ..leases.holder import HOST
from ..pruning import BATCH, prune_some
from ..texts import get_logger
from ..transactions import lacks_table

if TYPE_CHECKING:
    from ..models.message_states import OutboxMessages

logger = get_logger(__name__)

#: Time between two turns of a relay, s, and the time if a turn left rows to delete.
MINUTE: Final = 60.0
AGAIN: Final = 5.0
#: Rows of one kind that a turn deletes at most.
MOST: Final = 10_000


class Chore(NamedTuple):
    """
    A part of the housekeeping.

    Attributes:
        failure: The log message of a failure, with ``%r`` for the alias and ``%s`` for the error.
        models: The names of the models whose tables it needs. In a database that lacks one of
            these tables, a failure is not logged.
        work: Called with the alias; returns whether the next turn should follow soon.
    """

    failure: str
    models: tuple[str, ...]
    work: Callable[[str], bool]


#: The chores by name, in their order; a second registration under a name replaces the first.
_chores: Final[dict[str, Chore]] = {}


def add_chore(name: str, chore: Chore) -> None:
    """Let every relay do a chore in each of its turns, after the chores added earlier."""
    _chores[name] = chore


def add_pruning(
    rows: str,
    models: tuple[str, ...],
    find: Callable[[str], Iterable[Any]],
    *,
    most: int = MOST,
    batch: int = BATCH,
) -> None:
    """
    Let every relay delete rows by their age.

    Args:
        rows: The plural name of the rows, such as "records".
        find: Called with an alias; returns querysets of the rows that may be deleted in that
            database now, each in the order of an index.
        most: How many rows of each queryset a turn deletes at most.
        batch: How many rows a transaction deletes at most.
    """

    def prune(alias: str) -> bool:
        return True in [prune_some(found, most, batch) for found in find(alias)]

    failure = f"The old {rows} in %r could not be deleted: %s"
    add_chore(f"prune {rows}", Chore(failure, models, prune))


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
        Write the heartbeat and do all chores, unless the last turn was a moment ago.

        Raises:
            django.db.Error: The heartbeat could not be written.
        """
        if time.monotonic() < self._next_at:
            return
        self._beat()
        self._next_at = time.monotonic() + MINUTE
        if True in [self._do(chore) for chore in _chores.values()]:
            self._next_at = time.monotonic() + AGAIN

    def _beat(self) -> None:
        from ..models.outbox_relay import OutboxRelay  # needs the app registry

        relays = OutboxRelay.objects.using(self._using)
        seen = {"host": HOST, "pid": os.getpid(), "seen_at": Now()}
        if not relays.filter(pk=1).update(**seen):
            relays.bulk_create([OutboxRelay(pk=1, **seen)], ignore_conflicts=True)
        _messages(self._using).recall()

    def _do(self, chore: Chore) -> bool:
        try:
            return chore.work(self._using)
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:  # noqa: BLE001 - it must not stop the outbox
            if not lacks_table(self._using, *chore.models):
                logger.error(chore.failure, self._using, describe_error(error))
            return False


def connect() -> None:
    """Let relays delete old messages."""
    add_pruning("messages", ("OutboxMessage",), get_prunable)


def get_prunable(alias: str) -> list[OutboxMessages]:
    """Return querysets of the messages whose retention has expired."""
    rows, found = _messages(alias), []
    if (age := conf.retention("sent")) is not None:
        found += [rows.sent_before(age), rows.done_before(age)]
    if (age := conf.retention("failed")) is not None:
        found += [rows.failed_before(age)]
    return found


def _messages(alias: str) -> OutboxMessages:
    from ..models.outbox import OutboxMessage  # needs the app registry

    return OutboxMessage.objects.using(alias)
