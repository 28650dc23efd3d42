"""The messages of the checks, numbered."""

from __future__ import annotations

from typing import Final

from django.core import checks
from django.core.checks import CheckMessage

from ..texts import printable

PREFIX: Final = "django_celery_safe"


def error(number: int, message: str, hint: str) -> CheckMessage:
    """Return a message about what can't work."""
    return checks.Error(printable(message), hint=hint, id=f"{PREFIX}.E{number:03}")


def warning(number: int, message: str, hint: str) -> CheckMessage:
    """Return a message about what works until it does not."""
    return checks.Warning(printable(message), hint=hint, id=f"{PREFIX}.W{number:03}")
