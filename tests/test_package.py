"""The package as it is published and imported: what is in it, and what it brings along."""

import json
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.docs.pages import ROOT
from tests.docs.walk import build, build_wheel

PACKAGE = "django_celery_safe"
#: Prints what an import brings along, beside what a project has imported of Django and Celery.
IMPORTS = """
import json, sys
import celery.backends.rpc, celery.contrib.django.task, django.core.checks, django.db.models
before = set(sys.modules)
import django_celery_safe
print(json.dumps([sorted(set(sys.modules) - before), sorted(sys.modules)]))
"""


def test_an_import_brings_nothing_else_along() -> None:
    """Neither models nor the driver of a store is imported with the package, nor any test tool."""
    printed = subprocess.check_output([sys.executable, "-c", IMPORTS], text=True)
    new, everything = json.loads(printed)
    foreign = {name for name in new if name.partition(".")[0] != PACKAGE}
    assert foreign <= {"django.db.backends.signals"}
    for name in ("admin", "checks", "contrib", "inspection", "management", "models", "testing"):
        assert f"{PACKAGE}.{name}" not in new
    others = {"_pytest", "pymemcache", "pytest", "redis", "valkey", "prometheus_client"}
    assert others.isdisjoint(everything)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    build("sdist", folder)
    build_wheel(folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    """The wheel, to be read."""
    (path,) = built.glob("*.whl")
    return zipfile.ZipFile(path)


def metadata_of(wheel: zipfile.ZipFile) -> Message:
    """Return what the package says of itself."""
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


@pytest.mark.nightly
@pytest.mark.repository
def test_the_wheel_has_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    """It has every file of the package, and of pytest's plugin; tests stay outside."""
    files = {
        str(path.relative_to(ROOT))
        for path in (ROOT / PACKAGE).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == {*files, "pytest_django_celery_safe.py"}
    for name in (
        "py.typed",
        "migrations/0001_initial.py",
        "locale/zh_Hans/LC_MESSAGES/django.mo",
        "static/django_celery_safe/admin.css",
        "templates/admin/django_celery_safe/change_form.html",
    ):
        assert f"{PACKAGE}/{name}" in packed


@pytest.mark.nightly
@pytest.mark.repository
def test_the_sdist_builds_the_same_wheel(
    built: Path, wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    """Byte for byte."""
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as packed:
        packed.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    again = build_wheel(tmp_path, source)
    assert again.read_bytes() == Path(str(wheel.filename)).read_bytes()


@pytest.mark.nightly
@pytest.mark.repository
def test_a_package_index_can_show_it(built: Path, wheel: zipfile.ZipFile) -> None:
    """twine finds no fault, and the page needs no file of the repository."""
    packed = [str(path) for path in built.iterdir()]
    command = [sys.executable, "-m", "twine", "check", "--strict", *packed]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    description = str(metadata_of(wheel).get_payload())
    assert description.startswith("# django_celery_safe")
    assert "](docs/" not in description


@pytest.mark.nightly
@pytest.mark.repository
def test_it_needs_django_and_celery_alone(wheel: zipfile.ZipFile) -> None:
    """Everything else is an extra."""
    needed = map(Requirement, metadata_of(wheel).get_all("Requires-Dist", []))
    plain = {requirement.name for requirement in needed if "extra" not in str(requirement.marker)}
    assert plain == {"django", "celery", "kombu"}


@pytest.mark.repository
def test_versions_are_bounds_and_classifiers() -> None:
    """The oldest version that is tested is the lower bound, so that no older one is promised."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = pyproject["project"]
    bounds = dict(one.split(">=") for one in project["dependencies"])
    bounds["python"] = project["requires-python"].removeprefix(">=")

    def oldest(name: str) -> str:
        versions = re.findall(rf"{name} :: (\d+\.\d+)$", "\n".join(project["classifiers"]), re.M)
        return str(min(map(Version, versions)))

    assert bounds["python"] == oldest("Python")
    assert bounds["django"] == oldest("Django")
    assert bounds["celery"] == pyproject["tool"]["grid"]["celery"][0]
