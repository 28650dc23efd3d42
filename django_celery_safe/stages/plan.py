"""
Plans: which tasks run together, and which run after them. Plain data, no database.

A plan is checked as a whole before anything is written, and so are the key, the name and the link
of its run: the caller gets an error at once. :mod:`django_celery_safe.stages.engine` runs it.

An entry is a task, its priority, and its arguments and options. Options stand beside the arguments,
as in ``{"width": 640, "@queue": "slow"}``. No argument of a Python function starts with an @, so
names can't clash, and one column holds both as the plan has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

from celery import Celery, Signature, current_app
from celery.local import Proxy

from .. import conf
from ..compat import has_models
from ..concurrency.guard import find_guarded
from ..delivery.call import layers, load_tasks
from ..exceptions import ConfigurationError
from ..sending import SafeTaskMixin
from ..values import NotPlain, decode, encode

#: Most characters of a key and of a name, as the columns have them.
LONGEST_LABEL: Final = 255
#: Allowed starts of a URL. A click on another, such as ``javascript:``, could run code.
URL_STARTS: Final = ("/", "http://", "https://")
#: Most entries of a plan: all of them are written in one transaction.
MOST_ENTRIES: Final = 100_000
#: Longest params of a run and arguments of an entry, in characters of JSON: steps read them.
LONGEST_PARAMS: Final = 65536
#: Largest priority, and least: beyond, a float skips whole numbers.
LARGEST_PRIORITY: Final = 2**53
#: Largest priority of a message: a byte, in AMQP.
LARGEST_OF_MESSAGE: Final = 255
#: The first character of an option's name.
MARK: Final = "@"
ENTRY_HINT: Final = (
    "Write (task, priority) or (task, priority, {...}); the highest priority runs first."
)


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
        raise invalid(f"{plan!r} is not a list of entries", ENTRY_HINT)
    stages = read_entries(plan, app)
    in_order = [stages[priority] for priority in sorted(stages, reverse=True)]
    return Plan(in_order, _encode_params(params))


def _read_dictionary(
    plan: Mapping[str, Any], params: Mapping[str, Any] | None
) -> tuple[Any, Mapping[str, Any] | None]:
    # The source document of this form spells ``sub_tasks`` in two ways.
    if "sub_tasks" not in plan or not plan.keys() <= {"sub_tasks", "params"}:
        form = 'Write {"sub_tasks": [["task", 1]], "params": {}}.'
        raise invalid(f"it is a dictionary with {', '.join(map(repr, plan))}", form)
    if params is not None and "params" in plan:
        raise invalid("its 'params' are given twice", "Give them once.")
    return plan["sub_tasks"], plan.get("params", params)


def _encode_params(params: Any) -> str:
    try:
        return "{}" if params is None else encode_named(params) or "{}"
    except NotPlain as error:
        hint = "Give a dict of little and plain data: primary keys."
        raise invalid(f"its params can't be kept: {error}", hint) from error


def make_labels(key: Any, name: Any, url: Any) -> dict[str, str]:
    """
    Return the texts by which people and programs identify a run, as its row takes them.

    Args:
        key: A text that has to fit uncut.
        name: A text, which may be lazy; a name that is too long is cut.
        url: A URL, or an object with ``get_absolute_url()``.

    Raises:
        ConfigurationError: A label can't be stored.
    """
    if not isinstance(key, str) or not key.isprintable() or len(key) > LONGEST_LABEL:
        raise ConfigurationError(
            f"The run can't be started: its key is {key!r:.300}. Give a text that can be seen, of "
            f'at most {LONGEST_LABEL} characters, such as "album:7".'
        )
    text = "" if name is None else str(name)
    shown = "".join(letter if letter.isprintable() else " " for letter in text)
    if len(shown) > LONGEST_LABEL:
        shown = f"{shown[: LONGEST_LABEL - 1]}…"
    address = str(url.get_absolute_url() if hasattr(url, "get_absolute_url") else url)
    if address and not (address.startswith(URL_STARTS) and address.isprintable()):
        raise ConfigurationError(
            f"The run can't be started: its url is {address!r:.200}, which is not an address. Give "
            f'a path such as "/albums/7/", or an object with get_absolute_url().'
        )
    return {"key": key, "name": shown, "url": address}


class InvalidEntry(Exception):
    """An entry can't be run; its args are the fault, as a clause, and advice, as a sentence."""


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


class EntryParts(NamedTuple):
    """
    The third part of a plan's entry.

    Attributes:
        arguments: The keyword arguments of its function.
        options: Its options, without the @.
    """

    arguments: dict[str, Any]
    options: dict[str, Any]


def read_entries(plan: Iterable[Any], app: Celery) -> dict[float, list[Entry]]:
    """
    Check the entries of a plan; return them in their final form, by their priority.

    Raises:
        ConfigurationError: One of them can't be run, or there are none, or too many.
    """
    found: dict[float, list[Entry]] = {}
    for number, given in enumerate(plan, 1):
        if number > MOST_ENTRIES:
            raise invalid(f"it has more than {MOST_ENTRIES:,} entries", "Start several.")
        try:
            entry = _make_entry(given, app)
        except InvalidEntry as error:
            reason, hint = error.args
            where = f"entry {number}, {given!r:.200},"
            raise invalid(f"{where} {reason}", hint) from error.__cause__
        found.setdefault(entry.priority, []).append(entry)
    if not found:
        raise invalid("it has no entries", ENTRY_HINT)
    return found


def invalid(reason: str, hint: str) -> ConfigurationError:
    """Return the error of a plan: its fault, as a clause, and advice, as a sentence."""
    return ConfigurationError(f"The plan can't be run: {reason}. {hint}")


def _make_entry(given: Any, app: Celery) -> Entry:
    if not isinstance(given, tuple | list) or len(given) not in (2, 3):
        raise InvalidEntry("is not an entry", ENTRY_HINT)
    name, priority, third = (*given, {})[:3]
    is_number = isinstance(priority, int | float) and not isinstance(priority, bool)
    if not is_number or not abs(priority) <= LARGEST_PRIORITY:  # nor is NaN
        reason = f"has the priority {priority!r:.50}, which is not a number of at most 2**53"
        raise InvalidEntry(reason, ENTRY_HINT)
    if not is_named(third):
        raise InvalidEntry(f"has the arguments {third!r}", "Give them by name: {'size': 640}.")
    arguments, options = _split(third)
    task = _find_task(name, app)
    _check_task(task, arguments)
    try:
        text = encode_named({**arguments, **_check_options(options, task)})
    except NotPlain as error:
        reason = f"has arguments that can't be kept: {error}"
        raise InvalidEntry(reason, "Give primary keys.") from error
    return Entry(task.name, float(priority), text)


def read_entry(text: str) -> EntryParts:
    """Return arguments and options as a step's row has them."""
    return _split(decode(text)) if text else EntryParts({}, {})


def _split(given: Mapping[str, Any]) -> EntryParts:
    parts = EntryParts({}, {})
    for name, value in given.items():
        part = parts.options if name.startswith(MARK) else parts.arguments
        part[name.removeprefix(MARK)] = value
    return parts


def is_named(values: Any) -> bool:
    """Return whether values are a dict with names, as arguments and params have to be."""
    return isinstance(values, Mapping) and all(isinstance(name, str) for name in values)


def encode_named(values: Any) -> str:
    """
    Return arguments or params as JSON; "": none.

    Raises:
        NotPlain: They are no dict with names, JSON can't take them, or they are too long.
    """
    if not is_named(values):
        raise NotPlain(f"{values!r:.200} is not a dict with names")
    return encode(dict(values), LONGEST_PARAMS, strict=True) if values else ""


def _find_task(task: Any, app: Celery) -> Any:
    if not isinstance(task, str):
        if not hasattr(task, "apply_async") or isinstance(task, Signature):
            raise InvalidEntry(
                f"has {task!r}, which is not a task",
                "Give a task, or its full name; its arguments and options are the third part: "
                "(task, priority, {'size': 640, '@queue': 'slow'}).",
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
    try:
        # Celery makes it from a function, bound or not; a class-based task has none.
        if (check := getattr(task, "__header__", None)) is not None:
            check(*(({},) if is_step else ({}, "")), **arguments)
    except TypeError as error:
        form = "(params)" if is_step else "(data, name)"
        form = " and ".join(filter(None, [form, ", ".join(arguments)]))
        meant = [name for name in OPTIONS if name in arguments]
        options = f' Options have an @: "{MARK}{meant[0]}".' if meant else ""
        raise InvalidEntry(
            f"has the task {task.name}, which does not take {form} ({error})",
            f"A @stages.step takes (params); any other task takes (data, name).{options}",
        ) from error


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
    step, idempotent = _find_innermost(found, "stages_step"), _find_innermost(found, "idempotent")
    guarded = find_guarded(task)
    blind = "@single_instance" if guarded is not None and step < 0 else ""
    if idempotent >= 0 and not 0 <= step < idempotent:
        blind = "@idempotent"
    if blind:
        raise InvalidEntry(
            f"has the task {task.name}, whose {blind} does not know of the step",
            "Put @stages.step below @shared_task and @single_instance, and @idempotent below that.",
        )
    if guarded is not None:
        options = guarded.options
        if options.unique_until is not None or options.on_conflict == "skip":
            what = "unique_until" if options.unique_until is not None else 'on_conflict="skip"'
            raise InvalidEntry(
                f"has the task {task.name}, of which {what} would leave out a step",
                'Use on_conflict="retry" or "wait", without unique_until.',
            )
    return step >= 0


def _find_innermost(found: list[Any], name: str) -> int:
    """Return the place of the last layer with an attribute, which those above copy; -1: none."""
    return max((place for place, layer in enumerate(found) if hasattr(layer, name)), default=-1)


@lru_cache(maxsize=4096)
def get_step_layer(task: Any) -> Any:
    """Return the function that ``@stages.step`` made in a task; None: the task has none."""
    return next((one for one in layers(task.run) if hasattr(one, "stages_step")), None)


def _check_options(options: Mapping[str, Any], task: Any) -> dict[str, Any]:
    """Return the options of an entry as its row keeps them, with their @."""
    known = [MARK + name for name in OPTIONS]
    for name in options:
        if name not in OPTIONS:
            hint = conf.did_you_mean(MARK + name, known).lstrip() or f"There are {known}."
            raise InvalidEntry(f"has the option '{MARK}{name}', which is not known", hint)
    return {MARK + name: OPTIONS[name](value, task) for name, value in options.items()}


def _queue(value: Any, task: Any) -> str:
    queues = task.app.amqp.queues
    may_be_made = task.app.conf.task_create_missing_queues
    if not isinstance(value, str) or not value or not (may_be_made or value in queues):
        known = "" if may_be_made else f": {', '.join(sorted(queues))}"
        raise _refused("queue", value, f"the name of a queue{known}")
    return value


def _countdown(value: Any, task: Any) -> float:
    try:
        seconds = conf.WAIT.seconds_or_none(value, "countdown")
    except ConfigurationError:
        seconds = None
    # Celery and databases can't store later moments.
    if seconds is None or seconds > conf.LONGEST_LEASE:
        raise _refused("countdown", value, "a number of seconds or a timedelta, at most a year")
    return seconds


def _priority(value: Any, task: Any) -> int:
    if type(value) is not int or not 0 <= value <= LARGEST_OF_MESSAGE:
        raise _refused("priority", value, f"a whole number from 0 to {LARGEST_OF_MESSAGE}")
    return value


def _retries(value: Any, task: Any) -> int:
    if type(value) is not int or value < 0 or hasattr(task, "_orig_run"):
        wanted = (
            "a whole number, 0 or more; for a task with autoretry_for set max_retries on the task"
        )
        raise _refused("retries", value, wanted)
    return value


def _refused(name: str, value: Any, wanted: str) -> InvalidEntry:
    return InvalidEntry(f'has the option "{MARK}{name}": {value!r:.100}', f"Give {wanted}.")


#: Functions that check an option, and return it as JSON can keep it, by its name.
OPTIONS: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "queue": _queue,
    "countdown": _countdown,
    "priority": _priority,
    "retries": _retries,
}
