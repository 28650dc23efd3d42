"""
Holding messages back until a transaction commits, and publishing them then.

With ``task_always_eager`` there are no messages: a call checks and copies its arguments as it would
for a message, and the task runs in this process at the commit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from traceback import format_exc
from typing import Any, cast

from celery import Celery
from celery.canvas import Signature, _chain
from celery.exceptions import SoftTimeLimitExceeded
from celery.result import EagerResult, GroupResult
from celery.states import FAILURE, PENDING
from django.db import DEFAULT_DB_ALIAS, connections, transaction
from kombu.serialization import loads
from kombu.utils.uuid import uuid

from .. import conf
from ..exceptions import ConfigurationError, WrongTransaction
from ..texts import describe_error, get_logger
from ..transactions import Attempts, aliases_in_atomic, is_transaction_open
from .arguments import serialize
from .capture import Message, capture
from .deduplicate import Call
from .outbox import Outbox, is_ours, keep, wants_outbox
from .sender import OutboxSender, Sender
from .typed import allow_get, as_sent_result, refuse_get

logger = get_logger(__name__)


def send_on_commit(
    signature: Signature[Any],
    *,
    using: str | None = None,
    outbox: Outbox | None = None,
    **options: Any,
) -> Any:
    """
    Send a signature or a canvas (chain, group, chord) when the transaction commits.

    All messages are made now: ids are final, arguments are frozen, and values that
    can't be sent raise here. If the transaction, or its savepoint, is rolled back,
    nothing is sent. Outside a transaction the signature is sent at once.

    Args:
        signature: The signature to send, such as ``chain(fetch.si(1), parse.si(2))``.
        using: Database alias whose commit to wait for; unset: ``"default"``.
        outbox: Whether to keep the messages in the outbox until the broker has
            them, even outside a transaction; ``"until_done"``: until their tasks have
            ended; None: as its tasks or ``OUTBOX`` say.
        options: See ``apply_async``.

    Returns:
        The result of ``apply_async``. Its ``send_error`` is None, or the error if a
        publication failed after the commit.

    Raises:
        NotSerializable: A value can't travel in a message.
        ConfigurationError: The database has no outbox.
        WrongTransaction: ``using`` is in autocommit while another database is inside
            ``atomic()``, so the send would not wait for that other database.
    """
    if not isinstance(signature, Signature):
        raise TypeError(
            f"send_on_commit got {signature!r} instead of a signature. Write task.si(...), "
            f"chain(...), group(...) or chord(...); for one task, task.delay_on_commit(...)."
        )
    app = signature.app
    if type(signature) is Signature and is_ours(app, str(signature.task)):
        given = {"using": using, "outbox": outbox, "send_on_commit": True, **options}
        return cast("Any", signature).apply_async(**given)
    outbox = wants_outbox(app, signature) if outbox is None else conf.outbox(outbox)
    if not must_wait(using) and (not outbox or app.conf.task_always_eager):
        return as_sent_result(signature.apply_async(**options))
    if app.conf.task_always_eager:
        return as_sent_result(run_on_commit(signature, using, options))
    return hold(app, signature.apply_async, using, options, outbox=outbox)


def must_wait(using: str | None) -> bool:
    """
    Return whether a send has to wait for a commit of ``using``; False: send now.

    Raises:
        WrongTransaction: It is not clear which transaction was meant.
        ConfigurationError: DATABASES has no such alias.
    """
    alias = DEFAULT_DB_ALIAS if using is None else using
    if alias not in connections:
        known = ", ".join(map(repr, connections))
        raise ConfigurationError(
            f"using={using!r} names a database that DATABASES does not have. It has: {known}."
            f"{conf.did_you_mean(alias, connections)}"
        )
    connection = transaction.get_connection(alias)
    is_open = is_transaction_open(connection)
    if not is_open and (others := [other for other in aliases_in_atomic() if other != alias]):
        raise WrongTransaction(
            f"A task is to be sent on commit of the database {alias!r}, which has no open "
            f"transaction, while {others[0]!r} has one: it would be sent before that commits. "
            f"Pass using={others[0]!r}."
        )
    if is_open and not connection.in_atomic_block:
        raise WrongTransaction(
            f"A task is to be sent on commit of the database {alias!r}, whose autocommit is off "
            f"without an atomic() block: Django does not know of its commits. Use atomic(), or "
            f"send the task yourself after the commit."
        )
    return bool(connection.in_atomic_block)


def hold(
    app: Celery,
    send: Callable[..., Any],
    using: str | None,
    options: dict[str, Any],
    *,
    outbox: Outbox,
) -> Any:
    """
    Make the messages of ``send`` now, and publish them when ``using`` commits.

    Args:
        send: Called with the options; sends the task or canvas.
        options: The caller's options.
        outbox: Whether to keep the messages in the outbox until then. Without an open
            transaction their rows are committed, and the messages published, at once.

    Returns:
        The result of ``send``.

    Raises:
        TypeError: The options have a connection or producer to another broker.
    """
    options = dict(options)
    _refuse_other_broker(app, options)
    messages = list[Message]()
    result = capture(app, messages, partial(send, **options))

    def leave() -> None:
        if result is not None:
            refuse_get(result, using)
        if outbox and messages:
            sender = OutboxSender.join(using)
            sender.is_sure = not was_in_atomic
            keep(sender, messages, result, outbox)
        else:
            Sender.join(using).add(messages, result)

    connection = transaction.get_connection(using)
    was_in_atomic = connection.in_atomic_block
    # The row of a single message needs no transaction: its INSERT commits by itself.
    if not outbox or was_in_atomic or len(messages) < 2:
        leave()
        return result
    for attempt in Attempts(connection.alias, "The row of a message"):
        with attempt, transaction.atomic(using=using):
            leave()
            attempt.is_won = True
    return result


def _refuse_other_broker(app: Celery, options: dict[str, Any]) -> None:
    """
    Remove the caller's producer or connection from ``options``.

    A group passes each of its members a producer from the app's pool, which others
    may be using by the time of the commit.

    Raises:
        TypeError: It leads to another broker than the app's.
    """
    given = options.pop("producer", None) or options.pop("publisher", None)
    connection = options.pop("connection", None) or getattr(given, "connection", None)
    if connection is None:
        return
    own = app.connection_for_write()
    theirs, ours = connection.as_uri(), own.as_uri()
    # Of several hosts, a connection of the pool may have gone on to another.
    if theirs != ours and not (own.alt and connection.alt == own.alt):
        raise TypeError(
            f"A send on commit, or through the outbox, has a connection or producer to another "
            f"broker, {theirs}: it goes through the app's broker, {ours}. Leave it out, or send "
            f"the task yourself in transaction.on_commit(), with outbox=False."
        )


def run_task_on_commit(send: Callable[[Call], Any], call: Call, using: str | None) -> Any:
    """Send a task when ``using`` commits, which runs it; see :func:`run_on_commit`."""
    _check(call)
    task, args, kwargs, options = call
    _refuse_other_broker(task.app, options)
    result: Any = EagerResult(options.get("task_id") or uuid(), None, PENDING)
    result.is_duplicate = None
    args, kwargs = _freeze(task.name, (args, kwargs))
    frozen = Call(task, args, kwargs, {**options, "task_id": result.id, "throw": False})
    return _put_off(task.name, result, partial(send, frozen), using)


def run_on_commit(signature: Signature[Any], using: str | None, options: Mapping[str, Any]) -> Any:
    """
    Run a canvas, or the signature of a plain task, when ``using`` commits.

    If a task fails, the error is logged and affects neither the commit nor later callbacks.

    Returns:
        The result, with its final ids. It is pending until the commit fills it in.
        None: the canvas is a chain without tasks.

    Raises:
        NotSerializable: A value could not travel in a message.
        TypeError: The arguments don't fit the task.
    """
    if isinstance(signature, _chain) and not signature.tasks:
        return None  # as apply_async does
    task = signature.app.tasks.get(str(signature.task))
    if type(signature) is Signature and task is not None:
        given = signature.clone(options.get("args"), options.get("kwargs"))
        _check(Call(task, given.args, given.kwargs, {**given.options, **options}))
    # The copy shares nothing with the original, not even the members of a group.
    frozen, given = _freeze(str(signature.task), (signature, dict(options)))
    result = _pending(frozen.freeze(given.pop("task_id", None)))
    # With `throw`, or task_eager_propagates, the error of a task would escape
    # from the commit, and the callbacks after this one would not run.
    run = partial(frozen.apply_async, **{**given, "throw": False})
    return _put_off(str(signature.task), result, run, using)


def _check(call: Call) -> None:
    """Check a task's arguments as they would be checked for a message."""
    task, args, kwargs, options = call
    serializer = options.get("serializer") or task.serializer
    args, kwargs = args or (), kwargs or {}
    dump = getattr(task, "_dump_pydantic_arguments", None)  # since Celery 5.7
    if dump is not None and serializer != "pickle":
        args, kwargs = dump(args, kwargs)
    serialize(task.name, (args, kwargs), serializer)
    if task.typing:
        task.__header__(*args, **kwargs)


def _freeze(task: str, values: tuple[Any, ...]) -> Any:
    content_type, encoding, data = serialize(task, (values, {}), "pickle")
    return loads(data, content_type, encoding, accept={content_type})[0]


def _put_off(task: str, result: Any, run: Callable[[], Any], using: str | None) -> Any:
    """Let the commit of ``using`` run a task; return its result."""
    refuse_get(result, using)
    transaction.on_commit(partial(_fill_in, task, result, run), using=using)
    return result


def _fill_in(task: str, result: Any, run: Callable[[], Any]) -> None:
    """Run a task, and make its pending result the result of the run."""
    allow_get(result)
    try:
        found = run()
    except SoftTimeLimitExceeded:
        raise  # the limit belongs to the task that commits
    except Exception as error:
        text = "Task %s[%s] failed when it ran eagerly at the commit: %s"
        logger.error(text, task, result.id, describe_error(error), exc_info=error)
        if not isinstance(result, EagerResult):
            return
        found = EagerResult(result.id, error, FAILURE, traceback=format_exc())
    result.__dict__.update(found.__dict__)


def _pending(result: Any) -> Any:
    if isinstance(result, GroupResult):
        return GroupResult(result.id, [_pending(part) for part in result], result.parent)
    return EagerResult(result.id, None, PENDING)
