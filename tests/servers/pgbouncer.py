"""A private PgBouncer before a private PostgreSQL."""

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg

from tests.servers.postgres import PostgresServer, connect
from tests.servers.server import Server

#: Sessions that it keeps at the server for each database.
POOL_SIZE = 4


class PgBouncerServer(Server):
    """
    PgBouncer in transaction pooling, whose every database is that of PostgreSQL by its name.

    Each transaction of a client gets the session that was idle longest, so what one
    transaction leaves in its session, the next does not find.

    Args:
        postgres: Where the databases are.
        pools: More names of databases, each with sessions of its own, and its settings.
        pool_size: The sessions of each database.
    """

    name = "pgbouncer"
    program = "pgbouncer"
    refuses_root = True
    # It has nothing to save; which signals end it at once differs between its versions.
    stop_signal = signal.SIGKILL

    def __init__(
        self,
        postgres: PostgresServer,
        pools: dict[str, str] | None = None,
        pool_size: int = POOL_SIZE,
    ) -> None:
        super().__init__()
        self.postgres, self.pools, self.pool_size = postgres, pools or {}, pool_size

    def prepare(self) -> None:
        """Write its only file; it ignores no parameter that a client asks for."""
        there = f"host={self.postgres.host} port={self.postgres.port} user=postgres"
        pools = [f"{name} = {own} {there}" for name, own in self.pools.items()]
        settings = {
            "listen_addr": self.host,
            "listen_port": self.port,
            "unix_socket_dir": "",
            "auth_type": "any",
            "pool_mode": "transaction",
            "default_pool_size": self.pool_size,
            "server_round_robin": 1,
            # A server that was away is asked again at once, not after 15 s.
            "server_login_retry": 0.1,
        }
        lines = [f"{name} = {value}" for name, value in settings.items()]
        text = "\n".join(["[databases]", *pools, f"* = {there}", "[pgbouncer]", *lines, ""])
        (self.folder / "pgbouncer.ini").write_text(text)

    def command(self) -> list[str | Path]:
        """In the foreground."""
        return [self.programs / self.program, self.folder / "pgbouncer.ini"]

    def is_ready(self) -> bool:
        """Whether it passes a query on."""
        with self.connect("postgres") as connection:
            return connection.execute("SELECT 1").fetchone() == (1,)

    @contextmanager
    def all_sessions(self, database: str) -> Iterator[list["psycopg.Connection[Any]"]]:
        """Have a client in a transaction in each session of a database; PgBouncer opens them."""
        with ExitStack() as stack:
            clients = [stack.enter_context(self.connect(database)) for _ in range(self.pool_size)]
            for client in clients:
                client.execute("BEGIN")
            pids = {client.execute("SELECT pg_backend_pid()").fetchone() for client in clients}
            assert len(pids) == self.pool_size
            yield clients

    def connect(self, database: str) -> "psycopg.Connection[Any]":
        """Return a connection in autocommit mode, to be closed by the caller."""
        return connect(self, database)
