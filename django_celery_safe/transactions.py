"""
What is known about the open transactions of this thread.

Django's ``TestCase`` wraps each test in ``atomic()`` blocks of its own; they
stand for "no transaction" and do not count here.
"""

from __future__ import annotations

from django.db import connections


def in_atomic(alias: str) -> bool:
    """Tell whether ``alias`` is inside an ``atomic()`` block that is not TestCase's."""
    connection = connections[alias]
    return any(not _is_of_testcase(block) for block in connection.atomic_blocks)


def is_manual(alias: str) -> bool:
    """
    Tell whether the project commits on ``alias`` itself: autocommit is off, without ``atomic()``.

    May connect, and raises the database's error if it can't.
    """
    connection = connections[alias]
    return not connection.in_atomic_block and not connection.get_autocommit()


def in_testcase_only(alias: str) -> bool:
    """Tell whether the only ``atomic()`` blocks open on ``alias`` are TestCase's."""
    connection = connections[alias]
    return bool(connection.atomic_blocks) and not in_atomic(alias)


def aliases_in_atomic() -> list[str]:
    """Return the aliases that are inside an ``atomic()`` block that is not TestCase's."""
    opened = [connection.alias for connection in connections.all(initialized_only=True)]
    return [alias for alias in opened if in_atomic(alias)]


def _is_of_testcase(block: object) -> bool:
    # Django marks them itself, for atomic(durable=True); see TestCase._enter_atomics.
    return bool(getattr(block, "_from_testcase", False))
