"""
Outbox rows, which keep messages from their transaction until a broker has them.

This module is the sending process's part: it writes the rows in the transaction, and sends
their messages right after the commit, within ``OUTBOX_SEND_TIMEOUT``. ``relay`` sends the
messages that the process could not send, or did not send before it died.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast

from celery import Celery
from celery.backends.rpc import RPCBackend
from celery.canvas import Signature
from django.db import Error as DatabaseError
from django.db import connections, router
from kombu.common import maybe_declare

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
from .broker import ONE_WAIT, bounded_backend, bounded_producer
from .capture import Captured, ChordCall, Message
from .departure import UNSETTLED, Departure, in_parts
from .publisher import Publisher
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
}


class CarriedAttempt(NamedTuple):
    """
    The attempt of a carried task that a message is for.

    Attributes:
        name: Its id, as in the header and in the row.
        wait: Seconds until the task may start.
        starts: How many times the task was started before.
    """

    name: str
    wait: float
    starts: int

    @classmethod
    def of(cls, message: Message, starts: int = 0) -> CarriedAttempt | None:
        """Return a message's attempt; None: it is not carried, so its row ends once it is sent."""
        name = attempt_id_of(message)
        return cls(name, max(0.0, seconds_until(message.eta) or 0.0), starts) if name else None


class OutboxBatch:
    """
    The outbox rows of the messages that one call sent.

    Args:
        departure: The departure that all sends of that commit share.
        rows: Keys and task ids of the rows, in the order of the messages.
        chord: The id of their chord, if the result backend has to register it; otherwise "".
        attempts: The attempt of each message, in the same order; see :meth:`CarriedAttempt.of`.
    """

    def __init__(
        self,
        departure: Departure,
        rows: list[tuple[int, str]],
        chord: str,
        attempts: Sequence[CarriedAttempt | None],
    ) -> None:
        self._departure, self._chord, self._attempts = departure, chord, list(attempts)
        self._ids = [pk for pk, _ in rows]
        self._start = departure.rows.add(rows)

    def begin(self) -> bool:
        """Return whether the rows were committed, and no relay takes them before they are sent."""
        if self._departure.timeout_error() is not None:
            return True  # no message is published, and all are left to a relay
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
        """Let the row of a message end without a run: it is a duplicate that is not sent."""
        self._attempts[number] = None

    def end(self, sent: Sequence[int]) -> None:
        """Record which messages were sent, by their numbers, and leave the others to a relay."""
        done = {self._ids[number]: self._attempts[number] for number in sent}
        left = [pk for pk in self._ids if pk not in done]
        rows = _rows(self._departure.using)
        try:
            for batch in in_parts(list(done.items())):
                settle_rows(rows, dict(batch))
            if not left:
                return
            if self._departure.timeout_error() is not None:
                self._departure.rows.release(self._start)  # and all later rows
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
    Write the captured messages to the outbox, in the open transaction of the departure.

    Args:
        outbox: How long the rows stay; see ``Outbox``.

    Raises:
        NotSerializable: A value can't be stored in a row.
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
            f"manage.py migrate django_celery_safe --database={alias}."
        ) from error
    written = [(pk, row.task_id) for pk, row in zip(ids, rows, strict=True)]
    return OutboxBatch(departure, written, chord, list(map(CarriedAttempt.of, messages)))


def can_carry(message: Message) -> bool:
    """Return whether a message's task ends its row; Celery's own, such as chord tasks, do not."""
    return getattr(message.app.tasks.get(message.task), "_ends_rows", False)


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
    sets = {**message_of_row, "due_at": due_at, "token": "", "sent_at": None, "attempts": 0}
    if other_work:
        sets["result"] = ""
    written = change_returning(rows, sets, "id", "starts")
    if not written:
        return None
    ((pk, starts),) = written
    return OutboxBatch(departure, [(pk, row.task_id)], "", [CarriedAttempt.of(message, starts)])


def settle_rows(rows: Any, sent: Mapping[int, CarriedAttempt | None]) -> None:
    """
    Record that messages were sent.

    Args:
        rows: A queryset of the outbox.
        sent: The attempt of each message by its row's key; see :meth:`CarriedAttempt.of`.
    """
    if ended := [pk for pk, attempt in sent.items() if attempt is None]:
        rows.filter(pk__in=ended).settle(keep=keeps_sent())
    alike: dict[tuple[float, int], list[str]] = {}
    for attempt in filter(None, sent.values()):
        alike.setdefault((attempt.wait, attempt.starts), []).append(attempt.name)
    for (wait, starts), names in alike.items():
        # If the task has started since then, its run decides when the row is due.
        untouched = rows.filter(attempt__in=names, starts=starts)
        untouched.carry(timedelta(seconds=wait), conf.resend_after())


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
    with connection.cursor() as cursor:
        for part in in_batches(rows, ROWS, attrgetter("size"), most_bytes):
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
    found: Any = _rows(alias).filter(pk__gte=first, task_id__in=names).order_by("pk")
    return list(found.values_list("task_id", "pk")[: len(rows)])


@lru_cache(maxsize=64)
def _insertion(vendor: str, alias: str, table: str, seconds: float) -> tuple[str, str, list[Any]]:
    """Return the two parts of the statement, and the parameters of a row's timestamps."""
    rows = _rows(alias)
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


def bounded_publisher(app: Celery, departure: Departure) -> Publisher:
    """Return a publisher that sends outbox messages right after their commit, in a short time."""
    seconds = departure.timeout
    # With other backends, a caller that waits for a result subscribes to it.
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
    """Declare the reply queue: the broker delivers results only to a queue that exists."""
    backend: Any = message.app.backend
    if message.result_wanted:
        maybe_declare(backend.binding(producer.channel))


def register_all(calls: Sequence[ChordCall], seconds: float) -> None:
    """Register chords with the result backend, in one try that waits at most ``seconds``."""
    for call in calls:
        call.register(bounded_backend(call.app, seconds))


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
        return checked_outbox(wanted)
    asked: list[Outbox] = []
    for part in _parts(signature):
        wanted = part.options.get("outbox")
        task = app.tasks.get(part.task)
        asked.append(task_wants_outbox(task) if wanted is None else checked_outbox(wanted))
    return UNTIL_DONE if UNTIL_DONE in asked else any(asked)


def task_wants_outbox(task: Any) -> Outbox:
    """Return whether a task goes through the outbox; None: a task that is not known here."""
    wanted = getattr(task, "outbox", None)
    if wanted is None:
        wanted = conf.get("OUTBOX")
    return UNTIL_DONE if wanted == UNTIL_DONE else bool(wanted)


def checked_outbox(wanted: Any, what: str = "outbox") -> Outbox:
    """
    Return a value of ``outbox`` if it is valid.

    Raises:
        ConfigurationError: The value is neither True nor False nor "until_done".
    """
    if wanted is True or wanted is False or wanted == UNTIL_DONE:
        return cast("Outbox", wanted)
    raise ConfigurationError(
        f"{what}={wanted!r} means nothing. Give True (until a broker has the message), "
        f'"until_done" (until its task has ended), or False.'
        f"{conf.did_you_mean(wanted, [UNTIL_DONE])}"
    )


def keeps_sent() -> bool:
    """Return whether messages stay in the outbox after they are sent."""
    return conf.retention("OUTBOX_RETENTION") != timedelta()


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
