"""
Fixtures of the harness: servers, databases and caches.

A server that this machine can't have skips its tests, with one loud line at the
end of the run; under ``CI=true`` they fail instead.
"""

import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, NoReturn, Protocol

import pytest
from celery import Celery
from celery.backends.base import DisabledBackend
from django.core.management.commands import flush
from django.db import DEFAULT_DB_ALIAS, connections
from django.test import override_settings
from model_bakery import baker
from model_bakery.random_gen import gen_string
from pytest_django import DjangoDbBlocker, Settings

from django_celery_safe.leases.lease import LeaseStore
from django_celery_safe.leases.renewer import renewer
from django_celery_safe.sending import capture, publisher
from tests.app.celery import app
from tests.caches import CacheSettings, RedisCacheKind, cache_at, caches_of_cluster
from tests.clock import clock as clock
from tests.concurrency.mailbox import mailbox as mailbox
from tests.contract.conftest import use_store as use_store
from tests.kinds import AXIS, kind_of
from tests.processes import CeleryWorker
from tests.servers import (
    MariaDBServer,
    MemcachedServer,
    PgBouncerServer,
    PostgresServer,
    ProgramNotFound,
    RabbitMQServer,
    RedisClusterServer,
    RedisServer,
    Server,
    ServerPool,
)
from tests.servers.databases import DatabaseKind, Databases, pgbouncer_settings, registered
from tests.shared_tasks import only_of
from tests.tiers import pytest_collection_modifyitems as pytest_collection_modifyitems
from tests.tiers import pytest_sessionfinish as pytest_sessionfinish
from tests.tiers import pytest_testnodedown as pytest_testnodedown
from tests.tiers import start_counting, write_left_out

# Hundreds of programs are started: each would compile the package again, and each process of
# pytest-xdist the tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# The file of a report, for example: a pytest that a test starts would write it, too.
os.environ.pop("PYTEST_ADDOPTS", None)

#: Beginning of the reason of a skip without a server; the summary counts these.
NOT_RUN = "not run: "

#: Has a broker look twice a second for messages that were not acknowledged in time.
LOOKING_OFTEN = {"unacked_restore_interval": 0.5, "unacked_restore_throttle": 1}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run be about another database than SQLite."""
    parser.addoption("--db", choices=[*AXIS], default="sqlite", help="the database of the tests")


def pytest_configure(config: pytest.Config) -> None:
    """Let programs that tests start end by Ctrl-C, also where the shell had us ignore it."""
    start_counting(config)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell does to what runs behind `&`
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Spare the garbage collector all that is imported: it stays until the end."""
    app.finalize()  # with the shared tasks of all modules
    baker.generators.add("django_celery_safe.models.columns.ExactCharField", gen_string)
    baker.generators.add("django_celery_safe.models.columns.ExactTextField", gen_string)
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _few_shared_tasks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Spare each app of a test the shared tasks of all other tests."""
    with only_of(request.module.__name__):
        yield


@pytest.fixture(scope="session", autouse=True)
def _flush_without_signals() -> Iterator[None]:
    """
    Empty the default database after a test without sending ``post_migrate`` again.

    Its receivers make the rows of permissions and content types anew, which no test
    reads there, and took a third of the time of each test with ``transaction=True``.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flush, "emit_post_migrate_signal", lambda *args, **kwargs: None)
        yield


@pytest.fixture(scope="session")
def servers() -> Iterator[ServerPool]:
    """All servers of this run, each started on first use."""
    with ServerPool() as pool:
        yield pool


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    """Skip a test if this machine does not have a server that it starts; under CI fail it."""
    try:
        yield
    except ProgramNotFound as error:
        leave_out(error)


pytest_runtest_call = pytest_runtest_setup


def leave_out(reason: object) -> NoReturn:
    """Skip the test for want of something, the first word of the reason; under CI fail it."""
    if os.environ.get("CI", "").lower() in {"1", "true"}:
        pytest.fail(f"{NOT_RUN}{reason}, and CI must run everything.")
    pytest.skip(f"{NOT_RUN}{reason}")


def private(kind: type[Server]) -> Any:
    """Return a fixture that is a private server for the whole session."""
    return pytest.fixture(lambda servers: servers.get(kind), scope="session")


redis_server = private(RedisServer)
#: Three nodes.
redis_cluster = private(RedisClusterServer)
memcached_server = private(MemcachedServer)
postgres_server = private(PostgresServer)
mariadb_server = private(MariaDBServer)
#: Its first use takes several seconds.
rabbitmq_server = private(RabbitMQServer)


@pytest.fixture
def pgbouncer_alias(postgres_alias: str, postgres_server: PostgresServer) -> Iterator[str]:
    """The alias of a PostgreSQL database of this test, behind a PgBouncer of its own."""
    with PgBouncerServer(postgres_server) as bouncer, behind(bouncer, postgres_alias) as alias:
        yield alias


@contextmanager
def behind(bouncer: PgBouncerServer, alias: str, pool: str | None = None) -> Iterator[str]:
    """
    Have a second alias for a database during the block, behind PgBouncer; gives that alias.

    Args:
        pool: The name by which PgBouncer knows the database; None: its own name.
    """
    database = pgbouncer_settings(bouncer, pool or connections.settings[alias]["NAME"])
    # With fewer sessions a lone client would meet its own again in the next transaction.
    with bouncer.all_sessions(str(database["NAME"])):
        pass
    name = f"pgbouncer-{pool or alias}"
    with registered(name, database):
        yield name


#: Makes CACHES for a private server, as ``cache_at`` does.
MakeCaches = Callable[..., CacheSettings]


@pytest.fixture
def redis_cache_settings(redis_server: RedisServer) -> MakeCaches:
    """Make CACHES for the private Redis, emptied, by kind, alias and options."""
    redis_server.flush()
    return partial(cache_at, redis_server.url)


@pytest.fixture
def in_redis(settings: Settings, redis_cache_settings: MakeCaches) -> None:
    """Locks live in the private Redis that tests share, emptied, by django-redis."""
    settings.CACHES = redis_cache_settings()


@pytest.fixture
def fragile_redis(settings: Settings) -> Iterator[RedisServer]:
    """A Redis of this test alone, to be stopped and started; locks live in it by django-redis."""
    with RedisServer() as server:
        settings.CACHES = cache_at(server.url)
        yield server


@pytest.fixture
def cluster_cache_settings(redis_cluster: RedisClusterServer) -> MakeCaches:
    """Make CACHES for the private cluster, by django-redis; it is emptied before the test."""
    redis_cluster.flush()
    return partial(caches_of_cluster, redis_cluster)


@pytest.fixture
def memcached_cache_settings(memcached_server: MemcachedServer) -> MakeCaches:
    """Make CACHES for the private memcached, which is emptied before the test."""
    memcached_server.flush()
    return partial(cache_at, memcached_server.url, "memcached")


@pytest.fixture(scope="session")
def _databases(servers: ServerPool, tmp_path_factory: pytest.TempPathFactory) -> Databases:
    return Databases(servers, tmp_path_factory.mktemp("databases"))


class MakeDatabase(Protocol):
    """Makes a database for this test and returns its alias."""

    def __call__(self, kind: DatabaseKind, alias: str | None = None) -> str:
        """
        Make one.

        Args:
            kind: postgres, mariadb, mariadb-repeatable (with REPEATABLE READ), sqlite (Django's
                default mode) or sqlite-immediate (with WAL).
            alias: The alias in DATABASES; None: a new one.
        """


def making_databases(scope: Literal["function", "module"]) -> Any:
    """
    Return a fixture that makes migrated databases, which exist until the test or module ends.

    They are real: commits are commits, and other processes and threads see them.
    The test needs no mark ``django_db`` unless it uses the default alias too. A
    connection to PostgreSQL or MariaDB that is open after the test is an error.
    """

    def make_database(
        _databases: Databases,
        tmp_path_factory: pytest.TempPathFactory,
        django_db_blocker: DjangoDbBlocker,
    ) -> Iterator[MakeDatabase]:
        folder = tmp_path_factory.mktemp("databases")
        with django_db_blocker.unblock(), ExitStack() as stack:
            yield lambda kind, alias=None: stack.enter_context(
                _databases.alias(kind, folder, alias)
            )

    return pytest.fixture(make_database, scope=scope)


make_database = making_databases("function")
make_module_database = making_databases("module")


@pytest.fixture
def db_kind(request: pytest.FixtureRequest) -> DatabaseKind:
    """The kind of database that this run is about (``--db``)."""
    return kind_of(request)


@pytest.fixture
def db_alias(make_database: MakeDatabase, db_kind: DatabaseKind) -> str:
    """The alias of a database of this test, of the kind that this run is about."""
    return make_database(db_kind)


@pytest.fixture
def alias(db_alias: str) -> str:
    """The same, in the tests of one database."""
    return db_alias


def alias_of(kind: DatabaseKind) -> Any:
    """Return a fixture that is the alias of a database of this kind, of the test alone."""
    return pytest.fixture(lambda make_database: make_database(kind))


postgres_alias = alias_of("postgres")
#: In Django's default (READ COMMITTED).
mariadb_alias = alias_of("mariadb")
#: In Django's default (DEFERRED) mode.
sqlite_alias = alias_of("sqlite")
#: With IMMEDIATE and WAL.
sqlite_immediate_alias = alias_of("sqlite-immediate")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Fail a test that leaves rows in the default database, which a later test would see."""
    yield
    left = _rows_in_default()
    assert not left, f"{item.nodeid} left rows in the default database: {left}"


def _rows_in_default() -> dict[str, int]:
    """Return how many rows each table of ours has there, and delete them for the next test."""
    left: dict[str, int] = {}
    database = connections[DEFAULT_DB_ALIAS].connection  # Django's cursors are for tests only
    if database is None:
        return left
    find = "SELECT name FROM sqlite_master WHERE type = 'table' AND (name GLOB ? OR name GLOB ?)"
    tables = database.execute(find, ["django_celery_safe_*", "app_*"]).fetchall()
    for (table,) in tables:
        (number,) = database.execute(f'SELECT count(*) FROM "{table}"').fetchone()
        if number:
            left[table] = number
    if left:
        database.execute("PRAGMA foreign_keys = OFF")
        for table in left:
            database.execute(f'DELETE FROM "{table}"')
        database.execute("PRAGMA foreign_keys = ON")
    return left


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[pytest.TestReport]:
    """Show with a failed test what the workers said that still run, such as a module's own."""
    report: pytest.TestReport = yield
    if report.failed:
        for worker in CeleryWorker.open.values():
            worker.show_stacks()
            last = worker.log.splitlines()[-200:]
            what = "running" if worker.running else "ended"
            report.sections.append((f"log of {worker.name}, {what}", "\n".join(last)))
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """Say last, and loudly, what was not run."""
    result = yield
    write_left_out(terminalreporter)
    missing: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if reason.startswith(NOT_RUN):
            missing[reason.removeprefix(NOT_RUN).split(" ")[0]] += 1
    for name, number in sorted(missing.items()):
        plural = "" if number == 1 else "s"
        terminalreporter.write_line(f"{NOT_RUN}{name}, {number} test{plural}", red=True, bold=True)
    return result


class UseBroker(Protocol):
    """Points the tests' Celery app, and workers that the test starts, at the private Redis."""

    def __call__(self, **transport_options: Any) -> Celery:
        """Return the app; ``transport_options`` are kombu's, such as ``visibility_timeout``."""


@pytest.fixture
def use_broker(redis_server: RedisServer, settings: Settings) -> Iterator[UseBroker]:
    """Make the private Redis, emptied, the broker (database 1) and result backend (2)."""
    redis_server.flush()

    def use(**transport_options: Any) -> Celery:
        for name, value in _connect_app(redis_server, transport_options).items():
            setattr(settings, name, value)
        return app

    yield use
    app.conf.update(broker_transport_options={}, task_always_eager=False)


@contextmanager
def app_on_redis(
    server: RedisServer,
    locks: RedisCacheKind = "django-redis",
    *,
    broker: Server | None = None,
    **transport_options: Any,
) -> Iterator[None]:
    """
    Have locks, broker (database 1) and results (2) of our app and of its workers in a Redis.

    Args:
        server: The Redis, which is emptied before.
        locks: The backend of the cache that holds the locks.
        broker: A RabbitMQ that is the broker instead.
        transport_options: Those of kombu, such as ``visibility_timeout``.
    """
    server.flush()
    caches = cache_at(server.url, locks)
    with override_settings(CACHES=caches, **_connect_app(server, transport_options, broker)):
        try:
            yield
        finally:
            app.conf.update(broker_transport_options={})
            forget_first_use()


def _connect_app(
    server: RedisServer, transport_options: dict[str, Any], broker: Server | None = None
) -> dict[str, Any]:
    """Let our app use a Redis; return the settings by which a worker uses it too."""
    on_redis = not isinstance(broker, RabbitMQServer)
    chosen = {
        "broker_url": server.database_url(1) if on_redis else broker.url,
        "result_backend": server.database_url(2),
        "broker_transport_options": transport_options,
    }
    forget_first_use()
    app.conf.update(chosen)
    return {f"CELERY_{name.upper()}": value for name, value in chosen.items()}


def forget_first_use() -> None:
    """Let the app connect again: it may have used another server or database before."""
    app._pool = None  # kombu has one for each address, and keeps it
    app.amqp._producer_pool = None
    publisher._pools.pop(app, None)
    vars(capture._backends).pop("by_app", None)
    if isinstance(app.backend, DisabledBackend):
        app._backend_cache = None
        vars(app._local).pop("backend", None)


@pytest.fixture
def broker(use_broker: UseBroker) -> Celery:
    """The tests' Celery app with the private Redis, empty, as its broker and result backend."""
    return use_broker()


@pytest.fixture(autouse=True)
def _forget_locks() -> Iterator[None]:
    """Renew no lock that the test before did not release."""
    yield
    renewer.forget(LeaseStore)
