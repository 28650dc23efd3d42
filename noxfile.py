"""
Runs the tests on other versions, with the wheel that would be published, and checks by hand.

The versions stand in pyproject.toml: Python's and Django's are its classifiers, Celery's are in
``[tool.grid]``, and the oldest of the others are the lower bounds of what it depends on. Tests
run in an empty folder, which has them and nothing else of the repository. ``nox --list`` shows
the sessions; what follows ``--`` replaces the tests that a session runs.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from datetime import date
from itertools import product
from pathlib import Path

import nox
from packaging.requirements import Requirement
from packaging.version import Version

nox.needs_version = ">=2025.2"
nox.options.sessions = ["oldest", "newest"]

ROOT = Path(__file__).parent
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
GRID = PROJECT["tool"]["grid"]
#: The requirements of the tests; they need some of the extras, too.
TEST = nox.project.dependency_groups(PROJECT, "test")
TESTED = "[memcached,prometheus,redis]"
#: Extras that users install, whose lower bounds are promises.
EXTRAS = ("memcached", "mysql", "prometheus", "redis")
#: Most of the time the tests wait.
SIDE_BY_SIDE = ["-n", "6", "--dist", "worksteal"]
QUICK = ["-m", "not long and not repository", *SIDE_BY_SIDE]
#: The tests that meet most of Django, of Celery, of the clients and of real workers. Two
#: sessions run them beside each other in CI.
CORNER = [
    *QUICK,
    "-n3",
    "tests/admin/test_lock_pages.py",
    "tests/admin/test_projects.py",
    "tests/admin/test_table_pages.py",
    "tests/concurrency/test_canvas.py",
    "tests/contrib",
    "tests/delivery",
    "tests/locks/test_redis_variants.py",
    "tests/sending/test_carried.py",
    "tests/sending/test_unique.py",
    "tests/stages/test_finish.py",
    "tests/stages/test_step.py",
    "tests/tasks_backend",
    "tests/test_backends.py",
    "tests/worker/test_carried.py",
    "tests/worker/test_events.py",
]


#: Prints what is tested.
SHOW_VERSIONS = """
import platform
from importlib.metadata import version
names = "Django", "celery", "kombu", "redis", "django-redis"
print("Python", platform.python_version(), *(f"{name} {version(name)}" for name in names))
"""


def classified(prefix: str) -> list[str]:
    """Return the versions of the classifiers that begin with ``prefix``, oldest first."""
    pattern = re.compile(rf"{prefix} :: (\d+\.\d+)")
    found = map(pattern.fullmatch, PROJECT["project"]["classifiers"])
    return sorted((one[1] for one in found if one), key=Version)


PYTHONS = classified("Programming Language :: Python")
DJANGOS = classified("Framework :: Django")
CELERIES: list[str] = GRID["celery"]


def find_python(version: str) -> str | None:
    """Return the interpreter of a version, of pyenv or of the PATH; None: it is not there."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    installed = sorted(pyenv.glob(f"versions/{version}.*/bin/python"), reverse=True)
    for name in (*map(str, installed), shutil.which(f"python{version}")):
        # A shim of pyenv may stand for a version that is not chosen.
        if name and subprocess.run([name, "-V"], capture_output=True).returncode == 0:
            return name
    return None


FOUND = {version: path for version in PYTHONS if (path := find_python(version))}
NEWEST = max(FOUND, key=Version, default=PYTHONS[0])
#: Python, Django and Celery of each cell of the grid.
CELLS = [
    cell
    for cell in product(PYTHONS, DJANGOS, CELERIES)
    if Version(cell[0]) >= Version(GRID["django_needs"].get(cell[1], PYTHONS[0]))
]
#: Those whose interpreter is here, of which each day has one.
CELLS_HERE = [cell for cell in CELLS if cell[0] in FOUND] or CELLS
CELL_OF_THE_DAY = CELLS_HERE[date.today().toordinal() % len(CELLS_HERE)]


def lower_bounds() -> list[str]:
    """Return pins of the oldest version of everything that users install with the package."""
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    given = [*project["dependencies"], *(one for extra in EXTRAS for one in extras[extra])]
    bounds = (
        (requirement.name, bound.version)
        for requirement in map(Requirement, given)
        for bound in requirement.specifier
        if bound.operator == ">="
    )
    return [*(f"{name}=={version}" for name, version in bounds), *GRID["oldest"]]


def test_wheel(session: nox.Session, pins: Sequence[str], tests: Sequence[str]) -> None:
    """Install the wheel, as far as ``pins`` let it, and run tests beside it."""
    folder = Path(session.create_tmp()).resolve()
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(pins))
    session.install("-q", "hatchling", "hatch-fancy-pypi-readme")
    session.run("python", "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder), silent=True)
    wheel = max(folder.glob("*.whl"), key=os.path.getmtime)
    session.install("-q", "--upgrade", "-c", str(constraints), f"{wheel}{TESTED}", *TEST)
    # With `nox -r` there is a wheel of the same version already.
    session.install("-q", "--force-reinstall", "--no-deps", str(wheel))
    session.run("python", "-m", "pip", "check")
    session.run("python", "-c", SHOW_VERSIONS)
    empty = folder / "empty"
    shutil.rmtree(empty, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "tests", empty / "tests", ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", empty)
    session.chdir(empty)
    # A mark can't leave out what is not even imported without the repository.
    apart = [f"--ignore=tests/{name}" for name in ("browser", "docs", "example")]
    # The PATH of outside, because a wheel puts an old redis-server into that of the session.
    python = ["env", f"PATH={os.environ['PATH']}", f"{session.bin}/python"]
    session.run(*python, "-m", "pytest", *apart, *(session.posargs or tests), external=True)


@nox.session(python=FOUND.get(PYTHONS[0], PYTHONS[0]))
def oldest(session: nox.Session) -> None:
    """Run the tests of a corner with the oldest version of everything."""
    test_wheel(session, lower_bounds(), CORNER)


@nox.session(python=FOUND.get(NEWEST, NEWEST))
def newest(session: nox.Session) -> None:
    """Run the tests of a corner with the newest version of everything."""
    for version in PYTHONS[PYTHONS.index(NEWEST) + 1 :]:
        session.warn(f"not run: Python {version}, which is not here; the newest is {NEWEST}")
    test_wheel(session, [], CORNER)


@nox.session
@nox.parametrize(
    "python,django,celery",
    [
        nox.param(FOUND.get(python, python), *rest, id="-".join((python, *rest)))
        for python, *rest in CELLS
    ],
)
def grid(session: nox.Session, django: str, celery: str) -> None:
    """Run the tests of a corner with the newest patch of one Python, Django and Celery."""
    test_wheel(session, [f"django~={django}.0", f"celery~={celery}.0"], CORNER)


@nox.session(python=FOUND.get(CELL_OF_THE_DAY[0], CELL_OF_THE_DAY[0]))
def cell_of_the_day(session: nox.Session) -> None:
    """Run one cell of the grid, each day another."""
    _, django, celery = CELL_OF_THE_DAY
    test_wheel(session, [f"django~={django}.0", f"celery~={celery}.0"], CORNER)


@nox.session
def wheel(session: nox.Session) -> None:
    """Run all quick tests beside the wheel, those apart that need the repository."""
    test_wheel(session, [], QUICK)


@nox.session(python=FOUND.get(NEWEST, NEWEST))
def coverage(session: nox.Session) -> None:
    """
    Run all quick tests, those about SQL on PostgreSQL too; fail below the floor of coverage.

    With the newest Django, which has the tasks that a part of the package is for.
    """
    session.install("-q", "-e", f".{TESTED}", *TEST, "coverage>=7.10", "pytest-cov>=7")
    # A process that coverage watches can't be forked at any moment: its own lock may be taken.
    forks = "tests/locks/test_fork.py::test_a_child_forked_at_any_moment_can_lock"
    quick = ["-m", "not long", f"--deselect={forks}"]
    about_sql = ["-m", "sql and not long", "--db", "postgres", "--cov-append"]
    for options in [session.posargs] if session.posargs else [quick, about_sql]:
        measured = ["--cov", "--cov-report=", "--cov-fail-under=0", *SIDE_BY_SIDE]
        session.run("python", "-m", "pytest", *measured, *options)
    # pytest-cov reports a coverage below the floor, but pytest-xdist's exit status hides it.
    session.run("coverage", "report", "--skip-covered")


@nox.session(python=FOUND.get(NEWEST, NEWEST))
def company(session: nox.Session) -> None:
    """Play all flows beside all neighbours with the newest Django, which has tasks of its own."""
    neighbours = nox.project.dependency_groups(PROJECT, "company")
    session.install("-q", "-e", f".{TESTED}", *TEST, *neighbours)
    session.run("python", "-c", SHOW_VERSIONS)
    marks = "long or nightly"
    session.run("python", "-m", "pytest", "-m", marks, "tests/company", *session.posargs)


@nox.session
def audit(session: nox.Session) -> None:
    """Look for known vulnerabilities in what users install with the package."""
    session.install("-q", f".[{','.join(sorted(set(EXTRAS) - {'mysql'}))}]", "pip-audit>=2.9")
    session.run("pip-audit", "--skip-editable", *session.posargs)
