"""A server that this machine can't have leaves out its tests, and says so."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers import MemcachedServer

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[1]


def test_with_memcached(memcached_server: MemcachedServer) -> None:
    """Be a test that needs a server."""
    assert memcached_server.running


@pytest.mark.parametrize(
    ("environment", "status", "expected"),
    [
        pytest.param({}, 0, "not run: memcached, 1 test\n", id="laptop"),
        pytest.param({"CI": "true"}, 1, "CI must run everything", id="ci"),
    ],
)
def test_a_missing_server_is_not_silent(
    environment: dict[str, str], status: int, expected: str
) -> None:
    """Tests of a missing server are skipped with a loud line, and fail under CI."""
    inherited = {name: value for name, value in os.environ.items() if name != "CI"}
    test = f"{__file__}::{test_with_memcached.__name__}"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", test, "--color=no"],
        cwd=ROOT,
        env={**inherited, "SAFE_TEST_PROGRAMS": "wheel", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, expected in run.stdout) == (status, True), run.stdout
