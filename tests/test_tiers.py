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
@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.mariadb)])
def test_doubtful(number): ...
"""


@pytest.fixture
def run(pytester: pytest.Pytester, pytestconfig: pytest.Config) -> "Run":
    """Run the tests above in a folder of their own."""
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\nmarkers =\n  nightly\n  quarantine\n  mariadb\n")
    pytester.makepyfile(test_tiers=TESTS)
    pytester.syspathinsert(pytestconfig.rootpath)
    return Run(pytester)


class Run:
    """Runs pytest by its command line, without Django."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.pytester = pytester

    def __call__(self, *arguments: str) -> pytest.RunResult:
        """Return what became of it."""
        options = ["-p", "no:django", "-p", "no:randomly", "-p", "no:django_celery_safe"]
        return self.pytester.runpytest_subprocess(*options, *arguments)


@pytest.mark.parametrize("processes", [(), ("-n", "2")], ids=["one process", "two processes"])
def test_what_is_left_out_is_counted(run: Run, processes: tuple[str, ...]) -> None:
    """A run without ``-m`` leaves out both marks, and its last lines say so."""
    result = run(*processes)
    result.assert_outcomes(passed=1, deselected=0 if processes else 3)
    result.stdout.fnmatch_lines(
        ["left out: 1 nightly test (-m nightly*", "left out: 2 quarantine tests (-m quarantine*"]
    )


@pytest.mark.parametrize(
    ("asked", "passed"),
    [
        (["-m", "quarantine"], 2),
        (["-m", "mariadb and not quarantine"], 0),
        (["-m", "nightly or mariadb"], 2),
        (["-m", "not slow"], 1),
        (["test_tiers.py::test_doubtful"], 2),
        (["test_tiers.py::test_doubtful[1]"], 1),
        (["test_tiers.py"], 1),
    ],
)
def test_what_is_asked_for_runs(run: Run, asked: list[str], passed: int) -> None:
    """``-m`` with the mark and the name of a test run what is left out otherwise."""
    run(*asked).assert_outcomes(passed=passed, deselected=4 - passed if "-m" in asked else None)


@pytest.mark.parametrize("arguments", ["", '"2026-11-26"', '"soon", "luck"', '"2026-11-26", " "'])
def test_a_quarantine_has_a_date_and_a_reason(run: Run, arguments: str) -> None:
    """Otherwise nothing runs, and the error shows how it is written."""
    mark = f"@pytest.mark.quarantine({arguments})"
    run.pytester.makepyfile(test_tiers=f"import pytest\n\n{mark}\ndef test_it(): ...\n")
    result = run("-m", "not slow")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(['*write quarantine("2026-11-26", "why it can fail")*'])
