"""
Converting messages into outbox rows and back, without any change to the message.

Only the body can be a pickle, if the task's serializer is. All other parts of a message are
JSON, in kombu's dialect, which supports dates, UUIDs, Decimals and bytes. Queues are stored by
name, and the relay declares them as its own app configures them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from celery import Celery, _state, current_app
from kombu.utils.json import dumps, loads

from ..exceptions import NotSerializable
from ..leases.holder import GARBLED
from .capture import Message

if TYPE_CHECKING:
    from ..models.outbox import OutboxMessage


#: The length of the columns for names and ids, in characters.
LONGEST_NAME: Final = 255

#: The attributes of a message that its row keeps as JSON.
KEPT: Final = ("content_type", "content_encoding", "options", "eta", "expires", "event")


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
    kept = {name: getattr(message, name) for name in KEPT}
    properties = {**kept, "options": options, "app": message.app.main}
    try:
        text = dumps({name: value for name, value in properties.items() if value is not None})
    except (TypeError, ValueError) as error:
        hint = f"JSON says: {error}. An outbox row keeps plain data only."
        raise NotSerializable(message.task, "an option or header", "no JSON", hint) from error
    data = message.data
    body = data.encode("utf-8") if isinstance(data, str) else bytes(data)
    columns = {"task": message.task, "task_id": message.task_id, "attempt": message.attempt}
    return {**columns, "properties": text, "body": body}


def to_message(row: OutboxMessage) -> Message:
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
