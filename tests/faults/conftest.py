"""The lab of a test."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import MakeDatabase, require
from tests.faults.lab import Lab
from tests.servers import ServerPool


@pytest.fixture
def lab(make_database: MakeDatabase, tmp_path: Path) -> Iterator[Lab]:
    """A lab whose servers are the test's own; only PostgreSQL serves other tests, too."""
    folder = tmp_path / "witness"
    folder.mkdir()
    with ServerPool() as servers, Lab(folder, partial(require, servers), make_database) as made:
        yield made
