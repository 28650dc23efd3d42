"""Errors of a wrong call that show how the public function is called."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def with_usage(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap ``function`` so that Python's error about a wrong call says how it is called."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            # An error of the call itself has no frame below this one.
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                error.add_note(f"It is called as {_usage(function)}.")
            raise

    return call


def _usage(function: Callable[..., object]) -> str:
    parameters = inspect.signature(function).parameters
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for name, parameter in parameters.items()
        if name != "cls"
    ]
    return f"{function.__name__}{inspect.Signature(bare)}"
