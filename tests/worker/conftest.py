"""Fixtures for the tests on real workers; one worker serves all tests of a module."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.rooms import Room


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    """A room for this test alone, open in the end."""
    room = Room(tmp_path)
    yield room
    room.open()
