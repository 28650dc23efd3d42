"""
Outbox rows, which keep messages from their transaction until a broker has them.

This module writes the rows in the transaction. ``sender`` sends their messages right after it,
within ``OUTBOX_SEND_TIMEOUT``. ``relay`` sends the messages that the process could not send, or
did not send before it died.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from celery import Celery
from celery.canvas import Signature, maybe_signature
from django.db import Error as DatabaseError
from django.db import connections, router, transaction

from .. import conf, databases, queries
from ..databases import MYSQL, PACKET_BYTES, TESTED, is_read_only, refuse_untested
from ..delivery.header import HEADER, read_header
from ..exceptions import ConfigurationError
from ..texts import describe_error, get_logger
from ..transactions import OUR_TABLES, lacks_table
from ..values import seconds_until
from .capture import Message
from .message_table import message_table
from .serialization import to_row

if TYPE_CHECKING:
    from .sender import OutboxSender

logger = get_logger(__name__)

#: Whether a message is kept in the outbox: no, until a broker has it, or until its task is done.
Outbox: TypeAlias = bool | Literal["until_done"]
UNTIL_DONE: Final = "until_done"
#: The columns of a message.
Columns: TypeAlias = dict[str, Any]

#: The error of a carried task that expired before it was run.
EXPIRED: Final = "The task expired before it was begun."
#: Rows that one statement inserts.
ROWS: Final = 100
#: How many times the time until a message is re-sent doubles while no worker starts its task.
MOST_DOUBLINGS: Final = 7


def keep(
    sender: OutboxSender,
    messages: Sequence[Message],
    result: Any = None,
    outbox: Outbox = True,
    *,
    goes_on: bool = False,
) -> None:
    """
    Write the messages of a call to the outbox, and let a sender send them after the commit.

    Args:
        result: The result of the call; None: it has none.
        outbox: How long the rows stay; see ``Outbox``.
        goes_on: Whether a running task continues with these messages, so that they are not
            duplicates of its own message.

    Raises:
        NotSerializable: A value can't be stored in a row.
        ConfigurationError: The database has no outbox.
    """
    for message in messages if outbox == UNTIL_DONE else ():
        if not carry(message, sender.using) and len(messages) == 1:
            raise ConfigurationError(
                f'{message.task} is sent with outbox="until_done", and is not a SafeTask that is '
                f"known here, so nothing would end its row. Write @shared_task(base=SafeTask), or "
                f"outbox=True."
            )
    rows = [to_row(one) for one in messages]
    try:
        # Also one that the caller catches must leave none of them.
        with transaction.mark_for_rollback_on_error(sender.using):
            ids = _insert(sender, rows)
    except DatabaseError as error:
        said = describe_error(error).splitlines()[0]  # what follows may show the row
        if f"{OUR_TABLES}outboxmessage" not in said:
            raise
        raise ConfigurationError(
            f"The database {sender.using!r} has no outbox, or one of another release: {said}. Run "
            f"manage.py migrate django_celery_safe --database={sender.using}; if that has nothing "
            f"to do, run it with zero first, which deletes the rows."
        ) from error
    sender.add(messages, result, ids=ids, goes_on=goes_on)


def is_ours(app: Celery, task: str) -> bool:
    """Return whether a task that is known here is a SafeTask."""
    return getattr(app.tasks.get(task), "_ends_rows", False)


def carry(message: Message, using: str) -> bool:
    """
    Give a message a new attempt, so that its row stays until its task has ended.

    Returns:
        False if its task does not end its row, as Celery's own tasks, such as chord tasks.
    """
    headers = message.options["headers"]
    given = read_header(headers, message.task)
    # The task of a step may be known to workers alone.
    if "step" not in given and not is_ours(message.app, message.task):
        return False
    message.attempt = os.urandom(16).hex()
    ours = {"task": message.task, "attempt": message.attempt, "using": using}
    headers[HEADER] = {**given, **ours}
    return True


def time_to_wait(message: Message) -> float | None:
    """
    Return how many seconds a message waits in its row for a far eta; None: it is published now.

    The broker would hold it unacknowledged all that time, deliver it again and again, or lose it.
    """
    left = seconds_until(message.eta)
    if left is None or left <= conf.get("OUTBOX_RESEND_AFTER") or not message.attempt:
        return None
    return round(left, 1)  # one statement for those of one call


def resend_delay(message: Message, resent: int = 0) -> float | None:
    """
    Return after how many seconds a relay sends a message again if no worker starts its task.

    Args:
        resent: How many times that has happened before.

    Returns:
        Seconds from the publication on; None: the row ends once the broker has the message.
    """
    if not message.attempt:
        return None
    wait: float = conf.get("OUTBOX_RESEND_AFTER") * 2 ** min(resent, MOST_DOUBLINGS)
    return wait + max(0.0, seconds_until(message.eta) or 0.0) if message.eta else wait


def rewrite(
    sender: OutboxSender, message: Message, name: str, token: str, *, other_work: bool
) -> bool:
    """
    Write the message with which a carried task continues into its row, in the open transaction.

    Args:
        name: The attempt that the row is for.
        token: The token of the run's claim.
        other_work: Whether the message is for other work, so that a result that this task was
            finished with does not count for it.

    Returns:
        Whether the claim still held the row.
    """
    values = {"name": name, "token": token, "sender": sender.token, "held": sender.held}
    values["result"] = "" if other_work else None
    values |= to_row(message)
    written = queries.fetch(sender.using, "rewrite_message", **values)
    if written:
        (first,), *more = written
        if more:  # an INSERT whose answer got lost was repeated
            message_table(sender.using).all().filter(pk__in=[pk for (pk,) in more]).erase()
        sender.add([message], ids=[first], goes_on=True)
    return bool(written)


def _insert(sender: OutboxSender, rows: Sequence[Columns]) -> list[int]:
    """Insert rows that are the sender's; return their keys."""
    alias = sender.using
    connection = connections[alias]
    is_mysql = connection.vendor == MYSQL
    if connection.vendor not in ("postgresql", "sqlite"):
        refuse_untested(alias, "hold an outbox")
    if not (is_mysql or connection.features.can_return_rows_from_bulk_insert):
        raise ConfigurationError(
            f"The database {alias!r} ({connection.vendor}) can't hold an outbox, since its INSERT "
            f"returns no keys. SQLite's does since 3.35."
        )
    keys, claim = list[int](), {"token": sender.token, "held": sender.held}
    for part in _in_batches(rows, PACKET_BYTES if is_mysql else databases.BATCH_BYTES):
        values = [row | claim for row in part]
        found, first = queries.insert(alias, "add_messages", values)
        # Rows get ascending keys, whatever the order in which a database returns these.
        keys += sorted(key for (key,) in found) or _find_inserted(alias, first, part)
    return keys


def _in_batches(rows: Iterable[Columns], most_bytes: int) -> Iterator[list[Columns]]:
    """Yield rows in their order, as many at a time as one statement is to have."""
    batch, total = list[Columns](), 0
    for row in rows:
        # Nearly: the text columns are almost entirely ASCII.
        size = len(row["body"]) + len(row["properties"])
        if batch and (len(batch) == ROWS or total + size > most_bytes):
            yield batch
            batch, total = [], 0
        batch.append(row)
        total += size
    yield batch


def _find_inserted(alias: str, first: int, rows: Sequence[Columns]) -> list[int]:
    """Return the keys of rows that were just inserted; MySQL reports only the first."""
    if len(rows) == 1:
        return [first]
    names = {row["task_id"] for row in rows}
    found = message_table(alias).all().filter(pk__gte=first, task_id__in=names).order_by("pk")
    return list(found.values_list("pk", flat=True)[: len(rows)])


def outbox_aliases() -> list[str]:
    """
    Return the aliases of the databases that have an outbox.

    A database that does not answer is included, because a relay waits for it.
    """
    from ..models.outbox import OutboxMessage  # needs the app registry

    found = []
    for alias in connections:
        connection = connections[alias]
        if connection.settings_dict["TEST"].get("MIRROR") or connection.vendor not in TESTED:
            continue
        if not router.allow_migrate_model(alias, OutboxMessage):
            continue
        with suppress(DatabaseError):
            if lacks_table(alias, OutboxMessage.__name__):
                continue
            if is_read_only(alias):
                logger.info("The outbox of %r is left alone, since it is read-only.", alias)
                continue
        found.append(alias)
    return found


def wants_outbox(app: Celery, signature: Signature[Any]) -> Outbox:
    """Return whether a canvas goes through the outbox by default: as its parts request."""
    if signature.options.get("outbox") is not None:
        return leaf_wants_outbox(app, signature)
    asked = [leaf_wants_outbox(app, leaf) for leaf in iter_leaves(app, signature)]
    return UNTIL_DONE if UNTIL_DONE in asked else any(asked)


def leaf_wants_outbox(app: Celery, leaf: Signature[Any]) -> Outbox:
    """Return whether a single task in a canvas goes through the outbox."""
    if (wanted := leaf.options.get("outbox")) is None:
        return task_wants_outbox(app.tasks.get(str(leaf.task)))
    chosen: Outbox = conf.outbox(wanted)
    return chosen


def task_wants_outbox(task: Any) -> Outbox:
    """Return whether a task goes through the outbox; None: a task that is not known here."""
    wanted = getattr(task, "outbox", None)
    if wanted is None:
        wanted = conf.get("OUTBOX")
    return UNTIL_DONE if wanted == UNTIL_DONE else bool(wanted)


def iter_leaves(app: Celery, signature: Any) -> Iterator[Signature[Any]]:
    """Yield the signatures of the single tasks in a canvas."""
    tasks = getattr(signature, "tasks", None) or ()
    parts = [*getattr(tasks, "tasks", tasks)]  # those of a stamped chord are a group
    if signature.get("subtask_type") == "chord":
        parts.append(signature.body)
    if not parts:
        yield signature
    for part in parts:
        yield from iter_leaves(app, maybe_signature(part, app=app))
