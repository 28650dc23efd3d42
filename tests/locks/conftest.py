"""The losses of locks that are reported."""

from collections.abc import Iterator

import pytest

from django_celery_safe.signals import lock_lost
from tests.listening import receiving


@pytest.fixture
def losses() -> Iterator[list[str]]:
    """The names of the locks that were told to be lost."""
    told: list[str] = []
    with receiving(lock_lost, lambda name, **fields: told.append(name)):
        yield told
