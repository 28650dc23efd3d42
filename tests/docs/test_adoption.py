"""The steps of the page on existing projects, done to such a project."""

from pathlib import Path

import pytest

from tests.commands import run_python
from tests.docs.pages import ROOT, Page, page

ADOPT = page("docs/how-to/adopt-in-an-existing-project.md")
PROJECT = Page(Path(__file__).with_name("adopted.md"))


def change(file: Path, diff: str) -> None:
    """Make the change of a diff; lines that are only new come last."""
    lines = diff.splitlines()
    old = "\n".join(line[1:] for line in lines if line[0] != "+")
    new = "\n".join(line[1:] for line in lines if line[0] != "-")
    text = file.read_text()
    if old:
        assert text.count(old) == 1, f"{file.name} has not, or not only once: {old}"
        file.write_text(text.replace(old, new))
    else:
        file.write_text(f"{text}\n{new}\n")


def run(folder: Path, *words: str) -> str:
    """Return what a program of the project prints; it has to succeed."""
    return run_python("-m", *words, env={"PYTHONPATH": f"{folder}:{ROOT}", "PATH": ""}, cwd=folder)


@pytest.mark.repository
def test_the_suite_of_a_project_that_adopts_it_stays_green(tmp_path: Path) -> None:
    """A project like cookiecutter-django's does what the page says."""
    for block in PROJECT.blocks():
        file = tmp_path / block.marker.removeprefix("file: ")
        file.parent.mkdir(parents=True, exist_ok=True)
        (file.parent / "__init__.py").touch()
        file.write_text(block.code)
    (tmp_path / "__init__.py").unlink()
    for step in ADOPT.headings(2):
        for block in ADOPT.blocks():
            if block.marker.startswith(f"{step[0]}: "):
                change(tmp_path / block.marker.removeprefix(f"{step[0]}: "), block.code)
    settings = "--ds=config.settings.test"
    printed = run(tmp_path, "pytest", "-q", "-p", "no:cacheprovider", "--nomigrations", settings)
    assert "5 passed" in printed
    checked = run(tmp_path, "django", "check", "--settings=config.settings.base")
    assert "no issues" in checked
    assert "SEND_ON_COMMIT" in (tmp_path / "config/settings/base.py").read_text()
