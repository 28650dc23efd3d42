"""The lab of a test."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MakeDatabase, require
from tests.faults.lab import Lab
from tests.servers import PostgresServer, Server, ServerPool


@pytest.fixture
def lab(servers: ServerPool, make_database: MakeDatabase, tmp_path: Path) -> Iterator[Lab]:
    """A lab whose servers are the test's own; only PostgreSQL serves other tests, too."""
    folder = tmp_path / "witness"
    folder.mkdir()
    with ServerPool() as own:

        def find(kind: type[Server]) -> Any:
            return require(servers if kind is PostgresServer else own, kind)

        with Lab(folder, find, make_database) as made:
            yield made
