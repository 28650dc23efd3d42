""":func:`step`, which makes a function runnable in a plan of stages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import copy_context
from typing import Any, Final, NoReturn, TypeVar, overload

from celery.app.task import Context
from celery.exceptions import TaskPredicate

from .. import conf
from ..concurrency.guard import refuse_lock_below
from ..delivery.call import (
    Function,
    find_call,
    inner_signature,
    own_signature,
    run_for,
    show_signature,
)
from ..delivery.header import get_header
from ..exceptions import ConfigurationError, InvalidResult
from ..leases.claim import current_claims
from ..locks.misuse import refuse_misplaced
from ..sending.carried_run import Run, find_run
from ..sending.followed import Fault, find_follower
from .engine import STEP_RESULT, Outcome, StepFollower

F = TypeVar("F", bound=Callable[..., Any])

#: Arguments that a function receives if its signature names them.
OURS: Final = ("run", "step")


@overload
def step(function: F, /) -> F: ...
@overload
def step() -> Callable[[F], F]: ...
def step(function: Any = conf.UNSET, /) -> Any:
    """
    Make a task usable as a step of a run of stages.

    Put it below ``@shared_task`` and below ``@single_instance``, with or without brackets. In
    a run, the function gets the run's params as its first argument and the arguments of the
    plan's entry by name. If its signature has ``run`` or ``step``, it also gets the rows of
    :class:`StageRun` and :class:`StageStep`. A step may run again if its process died in it.
    ``@idempotent`` belongs below it.

    The function returns a dict, whose values the next stages find in their params; None or
    True; False, which fails the step; or ``(success, dict)``. An exception also fails the
    step, after the task's retries. Any other return value fails it with InvalidResult.

    A direct call runs the plain function, with None for ``run`` and ``step``.

    Raises:
        TypeError: It is above ``@shared_task`` or ``@single_instance``.

    Example:
        >>> from celery import shared_task
        >>> from django_celery_safe import SafeTask, stages
        >>> @shared_task(base=SafeTask, soft_time_limit=300)
        ... @stages.step
        ... def resize(params, width=640):
        ...     return {"width": width, "album": params["album"]}
        >>> resize({"album": 7}, width=320)
        {'width': 320, 'album': 7}

    Source:
        "Celery task priority orchestration", the second way of writing a task.
    """
    if function is conf.UNSET:
        return step
    refuse_misplaced(function, "@stages.step", "the step would count as done")
    refuse_lock_below(function, "@stages.step")
    asked = [name for name in OURS if name in inner_signature(function).parameters]

    @functools.wraps(function)
    def stepped(*args: Any, **kwargs: Any) -> Any:
        task, request, _ = find_call(stepped, function, args)
        if request is None or "step" not in get_header(request):
            missing = {name: None for name in asked if name not in kwargs}
            return run_for(request, function, args, {**kwargs, **missing})

        def do(follower: StepFollower) -> Outcome:
            # The params replace the message's own argument. A decorator above may have copied or
            # named it, may have added others, and may have taken arguments out.
            place, params = request.args[0] if request.args else None, follower.params

            def fill(value: Any) -> Any:
                return params if type(value) is dict and value == place else value

            named = {name: fill(value) for name, value in kwargs.items()}
            if asked:
                step = follower.read()
                named |= {name: step if name == "step" else step.run for name in asked}
            result = run_for(request, function, tuple(map(fill, args)), named)
            return read_result(task.name, result)

        return run_step(task, request, do)

    own = own_signature(function)
    shown = [one for one in own.parameters.values() if one.name not in asked]
    show_signature(stepped, own.replace(parameters=shown))
    stepped.stages_step = True  # type: ignore[attr-defined]
    return stepped


def read_result(task: str, result: Any) -> Outcome:
    """
    Return the outcome that a step's return value stands for.

    Raises:
        InvalidResult: The value has no such meaning.
    """
    success, params = result, None
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], bool):
        success, params = result
    elif isinstance(result, dict):
        success, params = True, result
    if success is not None and not isinstance(success, bool):
        raise InvalidResult(task, f"it is {result!r:.200}", STEP_RESULT)
    return Outcome(result, success is not False, params, "it returned False")


def run_plain(task: Any, request: Any, function: Function, /, *args: Any, **kwargs: Any) -> Any:
    """Run a step whose task takes ``(data, name)``; call any other task's function unchanged."""
    if hasattr(function, "stages_step"):
        return function(*args, **kwargs)

    def do(follower: StepFollower) -> Outcome:
        assert follower.found is not None
        data = {"task_id": follower.found.run, "params": follower.params}
        result = run_for(request, function, (data, task.name), kwargs)
        return read_dictionary(task.name, result)

    return run_step(task, request, do)


def run_step(task: Any, request: Context, do: Callable[[StepFollower], Outcome]) -> Any:
    """
    Call the function of a message's step, and let the message's run know the outcome.

    Raises:
        ConfigurationError: The task is no SafeTask here, so nothing would end its message.
        InvalidResult: The outcome can't be recorded.
    """
    run = find_run(request.id)
    follower = find_follower(get_header(request)) if run is None else run.follower
    assert follower is not None  # it is a step
    if run is None and not request.is_eager:
        _refuse(task, request, follower)
    if run is None and follower.begin(request.id or ""):
        return None
    follower.context = copy_context()
    if run is not None:
        follower.context.run(current_claims.set, ())  # the run's own refers to the follower
    try:
        outcome = do(follower)
    except TaskPredicate:
        raise
    except Exception as error:
        retries = follower.options.get("retries", 0)
        if _is_finished(run) or request.retries >= retries:
            raise
        raise task.retry(exc=error, max_retries=retries) from error
    if not _is_finished(run):
        follower.take(outcome, task.name)
    elif not outcome.success:
        raise InvalidResult(task.name, "it fails the step, which it finished before", STEP_RESULT)
    if run is None:
        follower.end_eagerly()
    return outcome.result


def _is_finished(run: Run | None) -> bool:
    return run is not None and run.claim.is_finished


def _refuse(task: Any, request: Context, follower: StepFollower) -> NoReturn:
    error = ConfigurationError(
        f"{task.name} is a step, and is no SafeTask on this worker, so nothing would end its "
        f"message. Write @shared_task(base=SafeTask)."
    )
    message = follower.table.messages.carried(request.id or "")
    follower.fail(request.id or "", lambda: bool(message.erase()), Fault.of(error))
    raise error


def read_dictionary(task: str, result: Any) -> Outcome:
    """
    Return the outcome in a plain task's dictionary: ``result``, ``params``, ``error_info``.

    Raises:
        InvalidResult: The task returned no dictionary, or one whose ``result`` is not a bool.
    """
    if not isinstance(result, dict) or not isinstance(result.get("result"), bool):
        raise InvalidResult(
            task,
            f"it is {result!r:.200}",
            'A task without @stages.step returns {"id": ..., "name": ..., "result": True, '
            '"params": {}}.',
        )
    error = str(result.get("error_info") or 'its "result" is False')
    return Outcome(result, result["result"], result.get("params"), error)
