"""
Outbox rows and the messages they stand for: what is written is what comes back.

A row has no pickle of ours. What a message has beside its body is JSON, in kombu's
dialect, which knows dates, UUIDs, Decimals and bytes. A queue that the relay's app
knows is named only, and declared as it is configured there; others are written out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from celery import Celery, _state, current_app
from celery.canvas import maybe_signature
from celery.result import result_from_tuple
from kombu import Exchange, Queue, binding
from kombu.utils.json import dumps, loads

from ..delivery.header import declare_field, is_token
from ..exceptions import NotSerializable
from ..leases.holder import describe_arguments
from .capture import ChordCall, Message

if TYPE_CHECKING:
    from ..models.outbox import OutboxMessage


#: Which attempt of a task this message is: the name of the row that carries it until the task
#: is done. Without it the row ends with the sending.
declare_field("attempt", is_token)
#: Characters of the columns with names and ids.
LONGEST_NAME: Final = 255


class AppNotLoaded(Exception):
    """This process does not have the Celery app that sent a message."""


class Row(NamedTuple):
    """The columns of ``OutboxMessage`` that describe one message."""

    task: str
    task_id: str
    properties: str
    body: bytes
    chord: str
    chord_calls: str
    attempt: str

    @property
    def size(self) -> int:
        """Its size in bytes; the text columns are ASCII, or nearly."""
        return len(self.body) + len(self.properties) + len(self.chord_calls)


def to_row(
    message: Message,
    chord_calls: list[ChordCall] | None = None,
    chord: str = "",
    attempt: str = "",
) -> Row:
    """
    Return the row of a message.

    Args:
        chord_calls: What the result backend has to know before any of them is published;
            one of their rows has it.
        chord: What the messages have in common for which it has to know that.
        attempt: Which attempt the message is, as its header says; "": the row ends with the
            sending.

    Raises:
        NotSerializable: One of its headers or options is no plain data.
    """
    data = message.data
    for what, name in ("its name", message.task), ("its task_id", message.task_id):
        if len(name) > LONGEST_NAME or not _is_storable(name):
            hint = f"A table keeps {LONGEST_NAME} characters of it, of UTF-8 without NUL."
            raise NotSerializable(message.task, what, f"{len(name)} characters", hint)
    options = dict(message.options)
    options["exchange"] = _pack_exchange(options["exchange"])
    options["declare"] = [_pack_entity(message.app, one) for one in options["declare"] or ()]
    if isinstance(options.get("reply_to"), Queue):
        options["reply_to"] = options["reply_to"].name
    properties: dict[str, Any] = {
        "app": message.app.main,
        "content_type": message.content_type,
        "content_encoding": message.content_encoding,
        "options": options,
    }
    for name in ("eta", "expires", "event"):
        if (value := getattr(message, name)) is not None:
            properties[name] = value
    try:
        text = dumps(properties)
        calls = dumps([_pack_call(call) for call in chord_calls]) if chord_calls else ""
    except (TypeError, ValueError) as error:
        hint = f"JSON says: {error}. An outbox row keeps plain data only."
        raise NotSerializable(message.task, "an option or header", "no JSON", hint) from error
    body = data.encode("utf-8") if isinstance(data, str) else bytes(data)
    return Row(message.task, message.task_id, text, body, chord, calls, attempt)


def to_message(row: OutboxMessage) -> tuple[Message, list[ChordCall]]:
    """
    Return the message of a row, and what the row says that the result backend has to know.

    Raises:
        ValueError: The row was changed and makes no message any more.
        AppNotLoaded: Its app is not here.
    """
    try:
        properties = loads(row.properties)
        app = get_app(properties["app"])
        options = properties["options"]
        options["exchange"] = _unpack_exchange(options["exchange"])
        options["declare"] = [_unpack_entity(app, one) for one in options["declare"]]
        message = Message(
            app=app,
            task=row.task,
            task_id=row.task_id,
            data=bytes(row.body),
            content_type=properties["content_type"],
            content_encoding=properties["content_encoding"],
            options=options,
            eta=properties.get("eta"),
            expires=properties.get("expires"),
            event=properties.get("event"),
            result_wanted=False,
        )
        options["headers"], options["routing_key"]
        packed = loads(row.chord_calls) if row.chord_calls else ()
        calls = [_unpack_call(app, *call) for call in packed]
    except AppNotLoaded:
        raise
    except Exception as error:
        # What other errors say may show values.
        what = repr(error) if isinstance(error, KeyError) else type(error).__name__
        raise ValueError(f"the row makes no message: {what}") from error
    return message, calls


def find_arguments(row: OutboxMessage) -> str | None:
    """Return the arguments as the message shows them; see ``describe_arguments``."""
    try:
        headers = loads(row.properties)["options"]["headers"]
        return describe_arguments(headers.get("argsrepr"), headers.get("kwargsrepr"))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None  # it was changed by hand; the relay will say so


def get_app(name: str | None) -> Celery:
    """
    Return the Celery app of this name; None: one without a name.

    Raises:
        AppNotLoaded: No app has it. Another's broker may be another one.
    """
    current: Celery = current_app._get_current_object()  # type: ignore[attr-defined]
    if name == current.main:
        return current
    active: list[Celery] = list(_state._get_active_apps())  # type: ignore[attr-defined]
    for app in active:
        if app.main == name:
            return app
    names = ", ".join(sorted({str(app.main) for app in active}))
    raise AppNotLoaded(
        f"it was sent by the Celery app {name!r}, and here is only {names}: run the relay where "
        f"the project's app is imported"
    )


def _is_storable(text: str) -> bool:
    try:
        return b"\0" not in text.encode("utf-8")
    except UnicodeEncodeError:
        return False


def _pack_exchange(exchange: Any) -> Any:
    return exchange.as_dict() if isinstance(exchange, Exchange) else exchange


def _unpack_exchange(packed: Any) -> Any:
    return Exchange(**packed) if isinstance(packed, dict) else packed


def _pack_entity(app: Celery, entity: Any) -> Any:
    """Return a queue's name if the app knows this very queue, otherwise all about the entity."""
    if isinstance(entity, Exchange):
        return {"exchange": entity.as_dict()}
    amqp: Any = app.amqp
    # Asking for one that is missing would add it.
    known: Any = dict.get(amqp.queues, entity.name)
    if known is entity:
        return entity.name
    packed = _pack_queue(entity)
    # Kombu's own comparison leaves out half of it.
    return entity.name if known is not None and _pack_queue(known) == packed else {"queue": packed}


def _pack_queue(queue: Queue) -> dict[str, Any]:
    packed: dict[str, Any] = queue.as_dict()
    packed["exchange"] = _pack_exchange(packed["exchange"])
    bindings = [
        {**bound.as_dict(), "exchange": _pack_exchange(bound.exchange)} for bound in queue.bindings
    ]
    packed["bindings"] = sorted(bindings, key=repr)  # kombu has them in a set
    return packed


def _unpack_entity(app: Celery, packed: Any) -> Any:
    if isinstance(packed, str):
        amqp: Any = app.amqp
        return amqp.queues[packed]
    if "exchange" in packed:
        return Exchange(**packed["exchange"])
    attributes = packed["queue"]
    attributes["exchange"] = _unpack_exchange(attributes["exchange"])
    attributes["bindings"] = [
        binding(**{**bound, "exchange": _unpack_exchange(bound["exchange"])})
        for bound in attributes["bindings"]
    ]
    return Queue(**attributes)


def _pack_call(call: ChordCall) -> tuple[str, list[Any], dict[str, Any]]:
    args = list(call.args)
    if call.method == "apply_chord":
        (group_id, results), *rest = args
        args = [(group_id, [result.as_tuple() for result in results]), *rest]
    return call.method, args, call.kwargs


def _unpack_call(app: Celery, method: str, args: list[Any], kwargs: dict[str, Any]) -> ChordCall:
    if method == "apply_chord":
        (group_id, results), body, *rest = args
        members = [result_from_tuple(result, app) for result in results]
        args = [(group_id, members), maybe_signature(body, app=app), *rest]
    return ChordCall(app, method, tuple(args), kwargs)
