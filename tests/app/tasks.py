"""Tasks that many tests use."""

from pathlib import Path

from celery import shared_task

from django_celery_safe import SafeTask
from tests.processes import Journal


@shared_task(base=SafeTask)
def note(journal: str, effect: str = "noted", value: object = None) -> object:
    """Write one line into a journal and return ``value``."""
    Journal(Path(journal)).write(effect, value=value)
    return value


@shared_task(base=SafeTask)
def add(x: int, y: int = 0) -> int:
    """Return the sum."""
    return x + y


@shared_task(base=SafeTask)
def total(numbers: list[int]) -> int:
    """Return the sum of a list."""
    return sum(numbers)
