"""Does something when this thread sends a certain statement to a database."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connections


@contextmanager
def at_statement(
    alias: str,
    begins: str,
    act: Callable[[], object],
    *,
    about: str = "",
    after: bool = False,
    times: float = math.inf,
) -> Iterator[list[str]]:
    """
    Act at statements of this thread in the block, whose errors are then its own; gives those.

    Args:
        begins: How the statements begin.
        about: What else stands in them.
        after: Act when a statement is answered, not before it is sent.
        times: At how many statements at most.
    """
    met: list[str] = []

    def run(execute: Any, sql: str, *more: Any) -> Any:
        is_meant = sql.startswith(begins) and about in sql and len(met) < times
        if is_meant:
            met.append(sql)
            if not after:
                act()
        answer = execute(sql, *more)
        if is_meant and after:
            act()
        return answer

    with connections[alias].execute_wrapper(run):
        yield met


def raising(error: BaseException) -> Callable[..., Any]:
    """Return a function that raises this."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    return fail
