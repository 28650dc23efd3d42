"""
One Redis connection, kept for requests that are shorter than taking one from a pool.

redis-py's client takes a connection out of its pool for each command, probes it,
counts, times and announces the command, and gives the connection back. That takes
longer than a lock's own two scripts do; see tests/benchmarks/locks.py.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, Final

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

#: Longest that the server keeps a pop waiting, s; half the socket timeout if that is less.
LONGEST_POP: Final = 1.0
#: By how much the server may be late to end a pop, s: it looks ten times a second.
POP_MARGIN: Final = 0.5


class Wire:
    """
    Sends commands as ``client`` would, with the settings of its pool.

    Threads may share it; each that finds no connection idle opens another. The
    first command that finds its connection broken goes through the client, so
    that a server that was restarted costs no error.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        #: Taken out and put back in one step each: an error that hits in between (a
        #: soft time limit) costs the connection, and leaves no lock behind.
        self._idle: list[_Connection] = []
        timeout = client.connection_pool.connection_kwargs.get("socket_timeout")
        #: Longest that :meth:`pop` lets the server wait, s.
        self.longest_pop = LONGEST_POP if timeout is None else min(LONGEST_POP, timeout / 2)

    def ask(self, *command: Any) -> Any:
        """
        Send a command and return the answer, with bytes whatever ``decode_responses`` says.

        Raises:
            redis.exceptions.RedisError: As the client's own ``execute_command``.
        """
        connection = self._take_idle()
        try:
            if connection is None:
                connection = _Connection(self, self._client.connection_pool)
                answer = connection.ask(command)
            else:
                try:
                    answer = connection.ask(command)
                except RedisConnectionError:
                    # Broken since the last command, most likely by a restart of the server.
                    return self._client.execute_command(*command, NEVER_DECODE=True)
        except ResponseError:
            # An answer like any other: the connection is at the next one.
            if connection is not None:
                self._idle.append(connection)
            raise
        self._idle.append(connection)
        return answer

    def pop(self, key: str, seconds: float) -> bytes | None:
        """
        Wait for an element of a list, on a connection of this call alone.

        Returns:
            The element; None after ``longest_pop`` or ``seconds``, whichever is less.

        Raises:
            redis.exceptions.RedisError: As :meth:`ask`.
        """
        connection = self._take_idle() or _Connection(self, self._client.connection_pool)
        try:
            found = connection.ask(
                ("BLPOP", key, str(self.longest_pop)), min(seconds, self.longest_pop + POP_MARGIN)
            )
        except TimeoutError:
            return None
        self._idle.append(connection)
        return None if found is None else found[1]

    def close(self) -> None:
        """Close the connections; the next command opens another."""
        while (connection := self._take_idle()) is not None:
            connection.close()

    def _take_idle(self) -> _Connection | None:
        try:
            connection = self._idle.pop()
        except IndexError:
            return None
        # A fork shares its parent's socket, and must not write to it.
        return connection if connection.pid == os.getpid() else None


class _Connection:
    """A connection of redis-py, closed when its wire goes out of use."""

    def __init__(self, wire: Wire, pool: Any) -> None:
        self.pid = os.getpid()
        self._connection = pool.connection_class(**pool.connection_kwargs)
        self._connection.connect()
        # Without it the socket may be collected before the connection that would
        # close it, and Python warns of that.
        self.close = weakref.finalize(wire, self._connection.disconnect)
        self.close.atexit = False

    def ask(self, command: tuple[Any, ...], longest: float | None = None) -> Any:
        """Return the answer; hang up and raise TimeoutError if it takes ``longest`` seconds."""
        try:
            self._connection.send_command(*command)
            if longest is not None and not self._connection.can_read(longest):
                raise TimeoutError
            return self._connection.read_response(disable_decoding=True)
        except ResponseError:
            raise
        except BaseException:
            # An answer that is still to come would be taken for that of the next command.
            self.close()
            raise
