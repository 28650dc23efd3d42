"""
Fixtures of the admin: one database with everything in it, and somebody who may do everything.

Commits are commits there, as they are in a project.
"""

from collections.abc import Iterator

import pytest

from django_celery_safe.locks.stores import local
from tests.admin.pages import Visitor, make_visitor
from tests.app.celery import app
from tests.conftest import MakeDatabase
from tests.routing import AllIn, routed_by
from tests.servers.databases import DatabaseKind


@pytest.fixture
def site(db_kind: DatabaseKind, make_database: MakeDatabase) -> Iterator[str]:
    """The database of the whole site, of the kind that this run is about."""
    with routed_by(AllIn(alias := make_database(db_kind, "site"))):
        yield alias


@pytest.fixture(autouse=True)
def _as_new() -> None:
    """Begin without locks in memory, and send by the test project's app: no test's before."""
    local.clear()
    app.set_current()


@pytest.fixture
def root(site: str) -> Visitor:
    """Somebody who may do everything."""
    return make_visitor(is_superuser=True)
