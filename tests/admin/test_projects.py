"""Projects that are set up in other ways than most, and what is in the package for them."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest
from django.contrib.admin import AdminSite
from django.contrib.admin import site as default_site
from django.contrib.admin.models import LogEntry
from django.core.management import call_command
from django.db import connections
from django.urls import path, reverse
from pytest_django import Settings

from django_celery_safe.models import (
    IdempotencyRecord,
    Lock,
    OutboxMessage,
    StageRun,
    StageStep,
)
from django_celery_safe.stages import Status
from tests.admin import rows
from tests.admin.cases import CASES, take_each
from tests.admin.conftest import every_page, make_visitor
from tests.admin.pages import Visitor
from tests.admin.rows import HOLDER, hold
from tests.admin.test_lock_pages import LIST as LOCKS
from tests.admin.test_table_pages import OUTBOX, RECORDS, RUNS, STEPS
from tests.conftest import MakeDatabase
from tests.routing import AllIn, routed_by

ROOT: Final = Path(__file__).resolve().parent.parent.parent
IDLE: Final = HOLDER._replace(renewed=False)


# Databases


@pytest.mark.sql
def test_atomic_requests(root: Visitor, settings: Settings) -> None:
    """With ATOMIC_REQUESTS all decisions work, each by itself, and locks in that database too."""
    # The test's clients read the setting at each request; the alias ends with the test.
    connections.settings["site"]["ATOMIC_REQUESTS"] = True
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": "site"}
    take_each(root)
    assert LogEntry.objects.count() == len(CASES)
    hold("feed")
    assert [row["Lock"] for row in root.get(LOCKS).rows] == ["feed"]
    assert root.get(reverse("admin:app_list", args=["django_celery_safe"])).error == ""
    # A row that is refused keeps no other from being done.
    runs = [rows.begin(1), rows.end(rows.begin(1), Status.FAILED), rows.begin(1)]
    told = root.confirm(RUNS, "abort", *[run.pk for run in runs]).messages
    assert (told[0], len(told)) == ("2 runs of stages were aborted.", 2)


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
        for url, count in ((OUTBOX, 3), (RECORDS, 0), (RUNS, 2), (STEPS, 2)):
            assert len(root.get(url).rows) == count


# Sites, languages, times


def test_another_site(root: Visitor, settings: Settings) -> None:
    """In an admin site of another name all links and forms stay there."""
    ops = AdminSite("ops")
    for model in (Lock, OutboxMessage, IdempotencyRecord, StageRun, StageStep):
        ops.register(model, type(default_site.get_model_admin(model)))
    urls: Any = ModuleType("urls")
    urls.urlpatterns = [path("admin/", default_site.urls), path("ops/", ops.urls)]
    settings.ROOT_URLCONF = urls
    for case in CASES:
        pk, selection = case.make()
        pages = [url.replace("/admin/", "/ops/", 1) for url in every_page(case.model, pk).values()]
        asked = root.take(pages[0], case.decision, selection)
        for page in [*map(root.get, pages), asked]:
            forms = [each.attributes.get("action", "") for each in page.root.find("form")]
            left = [url for url in [*page.links, *forms] if len(url) > 1 and url[0] == "/"]
            assert (page.status, {url.split("/")[1] for url in left}) == (200, {"ops"})
        told = root.confirm(pages[0], case.decision, selection)
        assert told.messages[0].startswith("1 ")


@pytest.mark.long
def test_other_languages(root: Visitor, settings: Settings) -> None:
    """In another language the pages work, and no number in an attribute gets a separator."""
    settings.LANGUAGE_CODE = "ar"
    settings.USE_THOUSAND_SEPARATOR = True
    run = rows.begin(1200)
    page = root.get(every_page(StageRun, run.pk)["change"])
    (bar,) = page.root.find("table", class_="safe-stages")[0].find("progress")
    assert (bar.attributes["max"], bar.attributes["value"]) == ("1200", "0")
    take_each(root)


def test_without_time_zones(root: Visitor, settings: Settings) -> None:
    """Ages are right in every time zone, without USE_TZ."""
    settings.USE_TZ, settings.TIME_ZONE = False, "Asia/Kolkata"
    hold("feed", IDLE._replace(since=1_700_000_000.0))
    message = rows.leave_failed()
    rows.record("k")
    rows.work_on(rows.begin(1))
    assert root.get(OUTBOX).rows[0]["Age"].endswith("s")
    assert root.get(RECORDS).rows[0]["Claimed"].startswith(("9", "2min"))
    assert root.get(RUNS).rows[0]["Started"].endswith("s ago")
    assert root.get(STEPS).rows[0]["Duration"].endswith("s")
    since = root.get(every_page(Lock, "feed")["change"]).fields["Held since"]
    assert since.startswith("2023-11-15 03:43:20 IST by its clock, ")
    told = root.confirm(OUTBOX, "retry", message.pk).messages
    assert told == ["1 outbox message was made due."]


# What is in the package


def test_migrations_are_complete(site: str) -> None:
    """The models, permissions included, are as the migrations make them."""
    call_command("makemigrations", "django_celery_safe", "--check", "--dry-run", verbosity=0)


def test_dump(site: str, tmp_path: Path) -> None:
    """The data of a project is dumped as before: locks, which have no table, are no part of it."""
    hold("feed")
    rows.leave()
    target = tmp_path / "dump.json"
    call_command("dumpdata", "--all", database=site, output=str(target), verbosity=0)
    models = {each["model"] for each in json.loads(target.read_text())}
    assert "django_celery_safe.outboxmessage" in models
    assert "django_celery_safe.lock" not in models
