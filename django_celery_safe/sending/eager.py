"""
Sending on commit if tasks run eagerly (``task_always_eager``).

There are no messages in this case: a call checks and copies its arguments as it would for a
message, and the task runs in this process at the commit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import partial
from traceback import format_exc
from typing import Any, TypeVar

from celery.canvas import Signature, _chain
from celery.exceptions import SoftTimeLimitExceeded
from celery.result import EagerResult, GroupResult, denied_join_result
from celery.states import FAILURE, PENDING
from django.db import transaction
from kombu.serialization import loads

from ..texts import describe_error, get_logger
from .arguments import serialize
from .unsent import allow_get, refuse_get

T = TypeVar("T")

logger = get_logger(__name__)

#: The eager runs that a send puts off until the commit; None: tasks run at once.
_waiting: ContextVar[list[Callable[[], None]] | None] = ContextVar(
    "django_celery_safe_waiting_eagerly", default=None
)


def run_sent(send: Callable[[], T], using: str | None) -> T:
    """
    Send a task now, with all that Celery and the project do at a send, and run it at the commit.

    If the task fails, the error is logged and affects neither the commit nor later callbacks.

    Returns:
        The result of ``send``. It is pending until the commit fills it in.
    """
    runs: list[Callable[[], None]] = []
    before = _waiting.get()
    try:
        _waiting.set(runs)
        result = send()
    finally:
        _waiting.set(before)
    refuse_get(result, using)
    for run in runs:
        transaction.on_commit(run, using=using)
    return result


def is_waiting() -> bool:
    """Return whether a send that is made here waits for a commit."""
    return _waiting.get() is not None


def is_put_off(options: Mapping[str, Any]) -> bool:
    """Return whether an eager run with these options is one of a send that waits for a commit."""
    return is_waiting() and "task_id" in options


def put_off(
    task: str, apply: Callable[..., Any], args: Any, kwargs: Any, options: Mapping[str, Any]
) -> EagerResult[Any]:
    """Let the commit run a task; return its result, which is pending until then."""
    waiting = _waiting.get()
    assert waiting is not None
    frozen = _freeze(task, (args, kwargs, dict(options)))
    result = EagerResult(options["task_id"], None, PENDING)

    def run() -> Any:
        args, kwargs, options = frozen
        with denied_join_result():
            return apply(args, kwargs, **{**options, "throw": False})

    waiting.append(partial(_fill_in, task, result, run))
    return result


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
    if type(signature) is Signature:
        _check_task(signature, options)
    # The copy shares nothing with the original, not even the members of a group.
    frozen, given = _freeze(str(signature.task), (signature, dict(options)))
    result = _pending(frozen.freeze(given.pop("task_id", None)))
    # With `throw`, or task_eager_propagates, the error of a task would escape
    # from the commit, and the callbacks after this one would not run.
    run = partial(frozen.apply_async, **{**given, "throw": False})
    refuse_get(result, using)
    transaction.on_commit(partial(_fill_in, str(signature.task), result, run), using=using)
    return result


def _freeze(task: str, values: tuple[Any, ...]) -> Any:
    content_type, encoding, data = serialize(task, (values, {}), "pickle")
    return loads(data, content_type, encoding, accept={content_type})[0]


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


def _check_task(signature: Signature[Any], options: Mapping[str, Any]) -> None:
    """Check a single task's arguments as they would be checked for a message."""
    task: Any = signature.app.tasks.get(str(signature.task))
    if task is None:
        return
    given = signature.clone(options.get("args"), options.get("kwargs"))
    if task.typing:
        task.__header__(*given.args, **given.kwargs)
    serializer = options.get("serializer") or given.options.get("serializer") or task.serializer
    serialize(task.name, (given.args, given.kwargs), serializer)


def _pending(result: Any) -> Any:
    if isinstance(result, GroupResult):
        return GroupResult(result.id, [_pending(part) for part in result], result.parent)
    return EagerResult(result.id, None, PENDING)
