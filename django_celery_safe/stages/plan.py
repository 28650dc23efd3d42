"""
Plans: which tasks run together, and which run after them. Plain data, no database.

A plan is checked as a whole before anything is written, so its caller gets an error at once
if an entry can't run; :mod:`django_celery_safe.stages.engine` runs the plan.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

from celery import Celery, Signature, current_app
from celery.local import Proxy

from .. import conf
from ..compat import has_models
from ..concurrency.guard import find_guarded
from ..delivery.call import layers, load_tasks, own_signature
from ..exceptions import ConfigurationError
from ..sending import SafeTaskMixin
from ..values import NotPlain, encode
from .entry_options import MARK, OPTIONS, InvalidEntry, check_retries, make_options, split

#: Longest params of a run and arguments of an entry, in characters of JSON: steps read them.
LONGEST_PARAMS: Final = 65536
#: Largest priority, and least: beyond, a float skips whole numbers.
LARGEST_PRIORITY: Final = 2**53
#: Most entries of a plan: all of them are written in one transaction.
MOST_ENTRIES: Final = 100_000
#: Keys of the dictionary form. Its source document spells ``sub_tasks`` in two ways.
KEYS: Final = ("sub_tasks", "params")

#: Characters of an entry that an error shows.
LONGEST_SHOWN: Final = 200

ENTRY_HINT: Final = (
    "Write (task, priority) or (task, priority, {...}); the highest priority runs first."
)


class Entry(NamedTuple):
    """
    One task of a plan.

    Attributes:
        task: The task's name.
        priority: Entries of one priority run together, higher priorities before lower ones.
        arguments: The keyword arguments beside the params, and the options, whose names start
            with an @, as JSON; "": none.
    """

    task: str
    priority: float
    arguments: str

    def __str__(self) -> str:
        return f"{self.task} {self.arguments}".rstrip()


class Plan(NamedTuple):
    """
    A plan for ``stages.start``, made and checked by :func:`make_plan`.

    Attributes:
        stages: The entries of each stage, in the order in which they were given.
        params: The params of the first stage, as JSON.
    """

    stages: list[list[Entry]]
    params: str

    def describe(self) -> str:
        """
        Return the stages as text: one line for each stage and one for each of its tasks.

        Example:
            >>> from django_celery_safe import stages
            >>> plan = stages.make_plan([("shop.tasks.notify", 1), ("shop.tasks.fetch", 3)])
            >>> print(plan.describe())
            Stage 1 of 2, priority 3
              shop.tasks.fetch
            Stage 2 of 2, priority 1
              shop.tasks.notify
        """
        lines = []
        for number, entries in enumerate(self.stages, 1):
            priority = entries[0].priority
            lines.append(f"Stage {number} of {len(self.stages)}, priority {priority:g}")
            lines += [f"  {entry}" for entry in entries]
        return "\n".join(lines)


def make_plan(
    plan: Plan | Mapping[str, Any] | Iterable[Any], params: Mapping[str, Any] | None = None
) -> Plan:
    """
    Check a plan and return it in its final form; nothing is written or sent.

    Args:
        plan, params: As for ``stages.start``. If the plan is a :class:`Plan` already, only its
            params are replaced, unless ``params`` is None.

    Raises:
        ConfigurationError: The plan can't be run; the error names the entry.
    """
    if isinstance(plan, Plan):
        return plan if params is None else plan._replace(params=_encode_params(params))
    app: Celery = current_app._get_current_object()  # type: ignore[attr-defined]
    if isinstance(plan, Mapping):
        plan, params = _read_dictionary(plan, params)
    # A lazy task claims to be iterable but is not.
    if isinstance(plan, str | bytes | Proxy) or not isinstance(plan, Iterable):
        raise _invalid(f"{plan!r} is not a list of entries", ENTRY_HINT)
    stages: dict[float, list[Entry]] = {}
    for number, given in enumerate(plan):
        if number >= MOST_ENTRIES:
            raise _invalid(f"it has more than {MOST_ENTRIES:,} entries", "Start several.")
        try:
            entry = _read_entry(given, app)
        except InvalidEntry as error:
            reason, hint = error.args
            shown = repr(given)
            shown = shown if len(shown) <= LONGEST_SHOWN else f"{shown[:LONGEST_SHOWN]}..."
            where = f"entry {number + 1}, {shown},"
            raise _invalid(f"{where} {reason}", hint) from error.__cause__
        stages.setdefault(entry.priority, []).append(entry)
    if not stages:
        raise _invalid("it has no entries", ENTRY_HINT)
    in_order = [stages[priority] for priority in sorted(stages, reverse=True)]
    return Plan(in_order, _encode_params(params))


def _read_dictionary(
    plan: Mapping[str, Any], params: Mapping[str, Any] | None
) -> tuple[Any, Mapping[str, Any] | None]:
    for key in plan:
        if key not in KEYS:
            hint = conf.did_you_mean(key, KEYS).lstrip() or "It knows 'sub_tasks' and 'params'."
            raise _invalid(f"its key {key!r} means nothing", hint)
    if "sub_tasks" not in plan:
        raise _invalid("it has no 'sub_tasks'", 'Write {"sub_tasks": [["task", 1]]}.')
    if params is not None and "params" in plan:
        raise _invalid("its 'params' are given twice", "Give them once.")
    return plan["sub_tasks"], plan.get("params", params)


def _read_entry(given: Any, app: Celery) -> Entry:
    if isinstance(given, str | bytes) or not isinstance(given, tuple | list):
        raise InvalidEntry("is not an entry", ENTRY_HINT)
    if len(given) not in (2, 3):
        raise InvalidEntry(f"has {len(given)} parts", ENTRY_HINT)
    task, priority, *rest = given
    if isinstance(priority, bool) or not isinstance(priority, int | float):
        raise InvalidEntry(f"has the priority {priority!r}, which is not a number", ENTRY_HINT)
    if not abs(priority) <= LARGEST_PRIORITY:  # nor is NaN
        reason = "has a priority in no order, or so large that others would equal it"
        raise InvalidEntry(reason, ENTRY_HINT)
    arguments = rest[0] if rest else {}
    if not isinstance(arguments, Mapping) or not all(isinstance(name, str) for name in arguments):
        raise InvalidEntry(f"has the arguments {arguments!r}", "Give them by name: {'size': 640}.")
    kept, options = arguments, dict[str, Any]()
    if any(name.startswith(MARK) for name in arguments):
        arguments, options = split(arguments)
        kept = {**arguments, **make_options(options, app)}
    try:
        text = encode(dict(kept), LONGEST_PARAMS, strict=True) if kept else ""
    except NotPlain as error:
        raise InvalidEntry(
            f"has arguments that can't be kept: {error}", "Give primary keys."
        ) from error
    found = _find_task(task, app)
    _check_task(found, arguments)
    if options:
        check_retries(found, options)
    return Entry(found.name, float(priority), text)


def _find_task(task: Any, app: Celery) -> Any:
    if isinstance(task, Signature):
        raise InvalidEntry(
            f"has a signature of {task.task}, whose arguments, options and links would be left out",
            "Give the task itself, and arguments and options as the third part: "
            "(task, priority, {'size': 640, '@queue': 'slow'}).",
        )
    if not isinstance(task, str):
        # The check uses type() because isinstance() would evaluate a lazy task.
        if not issubclass(type(task), Proxy) and not hasattr(task, "apply_async"):
            raise InvalidEntry(
                f"has {task!r}, which is not a task", "Give a task, or its full name."
            )
        task = task.name
    if task not in app.tasks:
        load_tasks(app)  # a web server may not have loaded them yet
    if task not in app.tasks:
        hint = conf.did_you_mean(task, app.tasks).lstrip() or "Is its module among the app's?"
        raise InvalidEntry(f"names the task {task!r}, which this process does not know", hint)
    return app.tasks[task]


def _check_task(task: Any, arguments: Mapping[str, Any]) -> None:
    is_step = _check_layers(task)
    if not isinstance(task, SafeTaskMixin):
        raise InvalidEntry(
            f"has the task {task.name}, which is not a SafeTask",
            "Write @shared_task(base=SafeTask), and @stages.step below it.",
        )
    form = "(params)" if is_step else "(data, name)"
    given: tuple[Any, ...] = ({},) if is_step else ({}, "")
    try:
        _check_arguments(task, given, arguments)
    except TypeError as error:
        named = f" and {', '.join(arguments)}" if arguments else ""
        meant = [name for name in OPTIONS if name in arguments]
        options = f' Options have an @: "{MARK}{meant[0]}".' if meant else ""
        raise InvalidEntry(
            f"has the task {task.name}, which does not take {form}{named} ({error})",
            f"A @stages.step takes (params); any other task takes (data, name).{options}",
        ) from error


def _check_arguments(task: Any, given: tuple[Any, ...], arguments: Mapping[str, Any]) -> None:
    # Celery makes it from a function, bound or not; a class-based task has none.
    check = getattr(task, "__header__", None)
    if check is None:
        method = next((one for one in layers(task.run) if inspect.ismethod(one)), task.run)
        check = own_signature(method).bind
    check(*given, **arguments)


@lru_cache(maxsize=4096)
def _check_layers(task: Any) -> bool:
    """Refuse layers that would end a message without its step; return whether it is a step."""
    found = layers(task.run)
    # The attribute is None for most tasks; before Celery 5.7 no task has it.
    if getattr(task, "_dump_pydantic_arguments", True) is not None and has_models(found):
        raise InvalidEntry(
            f"has the task {task.name} with pydantic=True, which would read the params too early",
            "Leave that out, and make the model in the function: Album(**params).",
        )
    at = {
        name: max((place for place, one in enumerate(found) if hasattr(one, name)), default=None)
        for name in ("stages_step", "idempotent")
    }
    step, idempotent = at["stages_step"], at["idempotent"]
    if idempotent is not None and (step is None or idempotent < step):
        raise InvalidEntry(
            f"has the task {task.name}, whose @idempotent does not know of the step",
            "Put @stages.step below @shared_task, and @idempotent below that.",
        )
    guarded = find_guarded(task)
    if guarded is None:
        return step is not None
    if step is None:
        raise InvalidEntry(
            f"has the task {task.name}, whose @single_instance does not know of the step",
            "Put @stages.step below @single_instance.",
        )
    options = guarded.options
    if options.unique_until is not None or options.on_conflict == "skip":
        what = "unique_until" if options.unique_until is not None else 'on_conflict="skip"'
        raise InvalidEntry(
            f"has the task {task.name}, of which {what} would leave out a step",
            'Use on_conflict="retry" or "wait", without unique_until.',
        )
    return True


@lru_cache(maxsize=4096)
def get_step_layer(task: Any) -> Any:
    """Return the function that ``@stages.step`` made in a task; None: the task has none."""
    return next((one for one in layers(task.run) if hasattr(one, "stages_step")), None)


def _encode_params(params: Any) -> str:
    if params is None:
        return "{}"
    if not isinstance(params, Mapping) or not all(isinstance(name, str) for name in params):
        raise _invalid(f"its params are {params!r}", "Give a dict with names.")
    try:
        return encode(dict(params), LONGEST_PARAMS, strict=True)
    except NotPlain as error:
        raise _invalid(
            f"its params can't be kept: {error}", "Give little and plain data: primary keys."
        ) from error


def _invalid(reason: str, hint: str) -> ConfigurationError:
    return ConfigurationError(f"The plan can't be run: {reason}. {hint}")
