"""A private PostgreSQL, from the machine's programs or from a wheel's."""

import shutil
import signal
from pathlib import Path
from typing import Any

import psycopg

from tests.servers.database_server import MIGRATED, DatabaseServer
from tests.servers.programs import is_open_to_others
from tests.servers.server import Server

#: Quick for tests: nothing survives a crash of the machine, but what clients see
#: of each other (commits, locks, isolation) is as ever.
SETTINGS = {
    "autovacuum": "off",
    "dynamic_shared_memory_type": "mmap",
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": "200",
    "max_wal_senders": "0",
    "shared_buffers": "64MB",
    "timezone": "UTC",
    "unix_socket_directories": "",
    "wal_level": "minimal",
}

#: A query for everything that a test may change in a database beside rows, as one text. A copy
#: of a database has the object ids of its template.
SHAPE = """
    SELECT concat_ws(E'\\n',
        (SELECT md5(string_agg(format('%s %s %s', oid, relname, reloptions), ',' ORDER BY oid))
            FROM pg_class WHERE oid >= 16384),
        (SELECT md5(string_agg(a::text, ',' ORDER BY attrelid, attnum)) FROM (
            SELECT attrelid, attnum, attname, atttypid, attnotnull, attisdropped, atthasdef
            FROM pg_attribute WHERE attrelid >= 16384) AS a),
        (SELECT md5(string_agg(format('%s %s', indexrelid, indisvalid), ',' ORDER BY indexrelid))
            FROM pg_index WHERE indexrelid >= 16384),
        (SELECT md5(string_agg(oid::text, ',' ORDER BY oid)) FROM pg_constraint),
        (SELECT md5(string_agg(format('%s %s', oid, tgenabled), ',' ORDER BY oid)) FROM pg_trigger),
        (SELECT count(*) FROM pg_proc WHERE oid >= 16384),
        (SELECT count(*) FROM pg_namespace),
        (SELECT count(*) FROM pg_statistic WHERE starelid >= 16384),
        (SELECT count(*) FROM pg_db_role_setting),
        (SELECT count(*) FROM auth_permission),
        (SELECT count(*) FROM django_content_type),
        (SELECT count(*) FROM django_migrations)
    )
"""

#: Makes every other table that ever had a row new, and lets every identity begin anew.
EMPTY = f"""
    DO $$
    DECLARE used text;
    BEGIN
        SELECT string_agg(oid::regclass::text, ', ') INTO used FROM pg_class
            WHERE relkind = 'r' AND oid >= 16384 AND relname <> ALL (ARRAY{[*MIGRATED]})
            AND (pg_relation_size(oid) > 0 OR oid IN (
                SELECT refobjid FROM pg_depend JOIN pg_sequences AS s
                    ON objid = format('%I.%I', s.schemaname, s.sequencename)::regclass
                WHERE deptype IN ('a', 'i') AND last_value IS NOT NULL));
        IF used IS NOT NULL THEN
            EXECUTE 'TRUNCATE ' || used || ' RESTART IDENTITY CASCADE';
        END IF;
    END $$
"""


class PostgresServer(DatabaseServer):
    """PostgreSQL over TCP; the superuser ``postgres`` needs no password."""

    name = "postgresql"
    program = "postgres"
    companions = ("initdb",)
    refuses_root = True
    # Fast shutdown: ends the clients' sessions instead of waiting for them.
    stop_signal = signal.SIGINT

    def prepare(self) -> None:
        """Make the cluster, with programs that the server's user can reach."""
        if self.identity and not is_open_to_others(self.programs / self.program):
            self.programs = self._copy_programs()
        initdb = self.keep(
            [
                self.programs / "initdb", "--pgdata", self.folder / "data", "--auth", "trust",
                "--username", "postgres", "--encoding", "UTF8", "--locale", "C", "--no-sync",
            ]
        )  # fmt: skip
        initdb.start()
        if initdb.wait() != 0:
            raise RuntimeError(f"initdb failed:\n{initdb.log}")

    def _copy_programs(self) -> Path:
        """Copy a wheel's PostgreSQL, which finds its libraries by relative paths."""
        install = self.programs.parent
        package = install.parent
        copy = self.folder / "wheel"
        for source in (install, package.with_name(f"{package.name}.libs")):
            if source.is_dir():
                target = copy / source.relative_to(package.parent)
                shutil.copytree(source, target, symlinks=True, ignore=_skip_headers)
        copy.chmod(0o755)
        return copy / install.relative_to(package.parent) / "bin"

    def command(self) -> list[str | Path]:
        """All settings on the command line; the cluster's file stays as it was made."""
        options = [f"--{name}={value}" for name, value in SETTINGS.items()]
        return [
            self.programs / self.program, "-D", self.folder / "data",
            "-h", self.host, "-p", str(self.port), *options,
        ]  # fmt: skip

    def connect(self, database: str = "postgres") -> "psycopg.Connection[Any]":
        """Return a connection in autocommit mode, to be closed by the caller."""
        return connect(self, database)

    def create_database(self, name: str, source: str | None = None) -> None:
        """Make a database as a copy of another that nobody uses now."""
        self.ask(f"CREATE DATABASE {name} TEMPLATE {source or 'template1'}")

    def source(self, database: str) -> str:
        """Return the database itself."""
        return database

    def drop_database(self, name: str) -> None:
        """Remove a database, and end the sessions of those who use it."""
        self.ask(f"DROP DATABASE {name} WITH (FORCE)")

    def shape(self, database: str) -> object:
        """Return what a migrated database is beside the rows of its tables."""
        with self.connect(database) as connection:
            return connection.execute(SHAPE).fetchone()

    def empty_database(self, name: str) -> None:
        """Remove what a test wrote into a migrated database, whose shape is as it was."""
        with self.connect(name) as connection:
            connection.execute(EMPTY)

    def sessions(self, database: str) -> list[Any]:
        """Return who is connected to a database, with the state and the last query."""
        query = (
            "SELECT pid, application_name, state, query FROM pg_stat_activity WHERE datname = %s"
        )
        return self.ask(query, [database])


def connect(server: Server, database: str) -> "psycopg.Connection[Any]":
    """Return a connection in autocommit mode, to be closed by the caller."""
    return psycopg.connect(
        host=server.host, port=server.port, user="postgres", dbname=database,
        autocommit=True, connect_timeout=5, prepare_threshold=None,
    )  # fmt: skip


def _skip_headers(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name in {"include", "pgxs"} or name.endswith(".a")]
