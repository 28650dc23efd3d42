"""
Rows that keep messages from their transaction on until a broker has them.

Here is what the sending process does: it writes the rows in the transaction, and
when that commits sends them at once, within ``OUTBOX_SEND_TIMEOUT``. What it can't
send, or dies before it sends, ``relay`` finds.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any, Final, Literal, TypeAlias, cast

from celery import Celery
from celery.backends.rpc import RPCBackend
from celery.canvas import Signature
from django.db import Error as DatabaseError
from django.db import connections, router
from django.db.models.functions import Now
from kombu.common import maybe_declare

from .. import conf
from ..batches import in_batches
from ..concurrency.sent import seconds_until
from ..databases import is_tested, refuse_untested
from ..delivery.header import HEADER, read_header
from ..exceptions import ConfigurationError, describe_error
from ..statements import change_returning
from ..texts import get_logger
from ..transactions import lacks_table
from .broker import ONE_WAIT, bounded_backend, bounded_producer
from .capture import Captured, ChordCall, Message
from .departure import UNSETTLED, Departure, in_parts
from .publisher import Publisher
from .serialization import Row, to_row

logger = get_logger(__name__)

#: How something goes through the outbox: not at all, until a broker has it, or until it is done.
Outbox: TypeAlias = bool | Literal["until_done"]
UNTIL_DONE: Final = "until_done"

#: The error of a carried task that expired before it was run.
EXPIRED: Final = "The task expired before it was begun."
#: Rows that one statement inserts.
ROWS: Final = 100
#: The values of the other columns of a new row, as SQL.
_EMPTY: Final = {
    **dict.fromkeys(("attempts", "starts", "deaths", "resent"), "0"),
    **dict.fromkeys(("error", "error_type", "traceback", "token", "holder", "last_death"), "''"),
}


class OutboxBatch:
    """
    The rows of what one call sent.

    Args:
        departure: What all sends of that commit share.
        rows: Keys and task ids of the rows, in the order of the messages.
        chord: What they have in common if the result backend has to know of a chord; else "".
        waits: For each, in how many seconds the task is to begin; None: the row ends with
            the sending.
    """

    def __init__(
        self,
        departure: Departure,
        rows: list[tuple[int, str]],
        chord: str,
        waits: Sequence[float | None],
    ) -> None:
        self._departure, self._chord, self._waits = departure, chord, list(waits)
        self._ids = [pk for pk, _ in rows]
        self._start = departure.rows.add(rows)

    def begin(self) -> bool:
        """Return whether the rows were committed, and no relay has them, nor will meanwhile."""
        if self._departure.timeout_error() is not None:
            return True  # nothing of them is published, and all are left to a relay
        try:
            return self._departure.rows.are_ours(self._start, len(self._ids))
        except UNSETTLED as error:
            self._warn("could not be looked for after the commit, and wait for a relay", error)
            return False

    def register_chord(self, calls: Sequence[ChordCall]) -> None:
        """Register the chord at the result backend, within ``OUTBOX_SEND_TIMEOUT``."""
        if self._chord:
            _rows(self._departure.using).register_chord(
                self._chord,
                lambda row, seconds: register_all(calls, seconds),
                self._departure.timeout,
            )

    def drop(self, number: int) -> None:
        """Let the row of a message end with the sending: it is a duplicate that is not sent."""
        self._waits[number] = None

    def end(self, sent: Sequence[int]) -> None:
        """Record which messages, by their numbers, were sent, and leave the others to a relay."""
        done = {self._ids[number]: self._waits[number] for number in sent}
        left = [pk for pk in self._ids if pk not in done]
        rows = _rows(self._departure.using)
        try:
            for batch in in_parts(list(done.items())):
                settle_rows(rows, dict(batch))
            if left and self._departure.timeout_error() is not None:
                self._departure.rows.release(self._start)  # with all that come after them
                return
            for part in in_parts(left):
                rows.filter(pk__in=part).release()
        except UNSETTLED as error:
            self._warn("stay in the outbox, so that a relay sends them, again if need be", error)

    def _warn(self, what: str, error: Exception) -> None:
        logger.warning(
            "%d message(s) of %r %s: %s",
            len(self._ids),
            self._departure.using,
            what,
            describe_error(error),
        )


def keep(captured: Captured, departure: Departure, outbox: Outbox = True) -> OutboxBatch:
    """
    Write what was captured into the outbox, in the open transaction of the departure.

    Args:
        outbox: Until when the rows stay.

    Raises:
        NotSerializable: Something can't be kept in a row.
        ConfigurationError: The database has no outbox.
    """
    from ..models.outbox import OutboxMessage  # needs the app registry

    alias, until_done = departure.using, checked_outbox(outbox) == UNTIL_DONE
    seconds = departure.rows.sender_time
    messages, calls = captured.messages, captured.chord_calls
    chord = uuid.uuid4().hex if calls else ""
    for message in messages if until_done else ():
        if can_carry(message):
            name_attempt(message, alias)
        elif len(messages) == 1:
            raise ConfigurationError(
                f'{message.task} is sent with outbox="until_done", and is no SafeTask that is '
                f"known here, so nothing would end its row. Write @shared_task(base=SafeTask), or "
                f"outbox=True."
            )
    attempts = list(map(attempt_of, messages))
    rows = [
        to_row(message, [] if number else calls, chord, attempts[number])
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
            f"manage.py migrate django_celery_safe --database={alias}."
        ) from error
    written = [(pk, row.task_id) for pk, row in zip(ids, rows, strict=True)]
    waits = [
        seconds_until_eta(message) if attempt else None
        for message, attempt in zip(messages, attempts, strict=True)
    ]
    return OutboxBatch(departure, written, chord, waits)


def can_carry(message: Message) -> bool:
    """Return whether a message's task ends its row; Celery's own, as of a chord, do not."""
    return getattr(message.app.tasks.get(message.task), "_ends_rows", False)


def name_attempt(message: Message, using: str) -> None:
    """Give a message an attempt of its own, so that its row stays until its task has ended."""
    headers = message.options["headers"]
    given = read_header(headers, message.task)
    ours = {"task": message.task, "attempt": os.urandom(16).hex(), "using": using}
    headers[HEADER] = {**given, **ours}


def attempt_of(message: Message) -> str:
    """Return which attempt of its task a message is; "": its row ends with the sending."""
    ours = message.options["headers"].get(HEADER)
    return str(ours.get("attempt", "")) if isinstance(ours, Mapping) else ""


def rewrite(message: Message, departure: Departure, rows: Any) -> OutboxBatch | None:
    """
    Write the message by which a carried task goes on into its row, in the open transaction.

    Args:
        rows: The row, if the claim still holds it.

    Returns:
        None: It holds it no more.
    """
    row = to_row(message, attempt=attempt_of(message))
    due_at = Now() + timedelta(seconds=departure.rows.sender_time)
    message_of_row = {
        name: getattr(row, name) for name in ("task", "body", "properties", "attempt")
    }
    sets = {**message_of_row, "due_at": due_at, "token": "", "sent_at": None, "attempts": 0}
    written = [(pk, row.task_id) for (pk,) in change_returning(rows, sets, "id")]
    if not written:
        return None
    return OutboxBatch(departure, written, "", [seconds_until_eta(message)])


def seconds_until_eta(message: Message) -> float:
    """Return in how many seconds the task of a message is to begin."""
    return max(0.0, seconds_until(message.eta) or 0.0)


def settle_rows(rows: Any, waits: Mapping[int, float | None]) -> None:
    """
    Record that messages were sent.

    Args:
        rows: The outbox of a database.
        waits: For each row's key, in how many seconds its task is to begin; None: the row
            ends with the sending.
    """
    by_wait: dict[float | None, list[int]] = {}
    for pk, wait in waits.items():
        by_wait.setdefault(wait, []).append(pk)
    for wait, ids in by_wait.items():
        sent = rows.filter(pk__in=ids)
        if wait is None:
            sent.settle(keep=keeps_sent())
        else:
            sent.carry(timedelta(seconds=wait), conf.resend_after())


def _insert(alias: str, table: str, rows: Sequence[Row], seconds: float) -> list[int]:
    """
    Insert rows that are due in ``seconds``; return their keys.

    By hand, because every send pays for it: the ORM would compile the same statement
    each time, for longer than the database takes to run it.
    """
    refuse_untested(alias, "hold an outbox")
    connection = connections[alias]
    if not connection.features.can_return_rows_from_bulk_insert:
        raise ConfigurationError(
            f"The database {alias!r} ({connection.vendor}) can't hold an outbox, since its INSERT "
            f"returns no keys. PostgreSQL can, and SQLite since 3.35."
        )
    insert, values, times = _insertion(connection.vendor, alias, table, seconds)
    returned: dict[str, list[int]] = {}
    with connection.cursor() as cursor:
        for part in in_batches(rows, ROWS, lambda row: row.size):
            params = [value for row in part for value in (*row, *times)]
            cursor.execute(
                f"{insert} {', '.join([values] * len(part))} RETURNING task_id, id", params
            )
            for task_id, key in cursor.fetchall():
                returned.setdefault(task_id, []).append(key)
    # No database promises to return them in the order in which they were given.
    return [returned[row.task_id].pop() for row in rows]


@lru_cache(maxsize=64)
def _insertion(vendor: str, alias: str, table: str, seconds: float) -> tuple[str, str, list[Any]]:
    """Return the two parts of the statement, and the parameters of a row's moments."""
    rows = _rows(alias)
    compiler = rows.query.get_compiler(alias)
    clock = (Now(), Now() + timedelta(seconds=seconds))
    compiled = [compiler.compile(one.resolve_expression(rows.query)) for one in clock]
    moments = ", ".join(sql for sql, _ in compiled)
    given = ", ".join(Row._fields)
    places = ", ".join(["%s"] * len(Row._fields))
    columns = f"{given}, created_at, due_at, {', '.join(_EMPTY)}"
    values = f"({places}, {moments}, {', '.join(_EMPTY.values())})"
    params = [param for _, params in compiled for param in params]
    name = connections[alias].ops.quote_name(table)
    return f"INSERT INTO {name} ({columns}) VALUES", values, params


def bounded_publisher(app: Celery, departure: Departure) -> Publisher:
    """Return what publishes messages of the outbox right after their commit, in a short time."""
    seconds = departure.timeout
    # A caller that waits for a result of another backend subscribes to it.
    prepare = _declare_replies if isinstance(app.backend, RPCBackend) else None
    lend = partial(bounded_producer, app, seconds)
    return Publisher(
        app,
        lend,
        prepare=prepare,
        wait=seconds * ONE_WAIT,
        has_time=lambda: departure.timeout_error() is None,
    )


def _declare_replies(message: Message, producer: Any) -> None:
    """Declare the queue of the results that come through the broker: they come only after it."""
    backend: Any = message.app.backend
    if message.result_wanted:
        maybe_declare(backend.binding(producer.channel))


def register_all(calls: Sequence[ChordCall], seconds: float) -> None:
    """Register chords at the result backend, once, waiting at most ``seconds`` for an answer."""
    for call in calls:
        call.register(bounded_backend(call.app, seconds))


def outbox_aliases() -> list[str]:
    """
    Return the aliases of the databases that have an outbox.

    One that does not answer counts as one that has: a relay waits for it.
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
            if _is_read_only(connection):
                logger.info("The outbox of %r is left alone, since it is read-only.", alias)
                continue
            found.append(alias)
        except DatabaseError:
            found.append(alias)
    return found


def _is_read_only(connection: Any) -> bool:
    """Return whether it is a replica that takes no writes."""
    if connection.vendor != "postgresql":
        return False
    with connection.cursor() as cursor:
        cursor.execute("SHOW transaction_read_only")
        return bool(cursor.fetchone()[0] == "on")


def wants_outbox(app: Celery, signature: Signature[Any]) -> Outbox:
    """Return how a canvas goes through the outbox if nothing else is said: as its parts ask."""
    if (wanted := signature.options.get("outbox")) is not None:
        return checked_outbox(wanted)
    asked: list[Outbox] = []
    for part in _parts(signature):
        wanted = part.options.get("outbox")
        task = app.tasks.get(part.task)
        asked.append(task_wants_outbox(task) if wanted is None else checked_outbox(wanted))
    return UNTIL_DONE if UNTIL_DONE in asked else any(asked)


def task_wants_outbox(task: Any) -> Outbox:
    """Return how a task, or one that is not known here, goes through the outbox."""
    wanted = getattr(task, "outbox", None)
    if wanted is None:
        wanted = conf.get("OUTBOX")
    return UNTIL_DONE if wanted == UNTIL_DONE else bool(wanted)


def checked_outbox(wanted: Any, what: str = "outbox") -> Outbox:
    """
    Return how something is to go through the outbox.

    Raises:
        ConfigurationError: It is none of True, False and "until_done".
    """
    if wanted is True or wanted is False or wanted == UNTIL_DONE:
        return cast("Outbox", wanted)
    raise ConfigurationError(
        f"{what}={wanted!r} means nothing. Give True (until a broker has the message), "
        f'"until_done" (until its task has ended), or False.'
    )


def keeps_sent() -> bool:
    """Return whether messages stay in the outbox when they were sent."""
    return bool(conf.retention("OUTBOX_RETENTION"))


def _parts(signature: Signature[Any]) -> Iterator[Any]:
    """Yield the signatures of the single tasks in a canvas."""
    parts = [*(getattr(signature, "tasks", None) or ()), getattr(signature, "body", None)]
    inner = [part for part in parts if isinstance(part, Signature)]
    if not inner:
        yield signature
    for part in inner:
        yield from _parts(part)


def _rows(alias: str) -> Any:
    from ..models.outbox import OutboxMessage  # needs the app registry

    return OutboxMessage.objects.using(alias)
