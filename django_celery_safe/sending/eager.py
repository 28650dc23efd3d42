"""
Sending on commit if tasks run eagerly (``task_always_eager``).

There are no messages in this case: a call checks and copies its arguments as it would for a
message, and the task runs in this process at the commit.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from traceback import format_exc
from typing import Any

from celery.canvas import Signature, _chain
from celery.exceptions import SoftTimeLimitExceeded
from celery.result import EagerResult, GroupResult
from celery.states import FAILURE, PENDING
from django.db import transaction
from kombu.serialization import loads

from ..foreign_errors import describe_error
from ..texts import get_logger
from .arguments import serialize

logger = get_logger(__name__)

_running: ContextVar[str | None] = ContextVar("django_celery_safe_running_eagerly", default=None)


def is_running(task_id: str | None) -> bool:
    """Return whether a commit is running this very send now, so that it must not wait again."""
    return task_id is not None and task_id == _running.get()


def run_on_commit(signature: Signature[Any], using: str | None, options: Mapping[str, Any]) -> Any:
    """
    Run a signature or canvas when ``using`` commits.

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
    body: Any = ((signature, dict(options)), {})
    content_type, encoding, data = serialize(str(signature.task), body, "pickle")
    (frozen, given), _ = loads(data, content_type, encoding, accept={content_type})
    result = _pending(frozen.freeze(given.pop("task_id", None)))

    def run() -> None:
        before = _running.get()
        try:
            _running.set(result.id)
            # With `throw`, or task_eager_propagates, the error of a task would escape
            # from the commit, and the callbacks after this one would not run.
            found = frozen.apply_async(**{**given, "throw": False})
        except SoftTimeLimitExceeded:
            raise  # the limit belongs to the task that commits
        except Exception as error:
            logger.error(
                "Task %s[%s] failed when it ran eagerly at the commit: %s",
                signature.task,
                result.id,
                describe_error(error),
                exc_info=error,
            )
            if isinstance(result, EagerResult):
                found = EagerResult(result.id, error, FAILURE, traceback=format_exc())
                result.__dict__.update(found.__dict__)
        else:
            result.__dict__.update(found.__dict__)
        finally:
            _running.set(before)

    transaction.on_commit(run, using=using)
    return result


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
