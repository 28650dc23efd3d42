"""
Outbox rows, which keep messages from their transaction until a broker has them.

This module writes the rows in the transaction. ``commit`` sends their messages right after it,
within ``OUTBOX_SEND_TIMEOUT``, and ``departure`` records that. ``relay`` sends the messages that
the process could not send, or did not send before it died.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from celery import Celery
from celery.canvas import Signature
from django.db import Error as DatabaseError
from django.db import connections, router

from .. import conf
from ..batches import in_batches
from ..concurrency.sent import seconds_until
from ..databases import MYSQL, PACKET_BYTES, Now, is_read_only, is_tested, refuse_unfit
from ..delivery.header import FORMAT, HEADER, read_header
from ..exceptions import ConfigurationError
from ..foreign_errors import describe_error
from ..statements import change_returning
from ..texts import get_logger
from ..transactions import lacks_table
from .capture import Captured, Message
from .departure import Departure, OutboxBatch, rows_of
from .serialization import MessageColumns, to_row

logger = get_logger(__name__)

#: Whether a message is kept in the outbox: no, until a broker has it, or until its task is done.
Outbox: TypeAlias = bool | Literal["until_done"]
UNTIL_DONE: Final = "until_done"

#: The error of a carried task that expired before it was run.
EXPIRED: Final = "The task expired before it was begun."
#: Rows that one statement inserts.
ROWS: Final = 100
#: The values of the other columns of a new row, as SQL.
_EMPTY: Final = {
    **dict.fromkeys(("attempts", "starts", "deaths", "resent"), "0"),
    **dict.fromkeys(
        ("error", "error_type", "traceback", "token", "holder", "last_death", "result"), "''"
    ),
    "state": "'pending'",
}


class CarriedAttempt(NamedTuple):
    """
    The attempt of a carried task that a message is for.

    Attributes:
        name: Its id, as in the header and in the row.
        wait: Seconds until the task may start.
        starts: How many times the task was started before.
        resent: How many times the message was re-sent because no worker started the task.
    """

    name: str
    wait: float
    starts: int
    resent: int = 0

    @classmethod
    def of(cls, message: Message, starts: int = 0, resent: int = 0) -> CarriedAttempt | None:
        """Return a message's attempt; None: it is not carried, so its row ends once it is sent."""
        name = attempt_id_of(message)
        wait = max(0.0, seconds_until(message.eta) or 0.0)
        return cls(name, wait, starts, resent) if name else None


def keep(captured: Captured, departure: Departure, outbox: Outbox = True) -> OutboxBatch:
    """
    Write the captured messages to the outbox, in the open transaction of the departure.

    Args:
        outbox: How long the rows stay; see ``Outbox``.

    Raises:
        NotSerializable: A value can't be stored in a row.
        ConfigurationError: The database has no outbox.
    """
    from ..models.outbox import OutboxMessage  # needs the app registry

    alias, until_done = departure.using, outbox == UNTIL_DONE
    seconds = departure.rows.sender_time
    messages, calls = captured.messages, captured.chord_calls
    chord = uuid.uuid4().hex if calls else ""
    for message in messages if until_done else ():
        if can_carry(message):
            name_attempt(message, alias)
        elif len(messages) == 1:
            raise ConfigurationError(
                f'{message.task} is sent with outbox="until_done", and is not a SafeTask that is '
                f"known here, so nothing would end its row. Write @shared_task(base=SafeTask), or "
                f"outbox=True."
            )
    rows = [
        to_row(message, [] if number else calls, chord, attempt_id_of(message))
        for number, message in enumerate(messages)
    ]
    table = OutboxMessage._meta.db_table
    try:
        ids = _insert(alias, table, rows, seconds)
    except DatabaseError as error:
        said = describe_error(error).splitlines()[0]  # what follows may show the row
        if table not in said:
            raise
        raise ConfigurationError(
            f"The database {alias!r} has no outbox, or one of another release: {said}. Run "
            f"manage.py migrate django_celery_safe --database={alias}; if that has nothing to do, "
            f"run it with zero first, which deletes the rows."
        ) from error
    written = [(pk, row.task_id) for pk, row in zip(ids, rows, strict=True)]
    return OutboxBatch(departure, written, chord, list(map(CarriedAttempt.of, messages)))


def can_carry(message: Message) -> bool:
    """Return whether a message's task ends its row; Celery's own, such as chord tasks, do not."""
    return is_ours(message.app, message.task)


def is_ours(app: Celery, task: str) -> bool:
    """Return whether a task that is known here is a SafeTask."""
    return getattr(app.tasks.get(task), "_ends_rows", False)


def name_attempt(message: Message, using: str) -> None:
    """Give a message a new attempt, so that its row stays until its task has ended."""
    headers = message.options["headers"]
    given = read_header(headers, message.task)
    ours = {"task": message.task, "attempt": os.urandom(16).hex(), "using": using}
    headers[HEADER] = {**given, **ours, "format": FORMAT}


def attempt_id_of(message: Message) -> str:
    """Return the id of a message's attempt; "": its row ends once it is sent."""
    ours = message.options["headers"].get(HEADER)
    return str(ours.get("attempt", "")) if isinstance(ours, Mapping) else ""


def rewrite(
    message: Message, departure: Departure, rows: Any, *, other_work: bool
) -> OutboxBatch | None:
    """
    Write the message with which a carried task continues into its row, in the open transaction.

    Args:
        rows: A queryset of the row, empty if the claim no longer holds it.
        other_work: Whether the message is for other work, so that a result that this task was
            finished with does not count for it.

    Returns:
        The row as a batch; None: the claim no longer holds the row.
    """
    row = to_row(message, attempt=attempt_id_of(message))
    due_at = Now() + timedelta(seconds=departure.rows.sender_time)
    message_of_row = {
        name: getattr(row, name) for name in ("task", "body", "properties", "attempt")
    }
    sets = {**message_of_row, "due_at": due_at, "token": "", "state": "pending", "attempts": 0}
    if other_work:
        sets["result"] = ""
    written = change_returning(rows, sets, "id", "starts")
    if not written:
        return None
    ((pk, starts),) = written
    return OutboxBatch(departure, [(pk, row.task_id)], "", [CarriedAttempt.of(message, starts)])


def _insert(alias: str, table: str, rows: Sequence[MessageColumns], seconds: float) -> list[int]:
    """
    Insert rows that are due in ``seconds``; return their keys.

    The SQL is written by hand, because every send runs it: the ORM would take longer to
    compile the same statement each time than the database takes to run it.
    """
    refuse_unfit(alias, "hold an outbox")
    connection = connections[alias]
    is_mysql = connection.vendor == MYSQL
    returns = connection.features.can_return_rows_from_bulk_insert
    if not (returns or is_mysql):
        raise ConfigurationError(
            f"The database {alias!r} ({connection.vendor}) can't hold an outbox, since its INSERT "
            f"returns no keys. SQLite's does since 3.35."
        )
    insert, values, times = _insertion(connection.vendor, alias, table, seconds)
    returned: dict[str, list[int]] = {}
    most_bytes = PACKET_BYTES if is_mysql else None
    parts = [rows] if len(rows) == 1 else in_batches(rows, ROWS, attrgetter("size"), most_bytes)
    with connection.cursor() as cursor:
        for part in parts:
            params = [value for row in part for value in (*row, *times)]
            returning = " RETURNING task_id, id" if returns else ""
            cursor.execute(f"{insert} {', '.join([values] * len(part))}{returning}", params)
            found = cursor.fetchall() if returns else _find_inserted(alias, cursor.lastrowid, part)
            for task_id, key in found:
                returned.setdefault(task_id, []).append(key)
    # No database guarantees to return the keys in the order of the inserted rows.
    return [returned[row.task_id].pop() for row in rows]


def _find_inserted(
    alias: str, first: int, rows: Sequence[MessageColumns]
) -> Iterable[tuple[str, int]]:
    """Return the keys of rows that were just inserted; the database reports only the first."""
    names = {row.task_id for row in rows}
    found: Any = rows_of(alias).filter(pk__gte=first, task_id__in=names).order_by("pk")
    return list(found.values_list("task_id", "pk")[: len(rows)])


@lru_cache(maxsize=64)
def _insertion(vendor: str, alias: str, table: str, seconds: float) -> tuple[str, str, list[Any]]:
    """Return the two parts of the statement, and the parameters of a row's timestamps."""
    rows = rows_of(alias)
    compiler = rows.query.get_compiler(alias)
    clock = (Now(), Now() + timedelta(seconds=seconds))
    compiled = [compiler.compile(one.resolve_expression(rows.query)) for one in clock]
    moments = ", ".join(sql for sql, _ in compiled)
    given = ", ".join(MessageColumns._fields)
    # Without _binary, MySQL would read the bytes as text.
    binary = "_binary %s" if vendor == MYSQL else "%s"
    places = ", ".join(binary if name == "body" else "%s" for name in MessageColumns._fields)
    columns = f"{given}, created_at, due_at, {', '.join(_EMPTY)}"
    values = f"({places}, {moments}, {', '.join(_EMPTY.values())})"
    params = [param for _, params in compiled for param in params]
    name = connections[alias].ops.quote_name(table)
    return f"INSERT INTO {name} ({columns}) VALUES", values, params


def outbox_aliases() -> list[str]:
    """
    Return the aliases of the databases that have an outbox.

    A database that does not answer is included, because a relay waits for it.
    """
    from ..models.outbox import OutboxMessage  # needs the app registry

    found = []
    for alias in connections:
        connection = connections[alias]
        if connection.settings_dict["TEST"].get("MIRROR"):
            continue  # a replica
        if not is_tested(alias) or not router.allow_migrate_model(alias, OutboxMessage):
            continue
        try:
            if lacks_table(alias, OutboxMessage):
                continue
            if is_read_only(alias):
                logger.info("The outbox of %r is left alone, since it is read-only.", alias)
                continue
            found.append(alias)
        except DatabaseError:
            found.append(alias)
    return found


def wants_outbox(app: Celery, signature: Signature[Any]) -> Outbox:
    """Return whether a canvas goes through the outbox by default: as its parts request."""
    if (wanted := signature.options.get("outbox")) is not None:
        chosen: Outbox = conf.outbox(wanted)
        return chosen
    asked: list[Outbox] = []
    for part in _parts(signature):
        wanted = part.options.get("outbox")
        task = app.tasks.get(part.task)
        asked.append(task_wants_outbox(task) if wanted is None else conf.outbox(wanted))
    return UNTIL_DONE if UNTIL_DONE in asked else any(asked)


def task_wants_outbox(task: Any) -> Outbox:
    """Return whether a task goes through the outbox; None: a task that is not known here."""
    wanted = getattr(task, "outbox", None)
    if wanted is None:
        wanted = conf.get("OUTBOX")
    return UNTIL_DONE if wanted == UNTIL_DONE else bool(wanted)


def _parts(signature: Signature[Any]) -> Iterator[Any]:
    """Yield the signatures of the single tasks in a canvas."""
    parts = [*(getattr(signature, "tasks", None) or ()), getattr(signature, "body", None)]
    inner = [part for part in parts if isinstance(part, Signature)]
    if not inner:
        yield signature
    for part in inner:
        yield from _parts(part)
