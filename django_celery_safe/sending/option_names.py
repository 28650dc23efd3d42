"""
Finding misspelt options of a task or a send: Celery accepts any name, and ignores unknown ones.

Names that resemble no option are left alone, because projects have attributes of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from inspect import signature
from typing import Any, Final

from celery import Celery, Task
from kombu import Producer

from .. import conf
from ..exceptions import ConfigurationError

#: How similar two names must be, up to 1.0, for one to count as a misspelling of the other.
SLIP: Final = 0.8

#: Functions whose parameters are options of a send.
_SENDERS: Final = (Task.apply_async, Celery.send_task, Producer.publish)
#: Options of a send that are not parameters of these functions; those of the last line are ours.
_MORE: Final = (
    "queue", "exchange_type", "ignore_result",
    "outbox", "using", "send_on_commit", "single_instance",
)  # fmt: skip
#: Every option of a send that does something.
CALL_OPTIONS: Final = frozenset(_MORE).union(*(signature(one).parameters for one in _SENDERS)) - {
    "self",
    "name",
    "body",
    "options",
    "properties",
}

#: Names of options of ``@app.task`` that Celery's task class does not have as attributes.
_READ_BY_CELERY: Final = (
    *signature(Celery._task_from_fun).parameters,
    "autoretry_for",
    "dont_autoretry_for",
    "retry_kwargs",
    "retry_backoff",
    "retry_backoff_max",
    "retry_jitter",
    "lazy",
    "shared",
)


def refuse_misspelt(task: str, options: Iterable[str]) -> None:
    """
    Refuse a misspelt option of a send.

    Raises:
        ConfigurationError: The error names the option and the one that was meant.
    """
    if "stamped_headers" in options:
        return  # stamps are among the options, under any name
    for name in options:
        meant = None if name in CALL_OPTIONS else conf.closest(name, CALL_OPTIONS, SLIP)
        if meant is not None:
            raise ConfigurationError(
                f"Task {task} is sent with {name}=..., which is not an option of a send and does "
                f"nothing. Did you mean {meant!r}?"
            )


def find_misspelt(task: Any, ours: type) -> Iterator[tuple[str, str]]:
    """
    Yield each misspelt option of a task, and the option that was meant.

    Args:
        ours: The class with this app's options; the task's own class may not have them.
    """
    own = type(task)
    known = _known_options(ours, *own.__bases__)
    # Celery turns the options of @app.task into attributes of a class.
    for name, value in vars(own).items():
        is_odd = name not in known and name[:1] != "_" and not callable(value)
        if is_odd and (meant := conf.closest(name, known, SLIP)) is not None:
            yield name, meant


@lru_cache(maxsize=64)
def _known_options(*classes: type) -> frozenset[str]:
    return CALL_OPTIONS.union(_READ_BY_CELERY, *map(dir, classes))
