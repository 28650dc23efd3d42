""":func:`step`, which makes a function what a plan of stages can run."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final, TypeVar

from celery import Task

from ..concurrency.decorator import refuse_misplaced
from ..delivery.call import find_call, run_for
from ..delivery.header import declare_field, get_header, is_id
from ..delivery.wrappers import add_wrapper
from ..exceptions import InvalidResult
from .running import Outcome, Work, run_step

F = TypeVar("F", bound=Callable[..., Any])

#: What a function gets if it asks for it by name.
OURS: Final = ("run", "step")


def step(function: F) -> F:
    """
    Let a task be a step of a run of stages.

    Goes below ``@shared_task``, and below ``@single_instance``. In a run, the function
    gets the run's params as its first argument, what the plan's entry has for it by name,
    and ``run`` and ``step``, the rows of :class:`StageRun` and :class:`StageStep`, if it has
    arguments of these names. A step may be done again when its process died in it.

    It returns a dict, whose values the next stages find in their params; None or True; or
    False, which fails the step; or ``(success, dict)``. An exception fails the step too,
    after the task's retries.

    Called by hand it is the plain function; ``run`` and ``step`` are None then.

    Raises:
        TypeError: It stands above ``@shared_task`` or ``@single_instance``, or takes no params.

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
    refuse_misplaced(function, "@stages.step", "the step would count as done", above_lock=False)
    signature = inspect.signature(function)
    asked = [name for name in OURS if name in signature.parameters]
    visible = [one for one in signature.parameters.values() if one.name not in asked]
    if not any(one.kind in _POSITIONAL for one in visible):
        raise TypeError(
            f"@stages.step got {function.__qualname__}, which takes no params. Write: "
            f"def {function.__name__}(params): ..."
        )

    @functools.wraps(function)
    def stepped(*args: Any, **kwargs: Any) -> Any:
        task, request = find_call(stepped, function, args)
        pk = get_header(request).get("step")
        if request is None or pk is None:
            missing = {name: None for name in asked if name not in kwargs}
            return run_for(request, function, args, {**kwargs, **missing})
        bound = args[:1] if isinstance(args[0] if args else None, Task) else ()

        def do(work: Work) -> Outcome:
            ours = {"run": work.run, "step": work.step}
            arguments = {**work.arguments, **{name: ours[name] for name in asked}}
            result = run_for(request, function, (*bound, work.params), arguments)
            return read_result(task.name, result)

        return run_step(task, request, pk, do)

    # Celery checks arguments at .delay() by getfullargspec, which looks only here.
    stepped.__signature__ = signature.replace(parameters=visible)  # type: ignore[attr-defined]
    stepped.stages_step = True  # type: ignore[attr-defined]
    return stepped  # type: ignore[return-value]


_POSITIONAL: Final = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)


def read_result(task: str, result: Any) -> Outcome:
    """
    Return what a step's function said by what it returned.

    Raises:
        InvalidResult: Nothing.
    """
    success, params = result, None
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], bool):
        success, params = result
    elif isinstance(result, dict):
        success, params = True, result
    if success is not None and not isinstance(success, bool):
        raise InvalidResult(task, f"it is {result!r:.200}")
    return Outcome(result, success is not False, _checked_params(task, params), "it returned False")


def run_plain(
    task: Any,
    request: Any,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a step whose task takes ``(data, name)`` and returns a dictionary; leave others alone."""
    if hasattr(function, "stages_step"):
        return function(*args, **kwargs)

    def do(work: Work) -> Outcome:
        data = {"task_id": work.run.pk, "params": work.params}
        result = run_for(request, function, (data, task.name), work.arguments)
        return read_dictionary(task.name, result)

    return run_step(task, request, get_header(request)["step"], do)


def read_dictionary(task: str, result: Any) -> Outcome:
    """
    Return what a plain task said by its dictionary: ``result``, ``params``, ``error_info``.

    Raises:
        InvalidResult: It returned none, or one without a ``result``.
    """
    if not isinstance(result, dict) or not isinstance(result.get("result"), bool):
        raise InvalidResult(
            task,
            f"it is {result!r:.200}, and a task without @stages.step returns "
            f'{{"id": ..., "name": ..., "result": True, "params": {{}}}}',
        )
    error = str(result.get("error_info") or 'its "result" is False')
    return Outcome(result, result["result"], _checked_params(task, result.get("params")), error)


def _checked_params(task: str, params: Any) -> dict[str, Any]:
    if params is None:
        return {}
    if not isinstance(params, dict) or not all(isinstance(name, str) for name in params):
        raise InvalidResult(task, f"its params are {params!r:.200}")
    return params


#: Id of the step that the message is to run.
declare_field("step", is_id, is_given=True)
add_wrapper("step", run_plain)
