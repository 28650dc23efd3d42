"""
Rows that keep messages from their transaction on until a broker has them.

Here is what the sending process does: it writes the rows in the transaction, and
when that commits sends them at once, within ``OUTBOX_SEND_TIMEOUT``. What it can't
send, or dies before it sends, ``relay`` finds.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any, Final

from celery import Celery
from celery.backends.rpc import RPCBackend
from celery.canvas import Signature
from django.db import Error as DatabaseError
from django.db import connections, router
from django.db.models.functions import Now
from kombu.common import maybe_declare

from .. import conf
from ..batches import in_batches
from ..databases import is_tested, refuse_untested
from ..exceptions import ConfigurationError, describe_error
from ..texts import get_logger
from ..transactions import lacks_table
from .broker import ONE_WAIT, bounded_backend, bounded_producer
from .capture import Captured, ChordCall, Message
from .departure import UNSETTLED, Departure, in_parts
from .publisher import Publisher
from .serialization import Row, to_row

logger = get_logger(__name__)

#: Rows that one statement inserts.
ROWS: Final = 100


class OutboxBatch:
    """
    The rows of what one call sent.

    Args:
        departure: What all sends of that commit share.
        rows: Keys and task ids of the rows, in the order of the messages.
        chord: What they have in common if the result backend has to know of a chord; else "".
    """

    def __init__(self, departure: Departure, rows: list[tuple[int, str]], chord: str) -> None:
        self._departure, self._chord = departure, chord
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

    def end(self, sent: Sequence[int]) -> None:
        """Record which messages, by their numbers, were sent, and leave the others to a relay."""
        done = [self._ids[number] for number in sent]
        published = {*done}
        left = [pk for pk in self._ids if pk not in published]
        rows = _rows(self._departure.using)
        try:
            for part in in_parts(done):
                rows.filter(pk__in=part).settle(keep=keeps_sent())
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


def keep(captured: Captured, departure: Departure) -> OutboxBatch:
    """
    Write what was captured into the outbox, in the open transaction of the departure.

    Raises:
        NotSerializable: Something can't be kept in a row.
        ConfigurationError: The database has no outbox.
    """
    from ..models.outbox import OutboxMessage  # needs the app registry

    alias = departure.using
    seconds = departure.rows.sender_time
    messages, calls = captured.messages, captured.chord_calls
    chord = uuid.uuid4().hex if calls else ""
    rows = [
        to_row(message, [] if number else calls, chord) for number, message in enumerate(messages)
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
    return OutboxBatch(
        departure, [(pk, row.task_id) for pk, row in zip(ids, rows, strict=True)], chord
    )


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
    columns = f"{given}, created_at, due_at, attempts, error"
    values = f"({places}, {moments}, 0, '')"
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


def wants_outbox(app: Celery, signature: Signature[Any]) -> bool:
    """Return whether a task of the canvas goes through the outbox if nothing else is said."""
    if (wanted := signature.options.get("outbox")) is not None:
        return bool(wanted)
    for part in _parts(signature):
        wanted = part.options.get("outbox")
        if task_wants_outbox(app.tasks.get(part.task)) if wanted is None else wanted:
            return True
    return False


def task_wants_outbox(task: Any) -> bool:
    """Return whether a task, or one that is not known here, goes through the outbox."""
    wanted = getattr(task, "outbox", None)
    return bool(conf.get("OUTBOX") if wanted is None else wanted)


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
