"""The documentation lists exactly the names of the code, and its links lead somewhere."""

import ast
import inspect
import json
import re
import tomllib
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from datetime import timedelta
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from django.core.management import call_command
from django.core.management.base import BaseCommand
from django.dispatch import Signal
from django.utils import timezone
from packaging.version import Version

import django_celery_safe
from django_celery_safe import (
    cache_lock,
    checks,
    conf,
    exceptions,
    idempotent,
    signals,
    stages,
    testing,
)
from django_celery_safe.databases import Now
from django_celery_safe.emitting import Event
from django_celery_safe.inspection.locks import LockRow
from django_celery_safe.inspection.records import RecordRow
from django_celery_safe.locks import stores
from django_celery_safe.management.commands import (
    celery_idempotency,
    celery_locks,
    celery_outbox,
)
from django_celery_safe.models import (
    IdempotencyRecord,
    IdempotencyRecords,
    OutboxMessage,
    OutboxMessages,
    StageRun,
    StageStep,
)
from tests.company.neighbours import NEIGHBOURS
from tests.docs import events
from tests.docs.pages import ROOT, Page, find_broken_link, names_in, page, pages

PACKAGE = ROOT / "django_celery_safe"

every_page = pytest.mark.parametrize("each", pages(), ids=lambda each: each.name)


@every_page
def test_links_resolve(each: Page) -> None:
    """Every relative link leads to a file, and to a heading in it."""
    assert [broken for link in each.links() if (broken := find_broken_link(each, link))] == []


def test_every_page_is_reached() -> None:
    """Links from the start page of each language lead to every page of docs/ in it."""
    docs = [each for each in pages() if each.path.is_relative_to(ROOT / "docs")]
    for index in (page("docs/index.md"), page("docs/zh/index.md")):
        reached = {(index.path.parent / link.partition("#")[0]).resolve() for link in index.links()}
        language = {each.path for each in docs if each.is_chinese == index.is_chinese}
        assert language - reached == {index.path}


@every_page
def test_one_sentence_a_line(each: Page) -> None:
    """A line of running text holds one sentence, so that a change shows as what it is."""
    text = re.sub(r"^```.*?^```$|^\|.*?$", "", each.text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`\n]*`", "code", text)
    # No digit before the dot: a numbered list begins with "1. ".
    assert re.findall(r".*[^\d\s][.!?] +[A-Z].*", text) == []
    assert re.findall(r".*[。！？][^\s”」）].*", text) == []


@pytest.mark.parametrize(
    ("name", "extra", "program"),
    [
        ("demo", "demo", "example_project/manage.py demo"),
        ("tests", "test", '-m pytest -m "not long" -n 6 --dist worksteal'),
    ],
)
def test_readme_command(name: str, extra: str, program: str) -> None:
    """The README's two commands are one line each, which sets up .venv by itself."""
    (block,) = (b for b in page("README.md").blocks() if b.marker == f"command: {name}")
    assert block.language == "bash"
    assert block.code == (
        f"python3 -m venv .venv && .venv/bin/pip install -q -e '.[{extra}]' "
        f"&& .venv/bin/python {program}\n"
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extra in project["optional-dependencies"]


def test_settings() -> None:
    """The settings page has every setting, in order, with its default."""
    settings = page("docs/reference/settings.md")
    listed = {
        name: eval(names_in(settings.section(f"`{name}`"))[0], {"timedelta": timedelta})
        for name in settings.headings(2)
    }
    assert list(listed.items()) == list(conf.DEFAULTS.items())


def test_checks() -> None:
    """The checks page has every id that a check can give, twice: in its table and by itself."""
    listed = page("docs/reference/checks.md")
    in_table = [names_in(row[0])[0] for row in listed.rows()]
    assert listed.headings(2) == in_table
    assert sorted(in_table) == sorted(set(check_ids()))


def test_signals() -> None:
    """The page of events is what the declarations say, and every signal of theirs is public."""
    assert page("docs/reference/signals.md").text.endswith(events.MARK + events.made())
    public = {name: value for name, value in vars(signals).items() if isinstance(value, Signal)}
    sent = {
        name: ways[0].signal
        for name, ways in events.declared().items()
        if isinstance(ways[0], Event)
    }
    assert public == sent


def test_errors() -> None:
    """The errors page has every class, in order, with what it derives from."""
    listed = [
        (names_in(name)[0], names_in(bases)) for name, bases, _ in page(ERRORS).rows(heading=None)
    ]
    classes = [
        (name, [base.__name__ for base in found.__bases__])
        for name, found in vars(exceptions).items()
        if is_error(found) and found.__module__ == exceptions.__name__
    ]
    assert listed == classes


def test_error_attributes() -> None:
    """The attributes that the errors page names are those of the class."""
    for name, _, text in page(ERRORS).rows():
        _, _, attributes = text.partition("Has ")
        own = inspect.signature(getattr(exceptions, names_in(name)[0]).__init__).parameters
        unknown = set(names_in(attributes)) - set(own)
        assert not unknown, name


def test_public_names() -> None:
    """The API page has every name that can be imported from the package, errors apart."""
    public = {
        name
        for name in django_celery_safe.__all__
        if not is_error(getattr(django_celery_safe, name))
    }
    assert set(page(API).headings(2)) == public
    errors = {names_in(row[0])[0] for row in page(ERRORS).rows()}
    assert errors == set(django_celery_safe.__all__) - public


@pytest.mark.parametrize(
    ("where", "module"),
    [
        ("docs/reference/api.md", django_celery_safe),
        ("docs/reference/stages.md", SimpleNamespace(**vars(stages), StageRun=StageRun)),
        ("docs/reference/testing.md", testing),
    ],
    ids=["api", "stages", "testing"],
)
def test_signatures(where: str, module: Any) -> None:
    """Every signature on a reference page is that of the code, members of classes included."""
    for written, code in signature_pairs(page(where), module):
        assert parameters_written(written) == parameters_of(code), written.name


@pytest.mark.parametrize("name", ["CacheLock", "HeldLock", "SafeTask", "IdempotentMixin", "Claim"])
def test_members(name: str) -> None:
    """Every public member of a class is on its part of the API page."""
    own = [cls for cls in getattr(django_celery_safe, name).__mro__ if is_ours(cls)]
    members = {member for cls in own for member in vars(cls) if not member.startswith("_")}
    members -= {"abstract"}
    section = page(API).section(name)
    assert {member for member in members if not re.search(rf"\b{member}\b", section)} == set()


def test_options_of_the_backend() -> None:
    """The page on Django's tasks has every key of OPTIONS; Django 5.2 can't import the code."""
    source = (PACKAGE / "backends" / "backend.py").read_text()
    (options,) = re.findall(r"^OPTIONS: .* = \{(.*)\}$", source, re.MULTILINE)
    rows = page("docs/reference/django-tasks.md").rows("Options")
    assert [names_in(row[0])[0] for row in rows] == re.findall(r'"(\w+)":', options)


def test_stages() -> None:
    """The page on stages has every public name, the models and the tasks."""
    models_and_tasks = {"StageRun", "StageStep", "sweep_stages", "prune_stages"}
    assert set(page(STAGES).headings(2)) == {*stages.__all__, *models_and_tasks}


@pytest.mark.parametrize("name", ["Plan", "Entry", "Progress", "StageProgress", "Status"])
def test_members_of_stages(name: str) -> None:
    """Every public member of what stages return is on its part of the page."""
    members = {member for member in vars(getattr(stages, name)) if not member.startswith("_")}
    section = page(STAGES).section(name)
    assert {member for member in members if not re.search(rf"\b{member}\b", section)} == set()


@pytest.mark.parametrize("model", [StageRun, StageStep], ids=["run", "step"])
def test_querysets_of_stages(model: Any) -> None:
    """A model's part of the page has every state of its queryset, and no method that is none."""
    queryset = type(model.objects.all())
    methods = {name: found for name, found in vars(queryset).items() if inspect.isfunction(found)}
    states = {
        name
        for name, found in methods.items()
        if inspect.get_annotations(found)["return"] == queryset.__name__
    }
    text = page(STAGES).section(model.__name__)
    asked, _, ours = text.partition("\nIts queryset ")[2].partition("\nAll other ")
    listed = set(re.findall(r"^\| `(\w+)\(", asked, re.MULTILINE))
    assert listed <= set(methods)
    assert states == (listed & states) | {name.rstrip("()") for name in names_in(ours)}


@pytest.mark.parametrize(("model", "which"), [(StageRun, 0), (StageStep, 1)], ids=["run", "step"])
def test_columns_of_stages(model: Any, which: int) -> None:
    """The page on how stages work has every column of a run and of a step, their keys apart."""
    section = page("docs/explanation/how-stages-work.md").section("Columns of the rows")
    table = section.split("| column |")[which + 1]
    cells = re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE)
    listed = [name for cell in cells for name in names_in(cell)]
    assert sorted(listed) == sorted({field.name for field in model._meta.fields} - {"id"})


def test_members_of_a_run() -> None:
    """Every property and method of a run is on its part of the page."""
    members = {
        name
        for name, found in vars(StageRun).items()
        if not name.startswith("_")
        and (isinstance(found, property) or inspect.isfunction(found))
        and is_ours(getattr(found, "fget", found))
    }
    listed = {name for row in page(STAGES).rows("StageRun") for name in names_in(row[0])}
    assert {name.removesuffix("()") for name in listed} == members


def test_options_of_single_instance() -> None:
    """The how-to names every way to treat a conflict, and no other."""
    from django_celery_safe.concurrency.options import OnConflict

    here = page("docs/how-to/run-one-instance-of-a-task.md")
    rows = here.rows("Choose what happens on a conflict")
    assert [json.loads(names_in(row[0])[0]) for row in rows] == list(OnConflict.__args__)


def test_json_keys(locks_in_memory: None) -> None:
    """The commands page has the keys of ``celery_locks --json``, in order."""
    printed = StringIO()
    with cache_lock("feed:42") as lock:
        assert lock
        call_command("celery_locks", "--json", stdout=printed)
    listed = [names_in(row[0])[0] for row in page(COMMANDS).rows("JSON")]
    assert listed == list(json.loads(printed.getvalue())[0])


def test_json_types() -> None:
    """A key may be null on the commands page exactly if it is null for an unknown holder."""
    rows = {names_in(key)[0]: kind for key, kind, _ in page(COMMANDS).rows("JSON")}
    nothing = LockRow(django_celery_safe.HeldLock("feed:42")).as_json()
    assert {key for key, kind in rows.items() if "null" in kind} == {
        key for key, value in nothing.items() if value is None
    }


def test_command_options() -> None:
    """The commands page has every action and option of ``celery_locks`` that is its own."""
    text = page(COMMANDS).section("celery_locks")
    assert {name for name in own_arguments(celery_locks.Command()) if name not in text} == set()


def test_outbox_command_options() -> None:
    """The commands page has every action and option of ``celery_outbox`` that is its own."""
    text = page(COMMANDS).section("celery_outbox")
    assert {name for name in own_arguments(celery_outbox.Command()) if name not in text} == set()


@pytest.mark.django_db
def test_outbox_json_keys() -> None:
    """The commands page has the keys that ``celery_outbox`` prints as JSON, in order."""
    now = timezone.now()
    OutboxMessage.objects.create(task="a", task_id="b", body=b"", properties="{}", created_at=now)
    for action, heading in (("status", "The keys of status"), ("list", "The keys of list")):
        printed = StringIO()
        call_command("celery_outbox", action, "--json", "--database=default", stdout=printed)
        found = json.loads(printed.getvalue())
        listed = [names_in(row[0])[0] for row in page(COMMANDS).rows(heading)]
        assert listed == list(found["default"] if action == "status" else found[0])


@pytest.mark.parametrize(
    ("where", "queryset", "of_a_row"),
    [("outbox", OutboxMessages, {"fail()"}), ("records", IdempotencyRecords, set())],
    ids=["outbox", "records"],
)
def test_queryset(where: str, queryset: type, of_a_row: set[str]) -> None:
    """A model's page has every method of the queryset, and says which are not for users."""
    methods = {name for name in vars(queryset) if not name.startswith("_")}
    text = page(f"docs/reference/{where}.md").text
    listed = {name for name in methods if f"| `{name}(" in text}
    (ours,) = re.findall(r"^All other .*", text, re.MULTILINE)
    assert [name for name in names_in(ours) if name not in of_a_row] == [
        f"{name}()" for name in vars(queryset) if name in methods - listed
    ]


def test_record_columns() -> None:
    """The page on how doing a thing once works has every column of a record."""
    rows = page("docs/explanation/how-once-works.md").rows("Columns of a record")
    listed = [name for row in rows for name in names_in(row[0])]
    assert sorted(listed) == sorted(field.name for field in IdempotencyRecord._meta.fields)


def test_idempotency_command_options() -> None:
    """The commands page has every action and option of ``celery_idempotency`` that is its own."""
    text = page(COMMANDS).section("celery_idempotency")
    command = celery_idempotency.Command()
    assert {name for name in own_arguments(command) if f"`{name}" not in text} == set()


@pytest.mark.django_db
def test_record_json_keys() -> None:
    """The commands page has the keys of a record as JSON, in order, and which may be null."""
    with idempotent("invoice:42", ttl=None) as claim:
        assert claim
    row = IdempotencyRecord.objects.annotate(asked_at=Now()).get()
    rows = page(COMMANDS).rows("The keys of a record")
    listed = [names_in(key)[0] for key, _, _ in rows]
    assert listed == list(RecordRow(row).as_json())
    # A claim whose holder can't be read, and that neither ended nor expires.
    row.holder, row.ended_at = "", None
    nothing = RecordRow(row).as_json()
    assert {names_in(key)[0] for key, kind, _ in rows if "null" in kind} == {
        key for key, value in nothing.items() if value is None
    }


def test_outbox_columns() -> None:
    """The page on how sending works has every column of an outbox row, its key apart."""
    rows = page("docs/explanation/how-sending-works.md").rows("Columns of a row")
    listed = {name for row in rows for name in names_in(row[0])}
    assert listed == {field.name for field in OutboxMessage._meta.fields} - {"id"}


def test_testing_names() -> None:
    """The testing page has everything public in ``django_celery_safe.testing``."""
    public = {
        name
        for name, found in vars(testing).items()
        if inspect.isfunction(found) and found.__module__.startswith(testing.__name__)
    }
    public = {name for name in public if not name.startswith("_")}
    assert set(page("docs/reference/testing.md").headings(2)) == public


def test_refused_caches() -> None:
    """The page on stores names every cache that is refused."""
    refused = page("docs/explanation/stores.md").section("Refused uses, and why")
    assert [path for path in stores.REFUSED if path.rpartition(".")[2] not in refused] == []


def test_folders_of_contributing() -> None:
    """Every folder or file that CONTRIBUTING.md names exists."""
    rows = page("CONTRIBUTING.md").rows("Where things live")
    folders = [name for row in rows for name in names_in(row[0])]
    assert [folder for folder in folders if not (ROOT / folder).exists()] == []


def test_the_map_of_contributing() -> None:
    """Each answer of CONTRIBUTING.md names a file, and what is defined there."""
    for question, answer in page("CONTRIBUTING.md").rows("Where is …?"):
        file, *names = names_in(answer)
        source = (PACKAGE / file).read_text()
        for name in names:
            assert re.search(rf"^ *(def|class) {name}\b", source, re.MULTILINE), question


def test_works_with() -> None:
    """The table of neighbours has each that tests/company plays beside."""
    rows = page("docs/reference/works-with.md").rows()
    for (beside, *_), name in zip(rows, NEIGHBOURS, strict=True):
        assert beside.startswith(name)


def test_changelog_has_this_version() -> None:
    """The changelog has a part for the version that is built."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert any(heading.startswith(f"[{version}]") for heading in page("CHANGELOG.md").headings(2))


def test_versions() -> None:
    """The table of what was tested has each cell of ``nox -s grid``, and says what came of it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    grid, classifiers = project["tool"]["grid"], "\n".join(project["project"]["classifiers"])
    pythons = [*re.findall(r"Python :: (\d+\.\d+)$", classifiers, re.M), *grid["python_untested"]]
    djangos = re.findall(r"Django :: (\d+\.\d+)$", classifiers, re.M)
    expected = [
        (python, django)
        for python in pythons
        for django in djangos
        if Version(python) >= Version(grid["django_needs"].get(django, pythons[0]))
    ]
    rows = page("docs/reference/versions.md").rows("The grid")
    cells = {(python, django): results for python, django, *results in rows}
    assert list(cells) == expected
    for results in cells.values():
        assert len(results) == len(grid["celery"])
        assert all(
            re.fullmatch(r"passed \d{4}-\d\d-\d\d|not run: \S.*", result) for result in results
        )


API = "docs/reference/api.md"
ERRORS = "docs/reference/errors.md"
STAGES = "docs/reference/stages.md"
COMMANDS = "docs/reference/commands.md"


def is_error(found: Any) -> bool:
    """Tell whether it is a class of errors."""
    return isinstance(found, type) and issubclass(found, Exception)


def is_ours(found: Any) -> bool:
    """Tell whether this package defines it."""
    return str(found.__module__).startswith("django_celery_safe")


def check_ids() -> Iterator[str]:
    """Yield the id of every message that the checks can make, read from their code."""
    for folder in ("checks", "inspection", "backends"):
        for path in (PACKAGE / folder).glob("*.py"):
            for found in re.findall(r'"([EW]\d{3})"', path.read_text()):
                yield f"{checks.PREFIX}.{found}"


def signature_pairs(
    where: Page, module: Any
) -> Iterator[tuple[ast.FunctionDef, Callable[..., Any]]]:
    """Yield every function on a page with that of the code."""
    for block in where.blocks():
        if block.language != "python":
            continue
        for node in ast.parse(block.code).body:
            if isinstance(node, ast.FunctionDef):
                yield node, getattr(module, node.name)
            elif isinstance(node, ast.ClassDef):
                yield from member_pairs(node, getattr(module, node.name))


def member_pairs(
    node: ast.ClassDef, cls: type
) -> Iterator[tuple[ast.FunctionDef, Callable[..., Any]]]:
    """Yield every method of a class on a page with that of the code."""
    for member in node.body:
        if isinstance(member, ast.FunctionDef):
            found = inspect.getattr_static(cls, member.name)
            marked = [d.id for d in member.decorator_list if isinstance(d, ast.Name)]
            assert ("property" in marked) == isinstance(found, property), member.name
            if isinstance(found, property):
                assert found.fget is not None
                found = found.fget
            yield member, getattr(found, "__func__", found)


def parameters_written(node: ast.FunctionDef) -> list[str]:
    """Return the parameters of a function on a page, such as ``*, renew=True``."""
    for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
        argument.annotation = None
    return ast.unparse(node.args).split(", ")


def parameters_of(function: Callable[..., Any]) -> list[str]:
    """Return the parameters of the code in the same form."""
    plain = inspect.Signature(
        [
            parameter.replace(annotation=inspect.Parameter.empty)
            for parameter in inspect.signature(function).parameters.values()
        ]
    )
    return str(plain)[1:-1].split(", ")


def own_arguments(command: BaseCommand) -> set[str]:
    """Return the actions and options that a command has beyond Django's own."""
    common = BaseCommand().create_parser("manage.py", "any")
    given = {option for action in common._actions for option in action.option_strings}
    return arguments_of(command.create_parser("manage.py", "any")) - given


def arguments_of(parser: ArgumentParser) -> set[str]:
    """Return the options of a parser and what its positional arguments may be, nested ones too."""
    found: set[str] = set()
    for action in parser._actions:
        found |= set(action.option_strings)
        found |= set(action.choices or ()) if not action.option_strings else set()
        nested = action.choices if isinstance(action.choices, dict) else {}
        for each in nested.values():
            found |= arguments_of(each)
    return found
