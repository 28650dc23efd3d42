"""
Which shared tasks the Celery apps of a test have.

A process of the suite has imported all modules of tests. Each app that a test makes would
take the shared tasks of all of them when it is first used, which takes longer than most tests.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from celery import _state

Finalizer = Callable[[Any], object]

IMPORT = re.compile(r"^\s*(?:from|import) (tests\.[\w.]+)(?: import ([\w, ]+))?", re.MULTILINE)


@contextmanager
def only_of(module: str) -> Iterator[None]:
    """
    Give apps that are made during the block no shared tasks of unrelated modules of tests.

    They have those of Celery, of the package, of the module, and of the modules of tests that
    it imports. A shared task that is defined during the block is forgotten at its end.
    """
    every: set[Finalizer] = _state._on_app_finalizers
    known = _find_imported(module)
    _state._on_app_finalizers = {one for one in every if _module_of(one) in known}
    try:
        yield
    finally:
        _state._on_app_finalizers = every


class _Known(set[str]):
    """Modules whose tasks a test may use; those that are no tests of ours always are."""

    def __contains__(self, name: object) -> bool:
        return not str(name).startswith("tests.") or super().__contains__(name)


@cache
def _find_imported(module: str) -> _Known:
    known, left = _Known(), [module]
    while left:
        name = left.pop()
        if set.__contains__(known, name) or name not in sys.modules:
            continue
        known.add(name)
        source = Path(str(sys.modules[name].__file__)).read_text()
        for package, names in IMPORT.findall(source):
            left += [package, *(f"{package}.{each}" for each in names.split(", "))]
    return known


def _module_of(finalizer: Finalizer) -> str:
    """Return where the task's function was defined; empty: it is one of Celery's own."""
    cells = [cell.cell_contents for cell in finalizer.__closure__ or ()]
    return next((str(one.__module__) for one in cells if inspect.isfunction(one)), "")
