"""
The connections through which the Redis store sends its commands: :class:`Connections`.

They are redis-py's own, of the class and with the options of the cache's pool, so everything that
a project sets for its cache holds for its locks too. But they are not taken from that pool, whose
bookkeeping takes longer than a lock's request, and which locks could use up.
"""

from __future__ import annotations

import random
import select
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeAlias

from redis import exceptions
from redis.backoff import NoBackoff
from redis.connection import PythonRespSerializer
from redis.retry import Retry
from redis.utils import HIREDIS_AVAILABLE

from ... import process

if HIREDIS_AVAILABLE:
    import hiredis


#: Key and seconds of a blocking pop.
Pop: TypeAlias = tuple[str, float]
#: How long after its time, s, a pop that the server has not ended is given up.
POP_MARGIN: Final = 0.5
#: Longest pause, s, after a pop whose connection broke, most likely in a restart, which ends every
#: pop. A random pause spreads the waiters.
PAUSE: Final = 0.05
#: Idle connections that are kept, although waiters may have opened hundreds.
MOST_IDLE: Final = 20
#: All errors of redis-py, and of the operating system. Errors that a cluster client itself raises
#: have another base class.
CLIENT_ERRORS: Final = (exceptions.RedisError, exceptions.RedisClusterException, OSError)
#: Errors after which a pop is not repeated, but its command is.
BROKEN: Final = (exceptions.ConnectionError, exceptions.TimeoutError, TimeoutError)
#: Packs the greeting of redis-py, which has ints: hiredis 3.5 crashes if a signal handler (a soft
#: time limit) raises while it packs an int.
GREETER: Final[Any] = PythonRespSerializer(
    6000, lambda value: value if isinstance(value, bytes) else str(value).encode()
)
#: Packs a command.
_pack: Final[Callable[[tuple[Any, ...]], bytes]] = (
    hiredis.pack_command if HIREDIS_AVAILABLE else lambda command: b"".join(GREETER.pack(*command))
)


class Connections:
    """
    Connections to the server of a redis-py client, which are kept between requests.

    Threads may share it; a thread that finds no idle connection opens a new one. Each connection
    is taken out and put back in one atomic step: an error in between (a soft time limit) loses
    the connection, but leaves no mutex locked.
    """

    def __init__(self, client: Any) -> None:
        self._pool: Any = client.connection_pool
        #: The cache's options for each connection.
        self.options: dict[str, Any] = self._pool.connection_kwargs
        #: Open connections that no thread uses.
        self.idle: list[Any] = []
        # Otherwise Python would warn of sockets that it collects as part of a cycle.
        weakref.finalize(self, _close, self.idle).atexit = False

    def connect(self) -> None:
        """Open a connection for the next request."""
        self.idle.append(self._open())

    def close(self) -> None:
        """Close the idle connections; the next request opens a new one."""
        _close(self.idle)

    def ask(
        self, command: tuple[Any, ...], within: float | None = None, pop: Pop | None = None
    ) -> tuple[Any, bool]:
        """
        Send a command; send it again if an idle connection broke, as in a restart of the server.

        Args:
            within: Longest time that the answer may take, s, and also each step of opening a
                connection for it; None: the cache's timeouts.
            pop: Key and seconds of a blocking pop that is sent together with the command: whatever
                the pop returns, the server runs the command right after it.

        Returns:
            The answer, with bytes whatever ``decode_responses`` says, and whether it may be a
            repeat's: the server may have run the first command, whose answer was lost.

        Raises:
            redis.exceptions.RedisError: The server refused the command, or did not answer.
            TimeoutError: The answer took longer than ``within``.
        """
        idle = self._take_idle(within)
        try:
            return self._use(idle or self._open(within), command, within, pop), False
        except BROKEN as error:
            is_broken = idle is not None and isinstance(error, exceptions.ConnectionError)
            if not (is_broken or pop):
                raise
            self.close()  # the other connections broke, too
        if pop is not None:
            time.sleep(random.uniform(0, PAUSE))  # noqa: S311
        return self._use(self._open(within), command, within), True

    def _take_idle(self, within: float | None) -> Any:
        while self.idle:
            try:
                connection = self.idle.pop()
            except IndexError:  # another thread took it
                return None
            try:
                # A fork shares its parent's socket, and must not write to it. A connection with
                # shorter timeouts is not for a request that may wait as long as the settings say.
                # A healthy connection has nothing to read.
                is_fit = connection.pid == process.pid and (within or not connection.is_hasty)
                poll = connection.poll
                if is_fit and not (connection.can_read(0) if poll is None else poll.poll(0)):
                    return connection
            except CLIENT_ERRORS:
                pass  # the server closed it
            connection.disconnect()
        return None

    def _open(self, within: float | None = None) -> Any:
        connection = self._pool.connection_class(**{"command_packer": GREETER, **self.options})
        connection.is_hasty = within is not None
        if within is not None:
            # Not by options: a unix socket, or a project's own class, may have others.
            for timeout in ("socket_timeout", "socket_connect_timeout"):
                own = getattr(connection, timeout, None)
                setattr(connection, timeout, within if own is None else min(own, within))
            connection.retry = Retry(NoBackoff(), 0)
        connection.connect()
        # It takes a sixth of the time of can_read(); Windows has none.
        connection.poll = select.poll() if hasattr(select, "poll") else None
        if connection.poll is not None:
            connection.poll.register(connection._sock, select.POLLIN)
        return connection

    def _use(
        self,
        connection: Any,
        command: tuple[Any, ...],
        within: float | None = None,
        pop: Pop | None = None,
    ) -> Any:
        packed, refused = _pack(command), None
        if pop is not None:
            packed = _pack(("BLPOP", pop[0], str(pop[1]))) + packed
            within = pop[1] + POP_MARGIN
        try:
            # Without a health check, which would wait for its own answer first.
            connection.send_packed_command([packed], check_health=within is None)
            if within is not None and not connection.can_read(within):
                raise TimeoutError(f"no answer within {within:.3g} s")
            for _ in range(1 if pop is None else 2):
                try:
                    answer = connection.read_response(disable_decoding=True)
                except exceptions.ResponseError as error:
                    # Also of the pop: its waiter would be told "held" again and again at once.
                    refused = refused or error
        except BaseException:
            # An answer that arrives later would be taken for the next command's answer.
            connection.disconnect()
            raise
        # A replica that was the primary before; the next connection finds the new one. For a
        # script, Redis 6.2 reports this in the middle of another error text.
        is_replica = refused is not None and "READONLY" in f"{refused!r} {refused}".upper()
        if is_replica:
            self.close()
        if is_replica or len(self.idle) >= MOST_IDLE:
            connection.disconnect()
        else:
            self.idle.append(connection)
        if refused is not None:
            raise refused
        return answer


class ClusterClient:
    """Sends commands as :class:`Connections` does, through redis-py's client of the cluster."""

    #: The client connects to each node when it needs it.
    idle = True

    def __init__(self, client: Any) -> None:
        self._client = client
        self._send = partial(client.execute_command, NEVER_DECODE=True)
        self.options: dict[str, Any] = client.get_connection_kwargs()

    def close(self) -> None:
        """Close nothing: the connections are the cache's."""

    def ask(
        self, command: tuple[Any, ...], within: float | None = None, pop: Pop | None = None
    ) -> tuple[Any, bool]:
        """
        Do what :meth:`Connections.ask` does, but for ``within``: the cache's timeouts hold.

        After a pop, another client's command may be first: a cluster takes no two at once.
        """
        if pop is not None:
            self._send("BLPOP", pop[0], str(pop[1]))
        if command[0] != "EVALSHA":
            return self._send(*command), False
        try:
            # A command for a node is sent once, unlike one for a key.
            node = self._client.get_node_from_key(command[3])
            return self._send(*command, target_nodes=node), False
        except (exceptions.ConnectionError, exceptions.ClusterDownError):
            return self._send(*command), True


def _close(connections: list[Any]) -> None:
    with suppress(IndexError):  # another thread may take the last one
        while connections:
            connections.pop().disconnect()
