"""
Refusing a call before its message is made: values that can't travel in it, misspelt options.

Option names that resemble no option are left alone: Celery ignores them, and projects have some
of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from inspect import signature
from typing import Any, Final

from celery import Celery
from django.db.models import Model, QuerySet
from kombu import Producer
from kombu.exceptions import EncodeError
from kombu.serialization import dumps

from .. import conf
from ..concurrency.options import check_call_options
from ..exceptions import ConfigurationError, NotSerializable

#: Types of values that contain nothing to check; most items of a long list have one of these.
PLAIN: Final = frozenset({type(None), bool, int, float, str, bytes})

#: How similar two names must be, up to 1.0, for one to count as a misspelling of the other.
SLIP: Final = 0.8

#: Our options of a send, which Celery does not know.
OURS: Final = ("outbox", "using", "send_on_commit", "single_instance")

#: Names of options of ``@app.task`` that Celery's task class does not have as attributes.
_READ_BY_CELERY: Final = (
    *signature(Celery._task_from_fun).parameters,
    *signature(Producer.publish).parameters,
    "queue",
    "autoretry_for",
    "dont_autoretry_for",
    "retry_kwargs",
    "retry_backoff",
    "retry_backoff_max",
    "retry_jitter",
    "lazy",
    "shared",
)


def check_arguments(
    task: str, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None, *more: Any
) -> None:
    """
    Refuse values that must not travel in a message, whatever the serializer.

    A model instance would be a stale copy of its row, a QuerySet would be evaluated
    at some unknown time, and an iterator can be read only once.

    Args:
        more: Other parts of the message, such as links.

    Raises:
        TypeError: ``args`` is one argument instead of a list of them.
        ConfigurationError: A signature has ``single_instance`` options that are not valid.
        NotSerializable: The error names the argument, even if the value is nested. In a
            signature (chain, link), it names that signature's task and argument.
    """
    if args is not None and not isinstance(args, list | tuple):
        raise TypeError(
            f"The arguments of task {task} are {args!r:.100}, which is not a list or tuple of "
            f"them. One argument is a tuple with a comma: ({args!r:.100},)."
        )
    values = kwargs.values() if isinstance(kwargs, Mapping) else ()
    if PLAIN.issuperset(map(type, (*(args or ()), *values, *more))):
        return
    seen: set[int] = set()
    for place, value in [*_places(args, kwargs), *(("the message", part) for part in more)]:
        for owner, where, part in _walk(task, place, value, seen):
            if (refused := _refuse(part)) is not None:
                raise NotSerializable(owner, where, *refused)


def serialize(task: str, body: Any, serializer: str) -> tuple[str, str, Any]:
    """
    Return the content type, encoding and data of a message's body.

    Raises:
        NotSerializable: The error names the argument that the serializer refused.
    """
    # Message protocol 1 has everything in one dict.
    parts = body if isinstance(body, tuple) else (body["args"], body["kwargs"], body)
    args, kwargs, *embedded = parts
    check_arguments(task, args, kwargs, *(one for one in embedded if any(one.values())))
    try:
        content_type, encoding, data = dumps(body, serializer=serializer)
    except EncodeError as error:
        raise explain(task, args, kwargs, embedded, serializer, error) from error
    return content_type, encoding, data


def explain(
    task: str, args: Any, kwargs: Any, embedded: Any, serializer: str, error: EncodeError
) -> NotSerializable:
    """Return an error that names the argument that the serializer refused."""
    seen: set[int] = set()
    for place, value in [*_places(args, kwargs), ("the message", embedded)]:
        for owner, where, part in _walk(task, place, value, seen):
            try:
                dumps(part, serializer=serializer)
            except EncodeError as refused:
                hint = f"The serializer {serializer!r} says: {refused}. Send plain data instead."
                return NotSerializable(owner, where, _name(part), hint)
    return NotSerializable(task, "the message", "made of something", f"It says: {error}.")


def _walk(task: str, place: str, value: Any, seen: set[int]) -> Iterator[tuple[str, str, Any]]:
    """
    Yield the parts of a value, and then the value, each with its task and its place.

    The parts of a signature have its task, and places there.
    """
    if type(value) not in PLAIN and id(value) not in seen:
        seen.add(id(value))
        owner, inside = task, list[tuple[str, Any]]()
        if isinstance(value, Mapping) and "subtask_type" in value and "task" in value:
            owner, options = value["task"], value.get("options") or {}
            if "single_instance" in options:
                # Otherwise the error would appear only in the worker that sends it later.
                check_call_options(options["single_instance"])
            inside = [*_places(value.get("args"), value.get("kwargs")), ("its options", options)]
        elif isinstance(value, Mapping | list | tuple | set | frozenset):
            items = (*value.keys(), *value.values()) if isinstance(value, Mapping) else value
            inside = [(place, item) for item in items if type(item) not in PLAIN]
        for where, part in inside:
            yield from _walk(owner, where, part, seen)
    yield task, place, value


def _places(args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    for index, value in enumerate(args or ()):
        yield f"args[{index}]", value
    # If kwargs is not a mapping, Celery itself raises an error.
    for name, value in kwargs.items() if isinstance(kwargs, Mapping) else ():
        yield f"kwargs[{name!r}]", value


def _refuse(value: Any) -> tuple[str, str] | None:
    """Return a description of ``value`` and what to send instead; None: ``value`` is allowed."""
    if isinstance(value, Model):
        hint = "Pass the primary key, and read the row again in the task, where it is fresh."
        return _name(value), hint
    if isinstance(value, QuerySet):
        hint = "Pass a list of primary keys: list(queryset.values_list('pk', flat=True))."
        return f"a QuerySet of {value.model.__name__}", hint
    if isinstance(value, Iterator):
        return f"an instance of {type(value).__name__}", "It can be read only once. Pass a list."
    return None


def _name(value: Any) -> str:
    # Not type(): request.user is a lazy object around the real user.
    return f"an instance of {value.__class__.__name__}"


@lru_cache(maxsize=256)
def refuse_misspelt(name: str) -> None:
    """
    Refuse an option of a send that is one of ours, misspelt.

    Raises:
        ConfigurationError: The error names the option and the one that was meant.
    """
    meant = None if name in OURS else conf.closest(name, OURS, SLIP)
    if meant is not None:
        raise ConfigurationError(
            f"A task is sent with {name}=..., which is not an option of a send and does nothing. "
            f"Did you mean {meant!r}?"
        )


def find_misspelt(task: Any, ours: type) -> Iterator[tuple[str, str]]:
    """
    Yield each misspelt option of a task, and the option that was meant.

    Args:
        ours: The class with this app's options; the task's own class may not have them.
    """
    own = type(task)
    known = frozenset(_READ_BY_CELERY).union(*map(dir, (ours, *own.__bases__)))
    # Celery turns the options of @app.task into attributes of a class.
    for name, value in vars(own).items():
        is_odd = name not in known and name[:1] != "_" and not callable(value)
        if is_odd and (meant := conf.closest(name, known, SLIP)) is not None:
            yield name, meant
