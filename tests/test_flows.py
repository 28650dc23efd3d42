"""The calls between files that each common flow makes stay within limits."""

import pytest

from tests.commands import run_python
from tests.flows import LIMITS
from tests.versions import IS_CELERY_57


@pytest.mark.skipif(not IS_CELERY_57, reason="older versions of Celery need more calls of ours")
def test_no_flow_makes_more_calls_between_files_than_its_limit() -> None:
    """``python -m tests.flows`` has a line for each flow, and finds none beyond its limit."""
    lines = run_python("-m", "tests.flows").splitlines()
    assert [line.partition("  ")[0].strip() for line in lines] == list(LIMITS)
