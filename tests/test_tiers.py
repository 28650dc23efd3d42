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


def run(
    pytester: pytest.Pytester, *arguments: str, tests: str = TESTS, processes: int = 0
) -> pytest.RunResult:
    """Run these tests in a folder of their own, by pytest's command line and without Django."""
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\nmarkers =\n  nightly\n  quarantine\n")
    pytester.makepyfile(test_tiers=tests)
    options = ["-p", "no:django", "-p", "no:randomly", "-p", "no:django_celery_safe"]
    options += ["-n", str(processes)] if processes else []
    return pytester.runpytest_subprocess(*options, *arguments)


@pytest.fixture(autouse=True)
def _path(pytester: pytest.Pytester, pytestconfig: pytest.Config) -> None:
    pytester.syspathinsert(pytestconfig.rootpath)


@pytest.mark.parametrize("processes", [0, 2])
def test_what_is_left_out_is_counted(pytester: pytest.Pytester, processes: int) -> None:
    """A run without ``-m`` leaves out both marks, and its last lines say so."""
    result = run(pytester, processes=processes)
    result.assert_outcomes(passed=1, deselected=0 if processes else 3)
    result.stdout.fnmatch_lines(
        ["left out: 1 nightly test (-m nightly*", "left out: 2 quarantine tests (-m quarantine*"]
    )


@pytest.mark.parametrize(
    ("asked", "passed"),
    [
        (["-m", "quarantine"], 2),
        (["-m", "nightly and not quarantine"], 1),
        (["-m", "not slow"], 1),
        (["test_tiers.py::test_doubtful[1]"], 1),
    ],
)
def test_what_is_asked_for_runs(pytester: pytest.Pytester, asked: list[str], passed: int) -> None:
    """``-m`` with the mark and the name of a test run what is left out otherwise."""
    run(pytester, *asked).assert_outcomes(passed=passed)


@pytest.mark.parametrize("arguments", ['"2026-11-26"', '"soon", "luck"'])
def test_a_quarantine_has_a_date_and_a_reason(pytester: pytest.Pytester, arguments: str) -> None:
    """Otherwise nothing runs, and the error shows how it is written."""
    tests = f"import pytest\n\n@pytest.mark.quarantine({arguments})\ndef test_it(): ...\n"
    result = run(pytester, "-m", "not slow", tests=tests)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(['*write quarantine("2026-11-26", "why it can fail")*'])
