"""The databases on which the tests of what a database keeps run, one after the other."""

from typing import Any, Final

import pytest
from django.db import connections

from django_celery_safe.databases import MYSQL

#: MariaDB, where the tests of PostgreSQL and SQLite are run once more, in a tier of their own.
LATER_MARIADB: Final = pytest.param("mariadb", marks=pytest.mark.mariadb)
#: Each kind of server, and SQLite as a project should have it.
KINDS: Final[list[Any]] = ["postgres", "sqlite-immediate", LATER_MARIADB]


def words_of_change(alias: str) -> list[str]:
    """Return the statements of a change that returns its rows: MariaDB has to look for them."""
    returns = connections[alias].vendor != MYSQL
    return ["UPDATE"] if returns else ["SELECT", "UPDATE", "SELECT"]


def more_for_claim(alias: str) -> int:
    """Return how many statements more a claim takes where an UPDATE returns nothing."""
    return int(connections[alias].vendor == MYSQL)


def quoted(alias: str, statement: str) -> str:
    """Return a statement with names quoted by `\"` as this database quotes them."""
    return statement.replace('"', connections[alias].ops.quote_name("x")[0])
