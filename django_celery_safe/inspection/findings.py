"""Messages of ``manage.py check``, which ``manage.py celery_locks doctor`` shows too."""

from __future__ import annotations

from typing import Final

from django.core import checks
from django.core.checks import CheckMessage

from ..texts import printable

#: Stands before the id of a message, and is the tag of the checks.
PREFIX: Final = "django_celery_safe"


def fault(id_: str, text: str, hint: str) -> CheckMessage:
    """Return the message of a system check: an error or, if the id begins with W, a warning."""
    kind = checks.Error if id_.startswith("E") else checks.Warning
    return kind(printable(text), hint=hint, id=f"{PREFIX}.{id_}")
