"""
The pytest fixture of ``django_celery_safe.testing``; pytest loads it by an entry point.

It does so in every project that the package is installed beside, also where no Django settings
are. So this module is not a part of the package, and imports it when a test asks for the fixture.
``-p no:django_celery_safe`` turns it off.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def locks_in_memory() -> Iterator[None]:
    """Keep locks in memory for one test; none is held before and after."""
    from django_celery_safe import testing

    with testing.locks_in_memory():
        yield
