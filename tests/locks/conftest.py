"""The losses of locks that are reported, and locks in the database that a run is about."""

from collections.abc import Iterator

import pytest
from pytest_django import Settings

from django_celery_safe.signals import lock_lost
from tests.listening import receiving


@pytest.fixture
def losses() -> Iterator[list[str]]:
    """The names of the locks that were told to be lost."""
    told: list[str] = []
    with receiving(lock_lost, lambda name, **fields: told.append(name)):
        yield told


@pytest.fixture
def in_database(db_alias: str, settings: Settings) -> str:
    """Locks live in a database of this test; gives its alias."""
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": db_alias}
    return db_alias
