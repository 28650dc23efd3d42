"""What a run of pytest leaves out, and how it is asked for."""

import pytest

pytest_plugins = ["pytester"]

CONFTEST = """
from tests.tiers import pytest_collection_modifyitems, start_counting, write_left_out
from tests.tiers import pytest_sessionfinish, pytest_testnodedown

def pytest_configure(config):
    start_counting(config)

def pytest_terminal_summary(terminalreporter):
    write_left_out(terminalreporter)
"""

TESTS = """
import pytest

def test_plain(): ...

@pytest.mark.nightly
def test_nightly(): ...

@pytest.mark.quarantine("2026-11-26", "0.6 s lease")
@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_doubtful(number): ...
"""


def test_what_is_left_out_is_counted(
    pytester: pytest.Pytester, pytestconfig: pytest.Config
) -> None:
    """A run without ``-m`` leaves out both marks, and its last lines say so."""
    pytester.syspathinsert(pytestconfig.rootpath)
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\nmarkers =\n  nightly\n  quarantine\n")
    pytester.makepyfile(test_tiers=TESTS)
    options = ["-p", "no:django", "-p", "no:randomly", "-p", "no:django_celery_safe", "-n", "2"]
    result = pytester.runpytest_subprocess(*options)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["left out: 1 nightly test (-m nightly*", "left out: 2 quarantine tests (-m quarantine*"]
    )
