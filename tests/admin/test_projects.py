"""Projects that are set up in other ways than most, and what is in the package for them."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest
from django.contrib.admin import AdminSite
from django.contrib.admin import site as default_site
from django.contrib.admin.models import LogEntry
from django.core.management import call_command
from django.db import connections
from django.urls import path
from pytest_django import Settings

from django_celery_safe import find_lock
from django_celery_safe.models import (
    IdempotencyRecord,
    Lock,
    OutboxMessage,
    StageRun,
    StageStep,
)
from django_celery_safe.stages import Status
from tests.admin import rows
from tests.admin.conftest import every_page, make_visitor
from tests.admin.pages import Visitor
from tests.admin.rows import HOLDER, hold
from tests.admin.test_lock_pages import LIST as LOCKS
from tests.admin.test_table_pages import OUTBOX, RECORDS, RUNS, STEPS
from tests.conftest import MakeDatabase
from tests.kinds import KINDS
from tests.routing import AllIn, routed_by

ROOT: Final = Path(__file__).resolve().parent.parent.parent
MODELS: Final = (Lock, OutboxMessage, IdempotencyRecord, StageRun, StageStep)
IDLE: Final = HOLDER._replace(renewed=False)


def serve(settings: Settings, **sites: AdminSite) -> None:
    """Let the site have these URLs and no others."""
    urls = ModuleType("urls")
    urls.urlpatterns = [path(f"{name}/", each.urls) for name, each in sites.items()]  # type: ignore[attr-defined]
    settings.ROOT_URLCONF = urls


def make_one_of_each() -> dict[str, tuple[type[Any], Any, str, str]]:
    """Return a decision of each kind: the model, the row's key, what selects it, the decision."""
    message, other = rows.leave_dead(), rows.leave_dead()
    record = rows.record("k")
    failed, waiting = rows.end(rows.begin(1), Status.FAILED), rows.begin(1)
    token = hold("feed", IDLE)
    return {
        "release": (Lock, "feed", f'{token}"feed"', "release"),
        "retry": (OutboxMessage, message.pk, str(message.pk), "retry"),
        "discard": (OutboxMessage, other.pk, str(other.pk), "discard"),
        "forget": (IdempotencyRecord, record.pk, record.pk, "forget"),
        "resume": (StageRun, failed.pk, str(failed.pk), "resume"),
        "abort": (StageRun, waiting.pk, str(waiting.pk), "abort"),
    }


# Databases


@pytest.fixture(params=KINDS)
def atomic(request: pytest.FixtureRequest, make_database: MakeDatabase) -> Iterator[str]:
    """The database of a site with ATOMIC_REQUESTS, of each kind in turn."""
    alias = make_database(request.param, "site")
    connections.settings[alias]["ATOMIC_REQUESTS"] = True
    with routed_by(AllIn(alias)):
        yield alias


@pytest.mark.long
def test_atomic_requests(atomic: str, settings: Settings) -> None:
    """With ATOMIC_REQUESTS all decisions work, and locks in that very database too."""
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": atomic}
    serve(settings, admin=default_site)
    root = make_visitor(is_superuser=True)
    taken = make_one_of_each()
    assert [row["Lock"] for row in root.get(LOCKS).rows] == ["feed"]
    for model, pk, selection, decision in taken.values():
        pages = every_page(model, pk)
        assert all(root.get(url).status == 200 for url in pages.values())
        (told,) = root.confirm(pages["list"], decision, selection).messages
        assert told.startswith("1 ")
    assert find_lock("feed") is None
    assert LogEntry.objects.count() == len(taken)


def test_atomic_requests_and_a_refusal(atomic: str, settings: Settings) -> None:
    """With ATOMIC_REQUESTS a row that is refused keeps no other from being done."""
    serve(settings, admin=default_site)
    root = make_visitor(is_superuser=True)
    runs = [rows.begin(1), rows.end(rows.begin(1), Status.FAILED), rows.begin(1)]
    told = root.confirm(RUNS, "abort", *[run.pk for run in runs])
    assert told.messages[0] == "2 runs of stages were aborted."
    assert len(told.messages) == 2
    statuses = [StageRun.objects.get(pk=run.pk).status for run in runs]
    assert statuses == [Status.ABORTED, Status.FAILED, Status.ABORTED]


class Split(AllIn):
    """A database router: the package's tables are read from ``replica``, all others are not."""

    def db_for_read(self, model: Any, **hints: Any) -> str:
        """Return the replica for the package's tables."""
        ours = model._meta.app_label == "django_celery_safe"
        return str(self.replica) if ours else self.alias


def test_replica(lite: str, make_database: MakeDatabase) -> None:
    """Rows are shown and decided about where they are written: a replica may be behind."""
    replica = make_database("sqlite-immediate", "replica")
    root, taken = make_visitor(is_superuser=True), make_one_of_each()
    with routed_by(Split(lite, replica)):
        assert not OutboxMessage.objects.exists()  # not there
        for url, count in ((OUTBOX, 4), (RECORDS, 1), (RUNS, 2), (STEPS, 2)):
            assert len(root.get(url).rows) == count
        for model, pk, selection, decision in taken.values():
            pages = every_page(model, pk)
            assert all(root.get(url).status == 200 for url in pages.values())
            (told,) = root.confirm(pages["list"], decision, selection).messages
            assert told.startswith("1 ")
        run = StageRun.objects.using(lite).get(pk=taken["abort"][1])
        assert run.status == Status.ABORTED
        page = root.get(every_page(StageRun, taken["resume"][1])["change"])
        assert "1 waiting" in page.content


class Apart(AllIn):
    """A database router: the package's tables are in ``replica``, read and written."""

    def db_for_read(self, model: Any, **hints: Any) -> str:
        """Return where the rows of a model are."""
        ours = model._meta.app_label == "django_celery_safe"
        return str(self.replica) if ours else self.alias

    db_for_write = db_for_read


def test_log_in_another_database(lite: str, make_database: MakeDatabase) -> None:
    """A decision that can't be logged is not carried out, even with the log elsewhere."""
    other = make_database("sqlite-immediate", "other")
    root = make_visitor(is_superuser=True)
    with routed_by(Apart(lite, other)):
        row = rows.leave_dead()
        root.client.raise_request_exception = False
        with renamed(lite, "django_admin_log"):
            assert root.confirm(OUTBOX, "discard", row.pk).status == 500
        assert OutboxMessage.objects.using(other).get() == row
        assert root.confirm(OUTBOX, "discard", row.pk).messages == [
            "1 outbox message was discarded."
        ]
        assert LogEntry.objects.using(lite).count() == 1


@contextmanager
def renamed(alias: str, table: str) -> Iterator[None]:
    """Let a table be missing during the block."""
    with connections[alias].cursor() as cursor:
        cursor.execute(f"ALTER TABLE {table} RENAME TO elsewhere")
    try:
        yield
    finally:
        with connections[alias].cursor() as cursor:
            cursor.execute(f"ALTER TABLE elsewhere RENAME TO {table}")


def test_a_lock_that_can_not_be_logged(root: Visitor) -> None:
    """A lock is in no transaction: it is free before its entry in the log is written."""
    token = hold("feed", IDLE)
    root.client.raise_request_exception = False
    with renamed("site", "django_admin_log"):
        assert root.confirm(LOCKS, "release", f'{token}"feed"').status == 500
    assert find_lock("feed") is None


# Sites, languages, times


@pytest.mark.long
@pytest.mark.parametrize("beside", [True, False], ids=["beside the default", "alone"])
def test_another_site(root: Visitor, settings: Settings, beside: bool) -> None:
    """In an admin site of another name all links and forms stay there."""
    ops = AdminSite("ops")
    for model in MODELS:
        ops.register(model, type(default_site.get_model_admin(model)))
    serve(settings, **({"admin": default_site} if beside else {}), ops=ops)
    for model, pk, selection, decision in make_one_of_each().values():
        found = every_page(model, pk)
        pages = {name: url.replace("/admin/", "/ops/", 1) for name, url in found.items()}
        asked = root.take(pages["list"], decision, selection)
        for page in [*map(root.get, pages.values()), asked]:
            assert page.status == 200
            forms = [each.attributes.get("action", "") for each in page.root.find("form")]
            left = [url for url in [*page.links, *forms] if len(url) > 1 and url[0] == "/"]
            assert left
            assert {url.split("/")[1] for url in left} == {"ops"}
        told = root.take(pages["list"], decision, selection, confirmed="1")
        assert told.response["Location"].startswith("/ops/")


@pytest.mark.long
@pytest.mark.parametrize("language", ["de", "ar", "fa", "zh-hans"])
def test_other_languages(root: Visitor, settings: Settings, language: str) -> None:
    """In another language the pages work, and no number in an attribute gets a separator."""
    settings.LANGUAGE_CODE = language
    settings.USE_THOUSAND_SEPARATOR = True
    run = rows.begin(1200)
    page = root.get(every_page(StageRun, run.pk)["change"])
    (bar,) = page.root.find("table", class_="safe-stages")[0].find("progress")
    assert (bar.attributes["max"], bar.attributes["value"]) == ("1200", "0")
    (bar,) = root.get(RUNS).root.find("progress")
    assert bar.attributes["max"] == "1200"
    for model, pk, selection, decision in make_one_of_each().values():
        pages = every_page(model, pk)
        assert all(root.get(url).status == 200 for url in pages.values())
        if model is Lock:
            held = find_lock("feed")
            assert held is not None
            assert str(held.fence) in root.get(pages["list"]).content
        assert root.take(pages["list"], decision, selection).decisions == [decision]
        (told,) = root.confirm(pages["list"], decision, selection).messages
        assert told.startswith("1 ")


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "use_tz"),
    [("sqlite-immediate", True), ("sqlite-immediate", False), ("postgres", False)],
)
def test_time_zones(
    make_database: MakeDatabase, settings: Settings, use_tz: bool, kind: Any
) -> None:
    """Ages are right in every time zone, with USE_TZ and without."""
    settings.USE_TZ, settings.TIME_ZONE = use_tz, "Asia/Kolkata"
    with routed_by(AllIn(make_database(kind, "site"))):
        root = make_visitor(is_superuser=True)
        hold("feed", IDLE._replace(since=1_700_000_000.0))
        message, record, run = (
            rows.leave_failed(),
            rows.record("k"),
            rows.work_on(rows.begin(1)).run,
        )
        assert root.get(OUTBOX).rows[0]["Age"].endswith("s")
        assert root.get(RECORDS).rows[0]["Claimed"].startswith(("9", "2min"))
        assert root.get(RUNS).rows[0]["Started"].endswith("s ago")
        assert root.get(STEPS).rows[0]["Duration"].endswith("s")
        since = root.get(every_page(Lock, "feed")["change"]).fields["Held since"]
        assert since.startswith("2023-11-15 03:43:20 IST by its clock, ")
        for row in (message, record, run):
            assert root.get(every_page(type(row), row.pk)["change"]).status == 200
        assert root.confirm(OUTBOX, "retry", message.pk).messages == [
            "1 outbox message was made due."
        ]


# Whole projects

SETTINGS: Final = """
SECRET_KEY = "x"
DATABASES = {{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": "db.sqlite3"}}}}
CACHES = {{"default": {{"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
INSTALLED_APPS = {apps!r}
{more}
"""
#: Settings of a project with an admin, beside its apps.
WITH_ADMIN: Final = """
AUTH_USER_MODEL = "people.Member"
ROOT_URLCONF = "tests.urls"
STATIC_URL, STATIC_ROOT = "/static/", "collected"
from tests.settings import MIDDLEWARE, TEMPLATES
"""
MEMBERS: Final = """
import uuid
from django.contrib.auth.models import AbstractUser
from django.db import models

class Member(AbstractUser):
    id = models.UUIDField(primary_key=True, default=uuid.uuid4)
"""
#: Lets a member release a lock and discard a message, and prints what the log has of it.
STORY: Final = """
import django, json
django.setup()
from django.contrib.auth.models import Permission
from django.contrib.admin.models import LogEntry
from people.models import Member
from tests.admin import rows
from tests.admin.pages import Visitor
from django.test import Client
from tests.admin.conftest import make_visitor
somebody = make_visitor("view_lock", "release_lock", "view_outboxmessage", "discard_outboxmessage")
token = rows.hold("feed", rows.HOLDER._replace(renewed=False))
message = rows.leave_dead()
told = [
    somebody.confirm("/admin/django_celery_safe/lock/", "release", token + '"feed"').messages,
    somebody.confirm("/admin/django_celery_safe/outboxmessage/", "discard", message.pk).messages,
]
logged = [str(entry.user_id) == str(somebody.user.pk) for entry in LogEntry.objects.all()]
print(json.dumps([told, logged]))
"""

Run = Callable[..., str]


@pytest.fixture
def project(tmp_path: Path) -> Callable[..., Run]:
    """Make a project with these apps and settings; returns what runs Python in it."""

    def make(*apps: str, more: str = "") -> Run:
        text = SETTINGS.format(apps=[*apps, "django_celery_safe"], more=more)
        (tmp_path / "project_settings.py").write_text(text)

        def run(*arguments: str) -> str:
            done = subprocess.run(
                [sys.executable, "-W", "error", *arguments],
                cwd=tmp_path,
                env={
                    "PYTHONPATH": f"{tmp_path}:{ROOT}",
                    "DJANGO_SETTINGS_MODULE": "project_settings",
                    "PATH": "",
                },
                capture_output=True,
                text=True,
                timeout=100,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        return run

    return make


@pytest.mark.long
@pytest.mark.parametrize(
    "apps",
    [(), ("django.contrib.contenttypes", "django.contrib.auth")],
    ids=["alone", "with users"],
)
def test_without_the_admin(project: Callable[..., Run], apps: tuple[str, ...]) -> None:
    """A project without Django's admin is set up, migrated and checked, and has the commands."""
    run = project(*apps)
    run("-m", "django", "migrate", "--verbosity=0")
    run("-m", "django", "check", "--fail-level=ERROR")
    assert "No lock is held." in run("-m", "django", "celery_locks")
    for command in ("celery_outbox list", "celery_idempotency list", "celery_stages list"):
        run("-m", "django", *command.split())
    loaded = "import django, sys; django.setup(); print('django_celery_safe.admin' in sys.modules)"
    assert run("-c", loaded) == "False\n"


@pytest.mark.long
def test_users_with_other_keys(project: Callable[..., Run], tmp_path: Path) -> None:
    """Where users have UUIDs, decisions are logged under them; the style sheet is collected."""
    (tmp_path / "people").mkdir()
    (tmp_path / "people" / "__init__.py").touch()
    (tmp_path / "people" / "models.py").write_text(MEMBERS)
    run = project(
        "people",
        "django.contrib.admin",
        "django.contrib.contenttypes",
        "django.contrib.auth",
        "django.contrib.messages",
        "django.contrib.sessions",
        "django.contrib.staticfiles",
        more=WITH_ADMIN,
    )
    run("-m", "django", "makemigrations", "people", "--verbosity=0")
    run("-m", "django", "migrate", "--verbosity=0")
    run("-m", "django", "check", "--fail-level=ERROR")
    told = [["1 lock was released."], ["1 outbox message was discarded."]]
    assert json.loads(run("-c", STORY)) == [told, [True, True]]
    run("-m", "django", "collectstatic", "--no-input", "--verbosity=0")
    assert (tmp_path / "collected" / "django_celery_safe" / "admin.css").is_file()


def test_migrations_are_complete(lite: str) -> None:
    """The models, permissions included, are as the migrations make them."""
    call_command("makemigrations", "django_celery_safe", "--check", "--dry-run", verbosity=0)


def test_dump(lite: str, tmp_path: Path) -> None:
    """The data of a project is dumped as before: locks, which have no table, are no part of it."""
    hold("feed")
    rows.leave()
    for more in ([], ["--all"]):
        target = tmp_path / "dump.json"
        call_command("dumpdata", *more, database=lite, output=str(target), verbosity=0)
        models = {each["model"] for each in json.loads(target.read_text())}
        assert "django_celery_safe.outboxmessage" in models
        assert "django_celery_safe.lock" not in models
