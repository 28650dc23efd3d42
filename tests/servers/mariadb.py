"""A private MariaDB, from the machine's programs."""

import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.mysql_driver import load_driver
from tests.servers.database_server import MIGRATED, DatabaseServer

#: Quick for tests: nothing survives a crash, but what clients see of each other (commits, locks,
#: isolation) is as ever.
SETTINGS = {
    "character-set-server": "utf8mb4",
    "innodb-buffer-pool-size": "64M",
    "innodb-doublewrite": "0",
    "debug-no-sync": "1",
    "innodb-flush-log-at-trx-commit": "0",
    "innodb-flush-method": "nosync",
    "innodb-log-file-size": "32M",
    "innodb-stats-persistent": "0",
    "innodb-use-native-aio": "0",
    "max-connections": "300",
    "performance-schema": "0",
    "sync-frm": "0",
    # Summer time there must not matter to anybody.
    "default-time-zone": "+03:00",
}


class MariaDBServer(DatabaseServer):
    """MariaDB over TCP, without privileges: any user is welcome."""

    name = "mariadb"
    program = "mariadbd"
    refuses_root = True

    def prepare(self) -> None:
        """Make an empty folder: without privileges it needs no table of its own."""
        folder = self.folder / "data"
        folder.mkdir()
        if self.identity:
            os.chown(folder, self.identity["user"], self.identity["group"])

    def command(self) -> list[str | Path]:
        """All settings on the command line."""
        return [
            self.programs / self.program, "--no-defaults", "--skip-grant-tables",
            "--skip-networking=0", "--skip-log-bin", f"--datadir={self.folder / 'data'}",
            f"--socket={self.folder / 'socket'}", f"--bind-address={self.host}",
            f"--port={self.port}", *(f"--{name}={value}" for name, value in SETTINGS.items()),
        ]  # fmt: skip

    def connect(self, database: str = "") -> Any:
        """Return a connection in autocommit mode, to be closed by the caller."""
        return load_driver().connect(
            host=self.host, port=self.port, user="root", database=database, autocommit=True,
            charset="utf8mb4", connect_timeout=5,
        )  # fmt: skip

    def create_database(self, name: str, source: Sequence[str] | None = None) -> None:
        """Make a database, and its tables by these statements."""
        self.ask(f"CREATE DATABASE `{name}` CHARACTER SET utf8mb4")
        if source:
            with closing(self.connect(name)) as connection, closing(connection.cursor()) as cursor:
                for statement in ("SET foreign_key_checks = 0", *source):
                    cursor.execute(statement)

    def drop_database(self, name: str) -> None:
        """Remove a database, and end the sessions of those who use it."""
        for session in self.sessions(name):
            self.ask(f"KILL {session[0]}")
        self.ask(f"DROP DATABASE `{name}`")

    def source(self, database: str) -> list[str]:
        """Return the statements that make the tables of a migrated database, with their rows."""
        tables = self._tables(database)
        made = [self.ask(f"SHOW CREATE TABLE `{database}`.`{name}`")[0][1] for name in tables]
        copies = [f"INSERT INTO `{name}` SELECT * FROM `{database}`.`{name}`" for name in MIGRATED]
        return [*map(_from_one, made), *copies]

    def shape(self, database: str) -> object:
        """Return what a migrated database is beside the rows of its tables."""
        columns = self.ask(
            "SELECT table_name, column_name, column_type, collation_name FROM "
            "information_schema.columns WHERE table_schema = %s ORDER BY 1, 2", [database],
        )  # fmt: skip
        others = self.ask(
            "SELECT table_name, index_name, column_name FROM information_schema.statistics "
            "WHERE table_schema = %s UNION ALL SELECT table_name, engine, table_type FROM "
            "information_schema.tables WHERE table_schema = %s UNION ALL SELECT "
            "event_object_table, trigger_name, event_manipulation FROM "
            "information_schema.triggers WHERE trigger_schema = %s ORDER BY 1, 2, 3",
            [database] * 3,
        )
        counts = [self.ask(f"SELECT count(*) FROM `{database}`.`{name}`") for name in MIGRATED]
        return columns, others, counts

    def empty_database(self, name: str) -> None:
        """Remove what a test wrote into a migrated database, whose shape is as it was."""
        tables = [one for one in self._tables(name) if one not in MIGRATED]
        used = {
            table
            for (table,) in self.ask(
                "SELECT table_name FROM information_schema.tables WHERE table_schema = %s AND "
                "auto_increment > 1", [name],
            )
        }  # fmt: skip
        rows = self.ask(
            " UNION ALL ".join(f"(SELECT '{one}' FROM `{name}`.`{one}` LIMIT 1)" for one in tables)
        )
        emptied = (used | {table for (table,) in rows}) - set(MIGRATED)
        self.ask("SET foreign_key_checks = 0")
        for table in emptied:
            self.ask(f"TRUNCATE `{name}`.`{table}`")

    def sessions(self, database: str) -> list[Any]:
        """Return who is connected to a database, with the state and the last query."""
        query = "SELECT id, command, state, info FROM information_schema.processlist WHERE db = %s"
        return self.ask(query, [database])

    def _tables(self, database: str) -> list[str]:
        query = "SELECT table_name FROM information_schema.tables WHERE table_schema = %s"
        return [name for (name,) in self.ask(query, [database])]


def _from_one(statement: str) -> str:
    """Return how a table is made whose first row has the key 1."""
    head, _, options = statement.rpartition(")")
    kept = [option for option in options.split(" ") if not option.startswith("AUTO_INCREMENT=")]
    return f"{head}){' '.join(kept)}"
