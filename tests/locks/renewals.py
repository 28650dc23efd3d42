"""Renewals of leases, as a test sees them in the store."""

import math
from typing import Any

from django_celery_safe import find_lock
from tests.processes import wait_for


def wait_for_renewal(name: str, **options: Any) -> None:
    """
    Wait until the rest of a lock's lease grows, as nothing else but a renewal lets it.

    Args:
        options: Arguments of ``find_lock``, such as ``cache``.
    """
    last = math.inf

    def grows() -> bool:
        nonlocal last
        found = find_lock(name, **options)
        assert found is not None
        assert found.remaining is not None
        before, last = last, found.remaining
        return last > before

    wait_for(grows, 30, "it is not renewed")
