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
from functools import lru_cache
from typing import Any, Final

from celery import Celery
from celery.backends.rpc import RPCBackend
from celery.canvas import Signature
from celery.exceptions import SoftTimeLimitExceeded
from django.db import Error as DatabaseError
from django.db import connections
from django.db.models.functions import Now
from kombu.common import maybe_declare

from .. import conf
from ..batches import in_batches
from ..databases import refuse_untested
from ..exceptions import ConfigurationError, describe_error
from ..texts import get_logger
from .broker import ONE_WAIT, bounded_backend, bounded_producer, is_timeout, is_unreachable
from .capture import Captured, ChordCall, Message, announce, put
from .departure import UNSETTLED, Departure, in_parts, send_timeout, sender_time
from .publication import is_claiming
from .rows import Row, to_row

logger = get_logger(__name__)

#: Rows that one statement inserts, and messages that one request publishes.
ROWS: Final = 100


class Kept:
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
        """Tell whether the rows were committed, and no relay has them, nor will meanwhile."""
        if self._departure.find_lateness() is not None:
            return True  # nothing of them is published, and all are left to a relay
        try:
            return self._departure.rows.are_ours(self._start, len(self._ids))
        except UNSETTLED as error:
            self._warn("could not be looked for after the commit, and wait for a relay", error)
            return False

    def tell_chord(self, calls: Sequence[ChordCall]) -> None:
        """Tell the result backend of their chord, within ``OUTBOX_SEND_TIMEOUT``."""
        if self._chord:
            _rows(self._departure.using).tell_chord(
                self._chord, lambda row, seconds: tell_all(calls, seconds), send_timeout()
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
            if left and self._departure.find_lateness() is not None:
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


def keep(captured: Captured, departure: Departure) -> Kept:
    """
    Write what was captured into the outbox, in the open transaction of the departure.

    Raises:
        NotSerializable: Something can't be kept in a row.
        ConfigurationError: The database has no outbox.
    """
    from ..models import OutboxMessage  # a model-free door, see __init__

    alias = departure.using
    seconds = sender_time()
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
    return Kept(departure, [(pk, row.task_id) for pk, row in zip(ids, rows, strict=True)], chord)


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


def publish_kept(message: Message) -> None:
    """
    Publish a message of the outbox right after its commit.

    Nobody waits longer than ``OUTBOX_SEND_TIMEOUT`` for a broker that is silent.

    Raises:
        kombu.exceptions.OperationalError: The broker can't be reached.
    """
    app, seconds = message.app, send_timeout()
    try:
        _put_within(message, seconds)
    except Exception as error:
        # A kept connection may have been cut since, by the broker or on the way to it.
        if not is_unreachable(app, error) or is_timeout(error):
            raise
        _put_within(message, seconds)
    announce(message, lambda: bounded_producer(app, seconds), retry=False)


def publish_together(
    messages: Sequence[Message], departure: Departure
) -> tuple[int, Exception | None]:
    """
    Publish messages of the outbox a hundred in one request, where the transport can.

    Returns:
        How many, from the first on, went out; and why no more can, if the broker is silent or
        the running task's time is over. Nobody knows of the others, so they are to be
        published one by one.
    """
    app, seconds, sent = messages[0].app, send_timeout(), 0
    stopped: Exception | None = None
    backend: Any = app.backend
    if isinstance(backend, RPCBackend) or any(
        one.app is not app or is_claiming(one.options["headers"]) for one in messages
    ):
        return 0, None
    try:
        with bounded_producer(app, seconds) as producer:
            if not getattr(producer.connection.transport, "supports_batch_publish", False):
                return 0, None
            # A broker that came back without its memory has lost where these lead to.
            producer.connection.declared_entities.clear()
            wait = seconds * ONE_WAIT
            for part in in_batches(messages, ROWS, lambda one: len(one.data)):
                if departure.find_lateness() is not None:
                    break
                with producer.batch(max_size=len(part)):
                    for one in part:
                        put(one, producer, retry=False, timeout=wait, confirm_timeout=wait)
                sent += len(part)
    except Exception as error:  # noqa: BLE001 - which it was, and why, shows one by one
        over = isinstance(error, SoftTimeLimitExceeded) or is_timeout(error)
        stopped = error if over else None
    borrow: Any = lambda: bounded_producer(app, seconds)  # noqa: E731
    for one in messages[:sent]:
        if not announce(one, borrow, retry=False):
            borrow = None  # nobody waits for each of them
    return sent, stopped


def _put_within(message: Message, seconds: float) -> None:
    with bounded_producer(message.app, seconds) as producer:
        backend: Any = message.app.backend
        if message.result_wanted and isinstance(backend, RPCBackend):
            # Its results come through the broker, and only after this. Others are
            # subscribed to by who waits for a result.
            maybe_declare(backend.binding(producer.channel))
        if message.options["exchange"]:
            # A broker that came back without its memory has lost where this leads to.
            producer.connection.declared_entities.clear()
        wait = seconds * ONE_WAIT
        put(message, producer, retry=False, timeout=wait, confirm_timeout=wait)


def tell_all(calls: Sequence[ChordCall], seconds: float) -> None:
    """Tell the result backend of chords, once, waiting ``seconds`` at most for an answer."""
    for call in calls:
        call.tell(bounded_backend(call.app, seconds))


def wants_outbox(app: Celery, signature: Signature[Any]) -> bool:
    """Tell whether a task of the canvas goes through the outbox if nothing else is said."""
    if (wanted := signature.options.get("outbox")) is not None:
        return bool(wanted)
    for part in _parts(signature):
        wanted = part.options.get("outbox")
        if task_wants_outbox(app.tasks.get(part.task)) if wanted is None else wanted:
            return True
    return False


def task_wants_outbox(task: Any) -> bool:
    """Tell whether a task, or one that is not known here, goes through the outbox."""
    wanted = getattr(task, "outbox", None)
    return bool(conf.get("OUTBOX") if wanted is None else wanted)


def keeps_sent() -> bool:
    """Tell whether messages stay in the outbox when they were sent."""
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
    from ..models import OutboxMessage  # a model-free door, see __init__

    return OutboxMessage.objects.using(alias)
