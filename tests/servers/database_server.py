"""The base of the private servers of databases."""

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from tests.processes.waiting import wait_for
from tests.servers.server import Server

#: Seconds for clients that were told to end to be gone from the server's list.
DROP_PATIENCE = 20.0

#: Tables whose rows the migrations made.
MIGRATED = ("auth_permission", "django_content_type", "django_migrations")


class DatabaseServer(Server):
    """A server of databases, which this process asks by a session that stays open."""

    _session: Any = None

    def stop(self) -> None:
        """End it in order, this process's own session first."""
        if self._session is not None:
            self._session.close()
        self._session = None
        super().stop()

    @abstractmethod
    def connect(self, database: str = "") -> Any:
        """
        Return a connection in autocommit mode, to be closed by the caller.

        Args:
            database: Unset: what is there from the beginning.
        """

    def is_ready(self) -> bool:
        """Whether it takes a connection."""
        with closing(self.connect()):
            return True

    def ask(self, statement: str, params: Sequence[object] | None = None) -> list[Any]:
        """Execute a statement by the session: to begin one costs ten queries; return its rows."""
        if self._session is None:
            self._session = self.connect()
        with closing(self._session.cursor()) as cursor:
            cursor.execute(statement, params)
            return list(cursor.fetchall()) if cursor.description else []

    @abstractmethod
    def create_database(self, name: str, source: Any = None) -> None:
        """Make a database, as a copy from a ``source`` unless that is None."""

    @abstractmethod
    def source(self, database: str) -> Any:
        """Return what copies of a migrated database, which nobody uses, are made from."""

    @abstractmethod
    def shape(self, database: str) -> object:
        """Return what a migrated database is beside the rows of its tables."""

    @abstractmethod
    def empty_database(self, name: str) -> None:
        """Remove what a test wrote into a migrated database, whose shape is as it was."""

    @abstractmethod
    def drop_database(self, name: str) -> None:
        """Remove a database, and end the sessions of those who use it."""

    @abstractmethod
    def sessions(self, database: str) -> list[Any]:
        """Return who is connected to a database, with the state and the last query."""

    def wait_until_unused(self, name: str) -> None:
        """
        Wait until nobody is connected to a database.

        Raises:
            RuntimeError: Somebody stays connected: who, and what was done last. The
                database is removed.
        """
        try:
            wait_for(lambda: not self.sessions(name), DROP_PATIENCE)
        except TimeoutError:
            left = "\n".join(f"  {session}" for session in self.sessions(name))
            self.drop_database(name)
            raise RuntimeError(f"Still connected to database {name}:\n{left}") from None
