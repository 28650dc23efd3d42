"""
Databases that Django knows by an alias while a test runs.

Each is empty but migrated, real (other processes and threads can use it) and nobody
else's while the test runs. Migrating is slow, so it is done once for each kind and
copied. Copying is slow in PostgreSQL and MariaDB, so the next test gets the same database,
emptied.
"""

import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from django.core.management import call_command
from django.db import DEFAULT_DB_ALIAS, connections

from tests.mysql_driver import load_driver
from tests.processes.waiting import dead_port, wait_for
from tests.servers.database_server import DatabaseServer
from tests.servers.mariadb import MariaDBServer
from tests.servers.pgbouncer import PgBouncerServer
from tests.servers.pool import ServerPool
from tests.servers.postgres import PostgresServer

#: None waits for the disk: no test ends the operating system, and a busy disk may take seconds.
#: ``sqlite`` is Django's default (DEFERRED), ``sqlite-immediate`` has IMMEDIATE and WAL;
#: ``mariadb`` is Django's default (READ COMMITTED), ``mariadb-repeatable`` the server's
#: (REPEATABLE READ); ``pgbouncer`` is a PostgreSQL behind a PgBouncer of its own.
DatabaseKind = Literal[
    "postgres", "pgbouncer", "mariadb", "mariadb-repeatable", "sqlite", "sqlite-immediate"
]
#: Databases with a server, which many processes can use.
SERVERS: tuple[DatabaseKind, ...] = ("postgres", "pgbouncer", "mariadb", "mariadb-repeatable")

DEFERRED = {"init_command": "PRAGMA synchronous=OFF;"}
IMMEDIATE = {
    "transaction_mode": "IMMEDIATE",
    "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=OFF;",
}


def gone_settings() -> dict[str, Any]:
    """Return the settings of a PostgreSQL that is not there."""
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": "gone",
        "HOST": "127.0.0.1",
        "PORT": str(dead_port()),
    }


@contextmanager
def without_autocommit(alias: str) -> Iterator[None]:
    """Have autocommit off in a database, and roll back in the end."""
    connections[alias].set_autocommit(False)
    try:
        yield
    finally:
        connections[alias].rollback()
        connections[alias].set_autocommit(True)


def end_own_session(alias: str) -> None:
    """End this thread's session with a server, which does so when it was idle for long."""
    connection: Any = connections[alias]
    connection.ensure_connection()
    is_postgres = connection.vendor == "postgresql"
    session = connection.connection
    number = session.info.backend_pid if is_postgres else session.thread_id()
    kill, look = (
        ("SELECT pg_terminate_backend(%s)", "SELECT 1 FROM pg_stat_activity WHERE pid = %s")
        if is_postgres
        else ("KILL %s", "SELECT 1 FROM information_schema.processlist WHERE id = %s")
    )
    with closing(connection.copy()) as other, other.cursor() as cursor:

        def is_gone() -> bool:
            cursor.execute(look, [number])
            return cursor.fetchone() is None

        if not is_gone():
            cursor.execute(kill, [number])
        wait_for(is_gone, 30)


#: Counts the sessions that wait for a lock, by vendor.
WAITING = {
    "postgresql": "SELECT count(*) FROM pg_stat_activity "
    "WHERE datname = current_database() AND wait_event_type = 'Lock'",
    "mysql": "SELECT variable_value FROM information_schema.global_status "
    "WHERE variable_name = 'Innodb_row_lock_current_waits'",
}


def until_somebody_waits(alias: str) -> None:
    """Wait until a session waits for a lock in a database."""
    connection: Any = connections[alias]
    with closing(connection.copy()) as other, other.cursor() as cursor:

        def is_waited() -> bool:
            cursor.execute(WAITING[connection.vendor])
            return int(cursor.fetchone()[0]) > 0

        wait_for(is_waited, 90, "nobody waits")


class Template(NamedTuple):
    """
    A migrated database of a server.

    Attributes:
        source: What the server copies it from.
        shape: What it is beside the rows of its tables.
        unused: Copies that tests have used and that are as they were migrated.
    """

    source: Any
    shape: object
    unused: list[str]


class Databases:
    """
    Makes databases for Django, each under an alias of its own.

    Args:
        servers: Where PostgreSQL and MariaDB run; each is started when first needed.
        folder: For the migrated SQLite file that is copied.
    """

    def __init__(self, servers: ServerPool, folder: Path) -> None:
        self.servers = servers
        self.folder = folder
        self._templates: dict[DatabaseServer, Template] = {}

    def alias(
        self, kind: DatabaseKind, folder: Path, alias: str | None = None
    ) -> AbstractContextManager[str]:
        """
        Have a migrated database during the block; gives its alias.

        Args:
            folder: For a SQLite file.
            alias: The alias to use; None: a new one.

        Raises:
            RuntimeError: At the end: somebody is still connected to the database of a
                server; the message says who.
        """
        alias = alias or f"{kind}-{uuid.uuid4().hex[:8]}"
        if kind == "pgbouncer":
            return self._behind_pgbouncer(alias, folder)
        if kind == "postgres":
            return self._copy_on(self.servers.get(PostgresServer), alias, postgres_settings)
        if kind.startswith("mariadb"):
            settings = partial(mariadb_settings, kind=kind)
            return self._copy_on(self.servers.get(MariaDBServer), alias, settings)
        path = self._copy_sqlite(kind, folder / f"{alias}.sqlite3")
        return registered(alias, sqlite_settings(path, kind))

    @contextmanager
    def _behind_pgbouncer(self, alias: str, folder: Path) -> Iterator[str]:
        with (
            self.alias("postgres", folder, f"behind-{alias}") as behind,
            PgBouncerServer(self.servers.get(PostgresServer)) as bouncer,
            registered(alias, pgbouncer_settings(bouncer, connections.settings[behind]["NAME"])),
        ):
            yield alias

    @contextmanager
    def _copy_on(
        self, server: DatabaseServer, alias: str, settings: Callable[[Any, str], dict[str, Any]]
    ) -> Iterator[str]:
        template = self._templates.get(server)
        if template is None:
            original = f"template_{uuid.uuid4().hex}"
            server.create_database(original)
            migrate(settings(server, original))
            template = Template(server.source(original), server.shape(original), [])
            self._templates[server] = template
        if template.unused:
            name = template.unused.pop()
        else:
            name = f"test_{uuid.uuid4().hex}"
            server.create_database(name, template.source)
        try:
            with registered(alias, settings(server, name)):
                yield alias
        finally:
            server.wait_until_unused(name)
            if server.shape(name) == template.shape:
                server.empty_database(name)
                template.unused.append(name)
            else:  # The test changed a table, an index or a setting.
                server.drop_database(name)

    def _copy_sqlite(self, kind: DatabaseKind, path: Path) -> Path:
        # Migrated with the settings it is used with, as a project's is. A file that
        # is not in WAL mode yet is switched by its first connection, and of several
        # first ones at a time SQLite refuses all but one at once, whatever the timeout.
        template = self.folder / f"template-{kind}.sqlite3"
        if not template.exists():
            migrate(sqlite_settings(template, kind))
        shutil.copyfile(template, path)
        return path


def postgres_settings(server: PostgresServer | PgBouncerServer, name: str) -> dict[str, Any]:
    """Return the DATABASES entry of a database on this server."""
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": name,
        "USER": "postgres",
        "HOST": server.host,
        "PORT": str(server.port),
    }


def pgbouncer_settings(bouncer: PgBouncerServer, name: str) -> dict[str, Any]:
    """Return the DATABASES entry of a database behind PgBouncer."""
    return {**postgres_settings(bouncer, name), "DISABLE_SERVER_SIDE_CURSORS": True}


def mariadb_settings(
    server: MariaDBServer, name: str, kind: DatabaseKind = "mariadb"
) -> dict[str, Any]:
    """Return the DATABASES entry of a database on this server."""
    load_driver()
    options = {"isolation_level": "repeatable read"} if kind == "mariadb-repeatable" else {}
    return {
        "ENGINE": "django.db.backends.mysql",
        "NAME": name,
        "USER": "root",
        "HOST": server.host,
        "PORT": str(server.port),
        "OPTIONS": options,
    }


def sqlite_settings(path: Path, kind: DatabaseKind) -> dict[str, Any]:
    """Return the DATABASES entry of a SQLite file."""
    options = IMMEDIATE if kind == "sqlite-immediate" else DEFERRED
    return {"ENGINE": "django.db.backends.sqlite3", "NAME": str(path), "OPTIONS": dict(options)}


def migrate(database: dict[str, Any]) -> None:
    """Make all tables, those of apps without migrations included, and disconnect."""
    alias = f"migrate-{uuid.uuid4().hex[:8]}"
    with registered(alias, database):
        call_command("migrate", database=alias, run_syncdb=True, verbosity=0)


@contextmanager
def registered(alias: str, database: dict[str, Any]) -> Iterator[str]:
    """Make a database known to Django during the block; this thread's connection ends with it."""
    databases = connections.settings
    assert alias not in databases, f"There is a database {alias!r} already."
    # Fills in the defaults; it insists on seeing the default alias beside ours.
    filled = connections.configure_settings({DEFAULT_DB_ALIAS: {}, alias: dict(database)})
    databases[alias] = filled[alias]
    try:
        yield alias
    finally:
        connections[alias].close()
        del connections[alias]
        del databases[alias]
