"""Databases on which nothing was tested are refused wherever something would be kept there."""

from collections.abc import Callable, Iterator
from io import StringIO
from typing import Any

import pymysql
import pytest
from celery import Celery
from django.core import checks
from django.core.management import CommandError, call_command
from pytest_django import Settings

from django_celery_safe import BackendNotSupported, cache_lock, idempotent, stages
from django_celery_safe.sending.capture import Captured
from django_celery_safe.sending.departure import Departure
from django_celery_safe.sending.outbox import keep, outbox_aliases
from django_celery_safe.sending.relay import Relay
from tests.app.models import Person
from tests.servers.databases import registered
from tests.test_checks import REDIS, TRANSPORT_OPTIONS, app_without_tasks

MYSQL = "mysql"

pytestmark = pytest.mark.filterwarnings("ignore:Overriding setting DATABASES")


class AllInMySQL:
    """Has everything of this app, and the models of its tests, in the database ``mysql``."""

    def db_for_write(self, model: Any, **hints: Any) -> str:
        """Return the alias."""
        return MYSQL


@pytest.fixture
def mysql(settings: Settings) -> Iterator[str]:
    """A database of Django's MySQL engine; no server is asked."""
    pymysql.install_as_MySQLdb()
    settings.DATABASE_ROUTERS = [f"{__name__}.AllInMySQL"]
    settings.CACHES = {"default": REDIS}
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": MYSQL}
    with registered(
        MYSQL, {"ENGINE": "django.db.backends.mysql", "HOST": "127.0.0.1", "PORT": "1"}
    ):
        yield MYSQL


def claim() -> None:
    with idempotent("some"):
        pass


def once() -> None:
    with Person.do_once(1, "is_welcome_email_sent"):
        pass


#: Calls that would keep rows in that database.
USES: dict[str, Callable[[], object]] = {
    "hold locks": lambda: cache_lock("x").acquire(),
    "hold an outbox": lambda: keep(Captured(), Departure(MYSQL)),
    "hold an outbox (relay)": lambda: Relay(MYSQL),
    "record what is done once": claim,
    "do a thing once for a row": once,
    "hold runs of stages": lambda: stages.start([("tests.app.tasks.add", 1)]),
}


@pytest.mark.parametrize("what", USES)
def test_an_untested_database_is_refused_at_first_use(what: str, mysql: str) -> None:
    """Whatever would be kept in MySQL is refused before the database is asked."""
    with pytest.raises(BackendNotSupported) as caught:
        USES[what]()
    assert str(caught.value).startswith(
        f'DATABASES["mysql"] (mysql) can\'t {what.removesuffix(" (relay)")}: django_celery_safe '
        f"was tested on PostgreSQL and SQLite alone"
    )


@pytest.mark.parametrize(
    "command",
    ["celery_outbox status --database mysql", "celery_idempotency list", "celery_stages list"],
)
def test_commands_refuse_an_untested_database(command: str, mysql: str) -> None:
    """A command that would look into MySQL, named or not, says that it can't, and asks nothing."""
    with pytest.raises(CommandError, match=r"\(mysql\) can't .* PostgreSQL and SQLite"):
        call_command(*command.split(), stdout=StringIO())


def test_a_relay_leaves_an_untested_database_alone(mysql: str, sqlite_alias: str) -> None:
    """A relay of all databases goes by those that can have an outbox."""
    found = outbox_aliases()
    assert sqlite_alias in found
    assert mysql not in found


def test_an_untested_database_is_an_error(mysql: str) -> None:
    """E008 names the database and what would use it; E002 says it of locks."""
    with app_without_tasks("redis://127.0.0.1:1/0") as app:
        app.conf.broker_transport_options = TRANSPORT_OPTIONS
        add_idempotent_task(app)
        messages = checks.run_checks(tags=["django_celery_safe"])
    said = {str(one.id).removeprefix("django_celery_safe."): one for one in messages}
    assert 'DATABASES["mysql"] (mysql) can\'t hold locks' in said["E002"].msg
    assert 'DATABASES["mysql"] is mysql' in said["E008"].msg
    assert "do_once of" in said["E008"].msg
    assert "more would keep rows there" in said["E008"].msg


def test_a_database_that_is_not_there_is_an_error() -> None:
    """E008 names the alias, who uses it, and those that there are."""
    with app_without_tasks("redis://127.0.0.1:1/0") as app:
        add_idempotent_task(app, using="ordres")
        messages = [one for one in checks.run_checks() if one.id == "django_celery_safe.E008"]
    (message,) = messages
    assert message.msg == (
        "DATABASES has no 'ordres', and idempotent shop.charge would keep rows there: each use is "
        "a ConnectionDoesNotExist."
    )
    assert "'default'" in str(message.hint)


def add_idempotent_task(app: Celery, using: str | None = None) -> None:
    """Give the app a task that records what it does."""

    @app.task(name="shop.charge", acks_late=True, reject_on_worker_lost=True)
    @idempotent(using=using)
    def charge(order: int) -> None:
        """Do nothing."""
