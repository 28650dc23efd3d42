"""The documentation says what the code says, and its links lead somewhere."""

import re
import tomllib

import pytest
from packaging.version import Version

from django_celery_safe.locks import stores
from tests.company.neighbours import NEIGHBOURS
from tests.docs.pages import ROOT, find_broken_link, names_in, page, pages
from tests.docs.reference import PAGES, renewed

PACKAGE = ROOT / "django_celery_safe"


def test_links_resolve() -> None:
    """Every relative link leads to a file, and to a heading in it."""
    faults = [find_broken_link(each, link) for each in pages() for link in each.links()]
    assert [fault for fault in faults if fault] == []


def test_every_page_is_reached() -> None:
    """Links from the start page of each language lead to every page of docs/ in it."""
    docs = [each for each in pages() if each.path.is_relative_to(ROOT / "docs")]
    for index in (page("docs/index.md"), page("docs/zh/index.md")):
        reached = {(index.path.parent / link.partition("#")[0]).resolve() for link in index.links()}
        language = {each.path for each in docs if each.is_chinese == index.is_chinese}
        assert language - reached == {index.path}


def test_llms() -> None:
    """A coding agent finds every page in llms.txt, which is short."""
    llms = page("llms.txt")
    listed = {(ROOT / link).resolve() for link in llms.links()}
    docs = {each for each in pages() if each.name.startswith("docs/") and not each.is_chinese}
    assert [each.name for each in docs if each.path not in listed] == []
    assert len(llms.text.splitlines()) < 60


def test_one_sentence_a_line() -> None:
    """A line of running text holds one sentence, so that a change shows as what it is."""
    faults = []
    for each in pages():
        text = re.sub(r"^```.*?^```$|^\|.*?$", "", each.text, flags=re.DOTALL | re.MULTILINE)
        text = re.sub(r"`[^`\n]*`", "code", text)
        # No digit before the dot: a numbered list begins with "1. ".
        found = re.findall(r".*[^\d\s][.!?] +[A-Z].*|.*[。！？][^\s”」）].*", text)
        faults += [f"{each.name}: {line}" for line in found]
    assert faults == []


def test_readme_commands() -> None:
    """The README's two commands are one line each, which sets up .venv by itself."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    for name, group, program in [
        ("demo", "demo", "example_project/manage.py demo"),
        ("tests", "test", '-m pytest -m "not long" -n 6 --dist worksteal'),
    ]:
        (block,) = (b for b in page("README.md").blocks() if b.marker == f"command: {name}")
        line = rf"python3 -m venv \.venv && .+ --group {group} && \.venv/bin/python {program}\n"
        assert (group in groups, bool(re.fullmatch(line, block.code))) == (True, True)


@pytest.mark.parametrize("name", PAGES)
def test_the_reference(name: str) -> None:
    """The reference says what docstrings, declarations and the commands' help say."""
    text = page(f"docs/reference/{name}.md").text
    assert text == renewed(name, text), "python -m tests.docs writes it anew"


def test_refused_caches() -> None:
    """The page on where locks live names every cache that is refused."""
    refused = page("docs/how-to/choose-where-locks-live.md").section("Refused caches")
    assert [path for path in stores.REFUSED if path.rpartition(".")[2] not in refused] == []


def test_contributing() -> None:
    """CONTRIBUTING.md has every folder of the package, and names what is where it says."""
    contributing = page("CONTRIBUTING.md")
    drawn = set(re.findall(r"\b(\w+(?:/|\.py))", contributing.section("Where things live")))
    rooms = {f"{init.parent.name}/" for init in PACKAGE.glob("*/__init__.py")}
    assert rooms - drawn == {"migrations/", "templatetags/"}
    assert [name for name in drawn if not any((r / name).exists() for r in (PACKAGE, ROOT))] == []
    for question, answer in contributing.rows("Where is …?"):
        file, *names = names_in(answer)
        source = (PACKAGE / file).read_text()
        for name in names:
            assert re.search(rf"^ *(def|class) {name}\b", source, re.MULTILINE), question


def test_neighbours() -> None:
    """The table of what was tested beside it has each neighbour."""
    rows = page("docs/reference/works-with.md").rows()
    for (beside, *_), name in zip(rows, NEIGHBOURS, strict=True):
        assert beside.startswith(name)


def test_versions() -> None:
    """Lower bounds, classifiers and the cells of ``nox -s grid`` name the same versions."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, grid = pyproject["project"], pyproject["tool"]["grid"]
    bounds = dict(one.split(">=") for one in project["dependencies"])
    bounds["python"] = project["requires-python"].removeprefix(">=")
    cells = page("docs/reference/works-with.md").rows("The grid")
    for column, name in enumerate(("python", "django")):
        classifiers = "\n".join(project["classifiers"]).lower()
        named = re.findall(rf"{name} :: (\d+\.\d+)$", classifiers, re.M)
        assert {cell[column] for cell in cells} == {*named}
        assert bounds[name] == min(named, key=Version)
    assert bounds["celery"] == grid["celery"][0]
    for _, _, *results in cells:
        assert len(results) == len(grid["celery"])
        assert all(re.fullmatch(r"passed \d{4}-\d\d-\d\d|not run: \S.*", each) for each in results)
