"""Sends on commit of tasks that are not a SafeTask, through Celery's own Django task."""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

from celery import Task
from celery.contrib.django.task import DjangoTask
from celery.local import Proxy
from django.core.checks import CheckMessage

from ..delivery.call import layers
from ..inspection.findings import fault
from ..sending import SafeTaskMixin
from ..usage import PASSED
from .project import Project
from .tasks import BE_SAFE

METHODS: Final = ("delay_on_commit", "apply_async_on_commit")


def find_plain_sends(project: Project) -> Iterator[CheckMessage]:
    """W026: code of the project sends a task of Celery's plain Django task on commit."""
    plain = [one for one in project.tasks if isinstance(one, DjangoTask)]
    if all(isinstance(task, SafeTaskMixin) for task in plain):
        return
    places: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        is_own = isinstance(module, ModuleType) and name.partition(".")[0] not in PASSED
        if is_own and _mentions_tasks(module):
            for place, task in _find_sends(module):
                places.setdefault(task, place)
    if places:
        task, place = next(iter(sorted(places.items())))
        more = f", and {len(places) - 1} more tasks are" if len(places) > 1 else ""
        yield fault(
            "W026",
            f"Task {task} is sent on commit in {place}{more}, but it is not a SafeTask: "
            f"Celery's own method returns None, has no outbox and checks no arguments "
            f"before the commit.",
            BE_SAFE,
        )


def _mentions_tasks(module: ModuleType) -> bool:
    """Return whether a module has a global that is a task, or a module named ``tasks``."""
    return any(
        issubclass(type(value), Proxy | Task)
        or (issubclass(type(value), ModuleType) and value.__name__.endswith("tasks"))
        for value in list(vars(module).values())
    )


def _find_sends(module: ModuleType) -> Iterator[tuple[str, str]]:
    """Yield the place and task of each call in a module that sends a plain task on commit."""
    for function in _functions_of(module):
        for code in _nested(function.__code__):
            if not set(METHODS).isdisjoint(code.co_names):
                for task in _sent_by(code, function.__globals__):
                    yield f"{module.__name__}.{function.__qualname__}", task


def _functions_of(module: ModuleType) -> Iterator[FunctionType]:
    """Yield the functions that a module defines, including those of its classes and tasks."""
    for value in list(vars(module).values()):
        # type() is used because isinstance() would evaluate a lazy object.
        if issubclass(type(value), type):
            found = list(vars(value).values()) if value.__module__ == module.__name__ else []
        elif (task := _find_task(value)) is not None:
            found = layers(task.run)[-1:]
        else:
            found = [value]
        for function in found:
            if issubclass(type(function), staticmethod | classmethod):
                function = function.__func__
            if type(function) is FunctionType and function.__module__ == module.__name__:
                unwrapped = inspect.unwrap(function)
                if type(unwrapped) is FunctionType:
                    yield unwrapped


def _find_task(value: Any) -> Any:
    """Return a global as a task; None: it is not a task, or it is a task of another app."""
    if not issubclass(type(value), Proxy | Task):
        return None
    try:
        return value if isinstance(value, Task) else None
    except Exception:  # noqa: BLE001 - whatever a proxy raises in place of its object
        return None


def _nested(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code, and the code of the functions and lambdas in it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _nested(const)


def _sent_by(code: CodeType, names: dict[str, Any]) -> Iterator[str]:
    """Yield the plain tasks that a code object sends on commit, as ``task.delay_on_commit``."""
    value: Any = None
    for step in dis.get_instructions(code):
        if step.opname == "LOAD_GLOBAL":
            value = names.get(step.argval)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            task = _find_task(value) if step.argval in METHODS else None
            if task is not None and not isinstance(task, SafeTaskMixin):
                yield str(task.name)
            value = vars(value).get(step.argval) if issubclass(type(value), ModuleType) else None
        else:
            value = None
