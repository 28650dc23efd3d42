"""The database that a run of the tests is about, ``--db``, and what differs between them."""

from typing import Final

import pytest
from django.db import connections

from django_celery_safe.databases import MYSQL
from tests.servers.databases import DatabaseKind

#: What ``--db`` chooses from: each kind of server, and SQLite as a project should have it.
AXIS: Final[dict[str, DatabaseKind]] = {
    "sqlite": "sqlite-immediate",
    "postgres": "postgres",
    "mariadb": "mariadb",
}


def kind_of(request: pytest.FixtureRequest) -> DatabaseKind:
    """Return the kind that the test asks for by a parameter of the fixture, or that of ``--db``."""
    kind: DatabaseKind = getattr(request, "param", AXIS[request.config.option.db])
    return kind


def more_for_claim(alias: str) -> int:
    """Return how many statements more a claim takes where an UPDATE returns nothing."""
    return int(connections[alias].vendor == MYSQL)
