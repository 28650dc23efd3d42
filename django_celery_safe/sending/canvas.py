"""
Sending chains, groups and chords when a transaction commits, and running tasks eagerly then.

With ``task_always_eager`` there are no messages: a call checks and copies its arguments as it would
for a message, and the task runs in this process at the commit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from traceback import format_exc
from typing import Any, cast

from celery.canvas import Signature, _chain
from celery.exceptions import SoftTimeLimitExceeded
from celery.result import EagerResult, GroupResult
from celery.states import FAILURE, PENDING
from django.db import transaction
from kombu.serialization import loads
from kombu.utils.uuid import uuid

from .. import conf
from ..texts import describe_error, get_logger
from .capture import serialize
from .commit import allow_get, must_wait, refuse_get, refuse_other_broker, send_or_hold
from .deduplicate import Call
from .outbox import Outbox, is_ours, wants_outbox
from .typed import as_sent_result

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

    def send(**options: Any) -> Any:
        return as_sent_result(signature.apply_async(**options))

    if not app.conf.task_always_eager:
        return send_or_hold(app, send, using, options, outbox=outbox)
    return run_on_commit(signature, using, options) if must_wait(using) else send(**options)


def run_task_on_commit(send: Callable[[Call], Any], call: Call, using: str | None) -> Any:
    """Send a task when ``using`` commits, which runs it; see :func:`run_on_commit`."""
    _check(call)
    task, args, kwargs, options = call
    refuse_other_broker(task.app, options)
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
    refuse_get(as_sent_result(result), using)
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
