"""Fixtures for the tests on real workers; one worker serves all tests of a module."""

from pathlib import Path

import pytest

from tests.worker.rooms import Room


@pytest.fixture
def room(tmp_path: Path) -> Room:
    """A room for this test alone."""
    return Room(tmp_path)
