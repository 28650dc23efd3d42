"""The documentation says what the code says, and its links lead somewhere."""

import re
import tomllib
from datetime import timedelta

from django.dispatch import Signal
from packaging.version import Version

from django_celery_safe import conf, exceptions, signals
from django_celery_safe.locks import stores
from tests.company.neighbours import NEIGHBOURS
from tests.docs import events
from tests.docs.pages import ROOT, find_broken_link, names_in, page, pages

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
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name, extra, program in [
        ("demo", "demo", "example_project/manage.py demo"),
        ("tests", "test", '-m pytest -m "not long" -n 6 --dist worksteal'),
    ]:
        (block,) = (b for b in page("README.md").blocks() if b.marker == f"command: {name}")
        assert f"pip install -q -e '.[{extra}]' && .venv/bin/python {program}\n" in block.code
        assert extra in project["optional-dependencies"]


def test_settings() -> None:
    """The settings page has every setting, in order, with its default."""
    settings = page("docs/reference/settings.md")
    listed = {
        name: eval(names_in(settings.section(f"`{name}`"))[0], {"timedelta": timedelta})
        for name in settings.headings(2)
    }
    assert list(listed.items()) == list(conf.DEFAULTS.items())


def test_signals() -> None:
    """The page of events is what the declarations say, and every signal of theirs is public."""
    assert page("docs/reference/signals.md").text.endswith(events.MARK + events.made())
    public = {name: value for name, value in vars(signals).items() if isinstance(value, Signal)}
    declared = events.declared().items()
    assert public == {n: ways[0].signal for n, ways in declared if ways[0].signal is not None}


def test_errors() -> None:
    """The table of errors has the bases of each."""
    for name, bases, _ in page("docs/reference/errors.md").rows():
        found = getattr(exceptions, names_in(name)[0])
        assert names_in(bases) == [base.__name__ for base in found.__bases__]


def test_refused_caches() -> None:
    """The page on stores names every cache that is refused."""
    refused = page("docs/explanation/stores.md").section("Refused uses, and why")
    assert [path for path in stores.REFUSED if path.rpartition(".")[2] not in refused] == []


def test_contributing() -> None:
    """CONTRIBUTING.md names files and folders that exist, and what is defined in them."""
    contributing = page("CONTRIBUTING.md")
    folders = [n for row in contributing.rows("Where things live") for n in names_in(row[0])]
    assert [folder for folder in folders if not (ROOT / folder).exists()] == []
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
    cells = page("docs/reference/versions.md").rows("The grid")
    for column, name in enumerate(("python", "django")):
        classifiers = "\n".join(project["classifiers"]).lower()
        named = re.findall(rf"{name} :: (\d+\.\d+)$", classifiers, re.M)
        assert {cell[column] for cell in cells} == {*named, *grid.get(f"{name}_untested", ())}
        assert bounds[name] == min(named, key=Version)
    assert bounds["celery"] == grid["celery"][0]
    for _, _, *results in cells:
        assert len(results) == len(grid["celery"])
        assert all(re.fullmatch(r"passed \d{4}-\d\d-\d\d|not run: \S.*", each) for each in results)
