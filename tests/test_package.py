"""The package as it is published and imported: what is in it, and what it brings along."""

import json
import re
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.commands import run_python
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
    new, everything = json.loads(run_python("-c", IMPORTS))
    foreign = {name for name in new if name.partition(".")[0] != PACKAGE}
    assert foreign <= {"django.db.backends.signals"}
    for name in ("admin", "checks", "contrib", "inspection", "management", "models", "testing"):
        assert f"{PACKAGE}.{name}" not in new
    others = {"_pytest", "pymemcache", "pytest", "redis", "prometheus_client"}
    assert others.isdisjoint(everything)


@pytest.mark.nightly
@pytest.mark.repository
def test_the_wheel_and_the_sdist(tmp_path: Path) -> None:
    """The wheel has the package alone; the sdist builds the same, and an index can show both."""
    build("sdist", tmp_path)
    wheel = build_wheel(tmp_path)
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        (name,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(packed.read(name).decode())
    files = {
        str(path.relative_to(ROOT))
        for path in (ROOT / PACKAGE).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    ours = {name for name in names if ".dist-info/" not in name}
    assert ours == {*files, "pytest_django_celery_safe.py"}
    assert {f"{PACKAGE}/py.typed", f"{PACKAGE}/static/django_celery_safe/admin.css"} <= ours
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "sdist", filter="data")
    (source,) = (tmp_path / "sdist").iterdir()
    assert build_wheel(tmp_path / "again", source).read_bytes() == wheel.read_bytes()
    run_python("-m", "twine", "check", "--strict", str(wheel), str(sdist))
    # The page needs no file of the repository.
    description = str(metadata.get_payload())
    code = re.compile(r"^```.*?^```$|`[^`\n]*`", re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\(([^)]+)\)", code.sub("", description))
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    needed = map(Requirement, metadata.get_all("Requires-Dist", []))
    plain = {requirement.name for requirement in needed if "extra" not in str(requirement.marker)}
    assert plain == {"django", "celery"}
