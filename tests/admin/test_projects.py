"""Projects set up in other ways and languages than most, and what is in the package for them."""

import json
import re
import shutil
from gettext import GNUTranslations
from io import StringIO
from pathlib import Path
from string import Formatter
from types import ModuleType
from typing import Any, Final

import pytest
from babel.messages import Message
from babel.messages.pofile import read_po
from django.contrib.admin import AdminSite
from django.contrib.admin import site as default_site
from django.contrib.admin.models import LogEntry
from django.core.management import call_command
from django.db import connections
from django.urls import path
from django.utils.translation import override
from pytest_django import Settings

import django_celery_safe
from django_celery_safe.models import IdempotencyRecord, Lock, OutboxMessage, StageRun, StageStep
from django_celery_safe.stages import Status
from tests.admin import rows
from tests.admin.cases import CASES, take_each
from tests.admin.pages import Visitor, every_page, make_visitor
from tests.admin.rows import hold
from tests.admin.urls import FIRST, LOCKS, OUTBOX, RECORDS, RUNS, STEPS
from tests.conftest import MakeDatabase, leave_out
from tests.routing import AllIn, routed_by

PACKAGE: Final = Path(django_celery_safe.__file__).parent
CATALOG: Final = Path("locale/zh_Hans/LC_MESSAGES/django.po")
HAN: Final = re.compile("[\u4e00-\u9fff]")
HOW_TO: Final = "CONTRIBUTING.md says how to translate: 'Translate the admin'."


@pytest.mark.sql
def test_atomic_requests(root: Visitor, settings: Settings, make_database: MakeDatabase) -> None:
    """
    With ATOMIC_REQUESTS all decisions work, each by itself, and locks in that database too.

    So they do in a database that a project adds when the admin has its URLs already.
    """
    root.get(FIRST)
    later = make_database("sqlite-immediate", "later")
    # The test's clients read the setting at each request; the aliases end with the test.
    for alias in ("site", later):
        connections.settings[alias]["ATOMIC_REQUESTS"] = True
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": later}
    hold("feed")
    assert [row["Lock"] for row in root.get(LOCKS).rows] == ["feed"]
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": "site"}
    take_each(root)
    assert LogEntry.objects.count() == len(CASES)
    hold("feed")
    assert [row["Lock"] for row in root.get(LOCKS).rows] == ["feed"]
    assert root.get(FIRST).error == ""
    # A row that is refused keeps no other from being done.
    runs = [rows.begin(1), rows.end(rows.begin(1), Status.FAILED), rows.begin(1)]
    told = root.confirm(RUNS, "abort", *[run.pk for run in runs]).messages
    assert (told[0], len(told)) == ("Aborted: 2 runs of stages.", 2)


class Split(AllIn):
    """A database router: the package's tables are read from ``replica``, all others are not."""

    def db_for_read(self, model: Any, **hints: Any) -> str:
        """Return the replica for the package's tables."""
        ours = model._meta.app_label == "django_celery_safe"
        return str(self.replica) if ours else self.alias


def test_replica(site: str, make_database: MakeDatabase) -> None:
    """Rows are shown and decided about where they are written: a replica may be behind."""
    root = make_visitor(is_superuser=True)
    with routed_by(Split(site, make_database("sqlite-immediate", "replica"))):
        take_each(root)
        assert not StageRun.objects.exists()  # not there
        for url, count in ((OUTBOX, 2), (RECORDS, 0), (RUNS, 2), (STEPS, 2)):
            assert len(root.get(url).rows) == count


def test_another_site(root: Visitor, settings: Settings) -> None:
    """In an admin site of another name all links and forms stay there."""
    ops = AdminSite("ops")
    for model in (Lock, OutboxMessage, IdempotencyRecord, StageRun, StageStep):
        ops.register(model, type(default_site.get_model_admin(model)))
    urls: Any = ModuleType("urls")
    urls.urlpatterns = [path("admin/", default_site.urls), path("ops/", ops.urls)]
    settings.ROOT_URLCONF = urls
    for case in CASES:
        pk = case.make()
        there = [url.replace("/admin/", "/ops/", 1) for url in every_page(case.model, pk).values()]
        for page in [*map(root.get, there), root.confirm(there[0], case.decision, pk)]:
            links = [*page.values("a", "href"), *page.values("form", "action")]
            left = [url for url in links if len(url) > 1 and url[0] == "/"]
            assert (page.status, {url.split("/")[1] for url in left}) == (200, {"ops"})
        assert page.messages[0].startswith(f"{case.done}: 1 ")


@pytest.mark.long
def test_other_languages(root: Visitor, settings: Settings) -> None:
    """In another language the pages work, and no number in an attribute gets a separator."""
    settings.LANGUAGE_CODE = "ar"
    settings.USE_THOUSAND_SEPARATOR = True
    run = rows.begin(1200)
    page = root.open(run)
    bars = page.soup.select(".safe-stages progress, .field-progress progress")
    assert [(bar["max"], bar["value"]) for bar in bars] == [("1200", "0")] * 2
    take_each(root)


def read(path: Path) -> list[Message]:
    """Return the messages of a catalog, its head apart."""
    with path.open("rb") as file:
        return [message for message in read_po(file) if message.id]


def fields(text: Any) -> list[str]:
    """Return the placeholders of both kinds in a text."""
    named = [f"%({name})" for name in re.findall(r"%\((\w+)\)s", text)]
    return sorted(named + [name for _, name, _, _ in Formatter().parse(text) if name is not None])


def test_every_text_is_translated() -> None:
    """Each text has a translation with the same placeholders, and the compiled file has it."""
    with (PACKAGE / CATALOG).with_suffix(".mo").open("rb") as file:
        compiled = GNUTranslations(file)
    for message in read(PACKAGE / CATALOG):
        assert message.string, f"{message.id!r} has no translation. {HOW_TO}"
        assert not message.fuzzy, f"{message.id!r} has a guessed translation. {HOW_TO}"
        assert fields(message.string) == fields(message.id), message
        key = f"{message.context}\x04{message.id}" if message.context else str(message.id)
        assert compiled.gettext(key) == message.string, f"Run compilemessages. {HOW_TO}"


def test_the_catalog_has_what_the_code_marks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``makemessages`` finds nothing new, and nothing that is gone."""
    if shutil.which("xgettext") is None:
        leave_out("gettext has no xgettext on the PATH")
    copy = tmp_path / "package"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "static"))
    monkeypatch.chdir(copy)
    call_command("makemessages", locale=["zh_Hans"], no_obsolete=True, verbosity=0)
    marked = {(message.context, message.id) for message in read(copy / CATALOG)}
    kept = {(message.context, message.id) for message in read(PACKAGE / CATALOG)}
    assert marked == kept, HOW_TO


def test_pages_are_in_chinese(root: Visitor, settings: Settings) -> None:
    """A list, a question, a page and the answer read as a Chinese administrator expects them."""
    settings.LANGUAGE_CODE = "zh-hans"
    row = rows.leave_dead(error="E1")
    assert root.get(OUTBOX).rows[0]["状态"] == "死信"
    assert all(map(HAN.search, root.open(row).fields))
    assert "丢弃：确定吗？" in root.take(OUTBOX, "discard", row.pk).content
    assert root.confirm(OUTBOX, "discard", row.pk).messages == ["已丢弃：1 个发件箱消息。"]


def test_migrations_are_complete(site: str) -> None:
    """The models, permissions included, are as the migrations make them."""
    call_command("makemigrations", "django_celery_safe", "--check", "--dry-run", verbosity=0)


def test_dump(site: str) -> None:
    """The data of a project is dumped as before: locks, which have no table, are no part of it."""
    rows.leave()
    dump = StringIO()
    call_command("dumpdata", "django_celery_safe", "--all", database=site, stdout=dump)
    assert {each["model"] for each in json.loads(dump.getvalue())} == {
        "django_celery_safe.outboxmessage"
    }


def test_commands_stay_english(root: Visitor) -> None:
    """Commands print the same in every project, for scripts and searches."""
    rows.hold("shop:1")
    printed = StringIO()
    with override("zh-hans"):
        call_command("celery_locks", "show", "shop:1", stdout=printed)
    assert printed.getvalue()
    assert HAN.findall(printed.getvalue()) == []
