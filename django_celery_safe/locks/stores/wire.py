"""
One Redis connection, kept for requests that are shorter than taking one from a pool.

redis-py's client takes a connection out of its pool for each command, probes it,
counts, times and announces the command, and gives the connection back. That takes
longer than a lock's own two scripts do; see tests/benchmarks/locks.py.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError


class Wire:
    """
    Sends commands as ``client`` would, with the settings of its pool.

    Threads may share it: whoever finds it busy goes through the client. So does
    the first command that finds the connection broken, so that a server that
    was restarted costs no error.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._mutex = threading.Lock()
        self._connection: Any = None

    def ask(self, *command: Any) -> Any:
        """
        Send a command and return the answer, with bytes whatever ``decode_responses`` says.

        Raises:
            redis.exceptions.RedisError: As the client's own ``execute_command``.
        """
        if not self._mutex.acquire(blocking=False):
            return self._client.execute_command(*command, NEVER_DECODE=True)
        try:
            connection = self._connection
            # A fork shares its parent's socket, and must not write to it.
            if connection is None or connection.pid != os.getpid():
                return self._ask_first(command)
            connection.send_command(*command)
            return connection.read_response(disable_decoding=True)
        except ResponseError:
            # An answer like any other: the connection is at the next one.
            raise
        except RedisConnectionError:
            # Broken since the last command, most likely by a restart of the server.
            if self._drop() is None:
                raise
            return self._client.execute_command(*command, NEVER_DECODE=True)
        except BaseException:
            # A soft time limit or Ctrl-C, too: an answer that is still to come would
            # be taken for that of the next command.
            self._drop()
            raise
        finally:
            self._mutex.release()

    def close(self) -> None:
        """Close the connection; the next command opens another."""
        with self._mutex:
            self._drop()

    def _ask_first(self, command: tuple[Any, ...]) -> Any:
        self._connection = None
        pool = self._client.connection_pool
        connection = pool.connection_class(**pool.connection_kwargs)
        connection.connect()
        self._connection = connection
        # Closed with this object. Without it the socket may be collected before the
        # connection that would close it, and Python warns of that.
        self._close = weakref.finalize(self, connection.disconnect)
        self._close.atexit = False
        connection.send_command(*command)
        return connection.read_response(disable_decoding=True)

    def _drop(self) -> Any:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._close()
        return connection
