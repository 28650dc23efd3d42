"""
Findings, which ``manage.py check`` and ``manage.py celery_locks doctor`` show.

``lock_store`` examines the store of the locks for both; ``doctor`` measures that store's
behaviour; the package ``checks`` examines settings and tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from django.core import checks
from django.core.checks import CheckMessage

from ..texts import printable

#: Stands before the id of a message, and is the tag of the checks.
PREFIX: Final = "django_celery_safe"


class Verdict(StrEnum):
    """The severity of a finding."""

    #: The store keeps its guarantee.
    OK = "ok"
    #: It does not let two processes hold one lock, but it may come as a surprise.
    WARNING = "warning"
    #: Two processes can hold one lock, or the fence can let both of them write.
    UNSAFE = "unsafe"
    #: The check had no result.
    UNKNOWN = "unknown"


OK, WARNING, UNSAFE, UNKNOWN = Verdict


class Finding(NamedTuple):
    """
    The result of one check.

    Attributes:
        verdict: The severity.
        text: The fault and its meaning, in sentences.
        hint: The remedy, in sentences; "": there is none.
        values: The measurements, each with its unit in the name, such as ``median_ms``.
        check: The doctor's check that finds it, such as ``clock``.
    """

    verdict: Verdict
    text: str
    hint: str = ""
    values: Mapping[str, Any] = MappingProxyType({})
    check: str = ""

    @property
    def said(self) -> str:
        """The text and the hint."""
        return f"{self.text} {self.hint}".strip()

    def as_row(self) -> dict[str, Any]:
        """Return the finding as ``celery_locks doctor --json`` prints it."""
        values = dict(self.values)
        return {"check": self.check, "verdict": self.verdict, "said": self.said, "values": values}


def fault(id_: str, text: str, hint: str) -> CheckMessage:
    """Return the message of a system check: an error or, if the id begins with W, a warning."""
    kind = checks.Error if id_.startswith("E") else checks.Warning
    return kind(printable(text), hint=hint, id=f"{PREFIX}.{id_}")
