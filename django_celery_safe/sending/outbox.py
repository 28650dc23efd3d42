"""
The outbox: rows that keep messages from their transaction until a broker has them.

A row has its message without any change to it. Only the body can be a pickle, if the task's
serializer is. All other parts of a message are JSON, in kombu's dialect, which supports dates,
UUIDs, Decimals and bytes. Queues are stored by name, and the relay declares them as its own app
configures them.

``commit`` has them written in the transaction, and sends their messages right after it, within
``OUTBOX_SEND_TIMEOUT``. ``relay`` sends the messages that the process could not send, or did not
send before it died.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from celery import Celery, _state, current_app
from celery.canvas import Signature, maybe_signature
from django.apps import apps
from django.db import Error as DatabaseError
from django.db import connections, router, transaction
from kombu.utils.json import dumps, loads

from .. import conf, databases, queries
from ..databases import MYSQL, PACKET_BYTES, TESTED, Now, is_read_only, refuse_untested
from ..delivery.header import HEADER, Header, read_header
from ..exceptions import ConfigurationError, NotSerializable
from ..leases.holder import GARBLED, HeldLock, decode_holder
from ..leases.lease_table import LeaseTable
from ..texts import describe_error, get_logger, storable
from ..transactions import OUR_TABLES, lacks_table
from ..values import seconds_until
from .capture import Message

if TYPE_CHECKING:
    from ..models.outbox import ClaimedRow, OutboxMessage

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
#: The length of the columns for names and ids, in characters.
LONGEST_NAME: Final = 255

#: The attributes of a message that its row keeps as JSON.
KEPT: Final = ("content_type", "content_encoding", "options", "eta", "expires", "event")
#: The states of a message whose task has ended.
ENDED: Final = ("done", "failed")


class Next(NamedTuple):
    """
    What becomes of a message that a sender or a relay has claimed.

    Attributes:
        after: Seconds from now until a relay looks at it again; None: never, its row ends.
        how: The statement that records it: the broker has the message; or does not have it yet,
            ``await_eta``; or a relay has to try again, ``give_back``.
        error: Why it could not be sent; None: the row keeps its error.
    """

    after: float | None
    how: str = "keep_sent"
    error: str | None = None


#: The message was not reached: any relay may send it.
NOT_REACHED: Final = Next(0.0, "give_back")


class MessageTable(LeaseTable):
    """The outbox of one database."""

    purpose = "hold an outbox"
    models = ("OutboxMessage",)
    rows, named, ends = "messages", "attempt", "due_at"

    def find(self, name: str) -> Any:
        """Return a message, with the server's time as ``asked_at``; None: it was deleted."""
        return self.at(name).defer("body", "properties").annotate(asked_at=Now()).first()

    def peek(self, name: str) -> HeldLock | None:
        with self.errors("peek"):
            row = self.find(name)
        if row is None:
            return None
        return decode_holder(row.holder, HeldLock(name, row.token, row.due_in_s or 0.0))

    def has_ended(self, name: str) -> bool:
        """Return whether the task of a message has ended, or its message is gone."""
        return not self.at(name).exclude(state__in=ENDED).exists()

    def record_sent(self, token: str, outcomes: Mapping[int, Next]) -> None:
        """
        Record what became of messages that a sender or a relay has claimed, by their keys.

        Args:
            token: The token of the claim. Rows that another has claimed since are not changed.
        """
        alike: dict[Next, list[int]] = {}
        for pk, then in outcomes.items():
            alike.setdefault(then, []).append(pk)
        # ``keep_sent`` first: if the process dies in between, the others only wait longer.
        for then in sorted(alike, key=itemgetter(1), reverse=True):
            name, error = then.how, then.error and storable(then.error)
            if then.after is None:
                name, error = "keep_sent" if conf.keeps_sent() else "erase_sent", ""
            values = {"token": token, "wait": then.after, "error": error}
            queries.execute(self.alias, name, alike[then], **values)


#: Returns the one table of a database: the renewing thread tells stores apart by identity.
message_table = lru_cache(MessageTable)


def write(
    using: str, messages: Sequence[Message], outbox: Outbox, *, token: str, held: float
) -> list[int]:
    """
    Write the messages of a call to the outbox of a database; return the keys of their rows.

    Args:
        outbox: How long the rows stay; see ``Outbox``.
        token, held: The claim of the sender that will publish them, and for how long, s.

    Raises:
        NotSerializable: A value can't be stored in a row.
        ConfigurationError: The database has no outbox.
    """
    for message in messages if outbox == UNTIL_DONE else ():
        if not carry(message, using) and len(messages) == 1:
            raise ConfigurationError(
                f'{message.task} is sent with outbox="until_done", and is not a SafeTask that is '
                f"known here, so nothing would end its row. Write @shared_task(base=SafeTask), or "
                f"outbox=True."
            )
    rows = [to_row(one) | {"token": token, "held": held} for one in messages]
    try:
        # Also one that the caller catches must leave none of them.
        with transaction.mark_for_rollback_on_error(using):
            return _insert(using, rows)
    except DatabaseError as error:
        said = describe_error(error).splitlines()[0]  # what follows may show the row
        if f"{OUR_TABLES}outboxmessage" not in said:
            raise
        raise ConfigurationError(
            f"The database {using!r} has no outbox, or one of another release: {said}. Run "
            f"manage.py migrate django_celery_safe --database={using}; if that has nothing "
            f"to do, run it with zero first, which deletes the rows."
        ) from error


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
    given = read_header(headers, message.task) if HEADER in headers else Header()
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


def rewrite(using: str, message: Message, **values: Any) -> int | None:
    """
    Write the message with which a carried task continues into its row, in the open transaction.

    Args:
        values: The parameters of the statement. ``name`` and ``token`` are those of the run's
            claim, ``sender`` and ``held`` those of the sender. A ``result`` replaces the row's;
            None: the row keeps it.

    Returns:
        The key of the row; None: the claim had lost it.
    """
    written = queries.fetch(using, "rewrite_message", **values, **to_row(message))
    if len(written) > 1:  # an INSERT whose answer got lost was repeated
        message_table(using).all().filter(pk__in=[pk for (pk,) in written[1:]]).erase()
    return written[0][0] if written else None


def _insert(using: str, rows: Sequence[Columns]) -> list[int]:
    """Insert rows; return their keys."""
    connection = connections[using]
    is_mysql = connection.vendor == MYSQL
    if connection.vendor not in ("postgresql", "sqlite"):
        refuse_untested(using, "hold an outbox")
    if not (is_mysql or connection.features.can_return_rows_from_bulk_insert):
        raise ConfigurationError(
            f"The database {using!r} ({connection.vendor}) can't hold an outbox, since its INSERT "
            f"returns no keys. SQLite's does since 3.35."
        )
    keys = list[int]()
    for part in _in_batches(rows, PACKET_BYTES if is_mysql else databases.BATCH_BYTES):
        found, first = queries.insert(using, "add_messages", part)
        # Rows get ascending keys, whatever the order in which a database returns these.
        keys += sorted(key for (key,) in found) or _find_inserted(using, first, part)
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
    model = apps.get_model("django_celery_safe", "OutboxMessage")
    found = []
    for alias in connections:
        connection = connections[alias]
        if connection.settings_dict["TEST"].get("MIRROR") or connection.vendor not in TESTED:
            continue
        if not router.allow_migrate_model(alias, model):
            continue
        with suppress(DatabaseError):
            if lacks_table(alias, model.__name__):
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


class ForAnotherRelay(Exception):
    """This process can't send a message: it lacks the sender's Celery app."""


def to_row(message: Message) -> dict[str, Any]:
    """
    Return the columns of ``OutboxMessage`` that describe a message.

    Raises:
        NotSerializable: A header or option is not plain data, a name or id does not fit, or the
            app does not know the queue.
    """
    for what, name in ("its name", message.task), ("its task_id", message.task_id):
        if len(name) > LONGEST_NAME or "\0" in name:
            hint = f"A table keeps {LONGEST_NAME} characters of it, without NUL."
            raise NotSerializable(message.task, what, f"{len(name)} characters", hint)
    options = dict(message.options)
    options["declare"] = [_name_queue(message, queue) for queue in options["declare"] or ()]
    for name in ("exchange", "reply_to"):  # Celery takes an Exchange or a Queue too
        options[name] = getattr(options.get(name), "name", options.get(name))
    kept = {name: value for name in KEPT if (value := getattr(message, name)) is not None}
    try:
        text = dumps({**kept, "options": options, "app": message.app.main})
    except (TypeError, ValueError) as error:
        hint = f"JSON says: {error}. An outbox row keeps plain data only."
        raise NotSerializable(message.task, "an option or header", "no JSON", hint) from error
    data = message.data
    body = data.encode("utf-8") if isinstance(data, str) else bytes(data)
    columns = {"task": message.task, "task_id": message.task_id, "attempt": message.attempt}
    return {**columns, "properties": text, "body": body}


def to_message(row: OutboxMessage | ClaimedRow) -> Message:
    """
    Return the message of a row.

    Raises:
        ValueError: The row was changed, and is no longer a valid message.
        ForAnotherRelay: This process lacks the message's app.
    """
    try:
        properties = loads(row.properties)
        app = get_app(properties.get("app"))
        options = properties["options"]
        options["headers"] = dict(options["headers"])  # what else is wrong shows at the publication
        amqp: Any = app.amqp
        options["declare"] = [amqp.queues[name] for name in options["declare"]]
        return Message(
            app=app,
            task=row.task,
            task_id=row.task_id,
            data=bytes(row.body),
            attempt=row.attempt,
            **{name: properties.get(name) for name in KEPT},
        )
    except ForAnotherRelay:
        raise
    except Exception as error:
        # The texts of other errors may reveal values.
        what = repr(error) if isinstance(error, KeyError) else type(error).__name__
        raise ValueError(f"the row makes no message: {what}") from error


def find_headers(properties: str) -> dict[str, Any]:
    """Return the headers of a row's message; empty if it was changed by hand: a relay says so."""
    try:
        return dict(loads(properties)["options"]["headers"])
    except (*GARBLED, KeyError, AttributeError, ArithmeticError):
        return {}


def get_app(name: str | None) -> Celery:
    """
    Return the Celery app with this name; None: an app without a name.

    Raises:
        ForAnotherRelay: No app has this name. Any other app may use another broker.
    """
    current: Celery = current_app._get_current_object()  # type: ignore[attr-defined]
    if name == current.main:
        return current
    active: list[Celery] = list(_state._get_active_apps())  # type: ignore[attr-defined]
    for app in active:
        if app.main == name:
            return app
    names = ", ".join(sorted({str(app.main) for app in active}))
    raise ForAnotherRelay(
        f"it was sent by the Celery app {name!r}, and here is only {names}: run the relay where "
        f"the project's app is imported"
    )


def _name_queue(message: Message, queue: Any) -> str:
    """Return the name of a queue, by which a relay finds the same one."""
    amqp: Any = message.app.amqp
    # amqp.queues itself would add a queue that is missing.
    known = dict.get(amqp.queues, queue.name)
    if known is queue or known == queue:
        return str(queue.name)
    hint = "The outbox keeps only the name of a queue: add this one to task_queues."
    raise NotSerializable(message.task, "the queue", repr(queue), hint)
