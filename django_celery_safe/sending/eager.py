"""
Sending on commit if tasks run eagerly (``task_always_eager``).

There are no messages in this case: a call checks and copies its arguments as it would for a
message, and the task runs in this process at the commit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from traceback import format_exc
from typing import Any

from celery.canvas import Signature, _chain
from celery.exceptions import SoftTimeLimitExceeded
from celery.result import EagerResult, GroupResult
from celery.states import FAILURE, PENDING
from django.db import transaction
from kombu.serialization import loads
from kombu.utils.uuid import uuid

from ..foreign_errors import describe_error
from ..texts import get_logger
from .arguments import serialize
from .deduplicate import Call
from .typed import allow_get, refuse_get

logger = get_logger(__name__)


def run_task_on_commit(send: Callable[[Call], Any], call: Call, using: str | None) -> Any:
    """Send a task when ``using`` commits, which runs it; see :func:`run_on_commit`."""
    _check(call)
    task, args, kwargs, options = call
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
        logger.error(
            "Task %s[%s] failed when it ran eagerly at the commit: %s",
            task,
            result.id,
            describe_error(error),
            exc_info=error,
        )
        if isinstance(result, EagerResult):
            found = EagerResult(result.id, error, FAILURE, traceback=format_exc())
            result.__dict__.update(found.__dict__)
    else:
        result.__dict__.update(found.__dict__)


def _pending(result: Any) -> Any:
    if isinstance(result, GroupResult):
        return GroupResult(result.id, [_pending(part) for part in result], result.parent)
    return EagerResult(result.id, None, PENDING)
