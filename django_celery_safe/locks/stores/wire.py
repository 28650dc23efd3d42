"""
How the Redis store sends its commands: :class:`PlainWire`, or :class:`Wire`, which is faster.

``RedisStore.wire_class`` chooses; no other code depends on it, and the contract holds with both.
"""

from __future__ import annotations

import os
import random
import time
import weakref
from collections.abc import Callable
from typing import Any, Final

from redis import ConnectionPool, Redis, exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.utils import HIREDIS_AVAILABLE

#: How long after its time, s, a pop that the server has not ended is given up.
POP_MARGIN: Final = 0.5
#: Idle connections that are kept, although waiters may have opened hundreds.
MOST_IDLE: Final = 20
#: Longest pause after a pop whose connection broke, s.
PAUSE: Final = 0.05


#: All errors of redis-py, and of the operating system. Errors that a cluster client itself raises
#: have another base class.
CLIENT_ERRORS: Final = (exceptions.RedisError, exceptions.RedisClusterException, OSError)

#: Packs a command that has only texts; None: the connection's own method is the fastest.
pack_text: Callable[[tuple[Any, ...]], bytes] | None = None
if HIREDIS_AVAILABLE:
    from hiredis import pack_command as pack_text

#: Types that hiredis packs without a call that a signal handler could interrupt.
TEXT: Final = frozenset({str, bytes})


class _TextPacker:
    """
    Converts every number to text before hiredis packs it.

    hiredis 3.5 crashes if a signal handler (a soft time limit) raises while it packs an
    int, and redis-py sends some ints when it connects.
    """

    def __init__(self, pack: Callable[[tuple[Any, ...]], bytes]) -> None:
        self._pack = pack

    def pack(self, *args: Any) -> list[bytes]:
        words = args[0].encode().split() if isinstance(args[0], str) else [args[0]]
        texts = [one if isinstance(one, str | bytes) else str(one) for one in args[1:]]
        return [self._pack((*words, *texts))]


class PlainWire:
    """
    Sends commands through a separate client, with the settings of ``client``'s pool.

    Its connections come from a separate pool, so locks can't use up the project's connections.
    """

    def __init__(self, client: Any) -> None:
        self._pool = client.connection_pool
        options = _connection_options(self._pool)
        self._own_pool = ConnectionPool(self._pool.connection_class, **options)
        self._client: Any = Redis(connection_pool=self._own_pool)

    @property
    def options(self) -> dict[str, Any]:
        """The cache's settings for each connection."""
        options: dict[str, Any] = self._pool.connection_kwargs
        return options

    @property
    def service_name(self) -> str | None:
        """The name of the primary in Sentinel; None: the cache does not use Sentinel."""
        return getattr(self._pool, "service_name", None)

    def ask(self, *command: str, within: float | None = None) -> Any:
        """
        Send a command and return the answer, with bytes whatever ``decode_responses`` says.

        Args:
            within: Longest time that the answer may take, s, and also each step of opening a
                connection for it, if the wire can limit them; None: the socket timeout.

        Raises:
            redis.exceptions.RedisError: As for the client's own ``execute_command``.
            TimeoutError: The answer took longer than ``within``.
        """
        return self._client.execute_command(*command, NEVER_DECODE=True)

    def ask_counted(self, *command: str) -> tuple[Any, bool]:
        """
        Do what :meth:`ask` does, for a command whose answer changes when it is repeated.

        Returns:
            The answer, and whether it may be a repeat's: the command was sent a second time,
            and the server may have run the first one, whose answer was lost.
        """
        connection: Any = self._own_pool.get_connection()
        try:
            connection.send_command(*command)
            return connection.read_response(disable_decoding=True), False
        except exceptions.ConnectionError:
            return PlainWire.ask(self, *command), True
        except BaseException:
            connection.disconnect()  # an unread answer would be read as the next command's
            raise
        finally:
            self._own_pool.release(connection)

    def ask_after_pop(self, key: str, seconds: float, *command: str) -> Any:
        """
        Send a blocking pop of ``seconds`` at most and a command; return the command's answer.

        Both are sent at once: whatever the pop returns, the server runs the command right
        after it. If the connection breaks, the command is sent again after a short pause.

        Raises:
            redis.exceptions.RedisError: As for :meth:`ask`.
        """
        both = self._client.pipeline(transaction=False)
        both.execute_command("BLPOP", key, str(seconds))
        both.execute_command(*command, NEVER_DECODE=True)
        try:
            popped, answer = both.execute(raise_on_error=False)
        except (exceptions.ConnectionError, exceptions.TimeoutError):
            return self._ask_after_pause(*command)
        answer = _answer_after_pop(popped, answer)
        if isinstance(answer, exceptions.ResponseError):
            if _is_of_replica(answer):
                self.close()
            raise answer
        return answer

    def _ask_after_pause(self, *command: str) -> Any:
        # Most likely a restart, which ends every pop. The random pause spreads the waiters,
        # and prevents a busy loop if something between us and the server ends all pops.
        time.sleep(random.uniform(0, PAUSE))  # noqa: S311
        return self.ask(*command)

    def close(self) -> None:
        """Close the connections; the next command opens a new one."""
        self._own_pool.disconnect(inuse_connections=False)


class Wire(PlainWire):
    """
    Keeps its own connections, because taking one from a pool takes longer than a request.

    For each command, redis-py's client takes a connection out of its pool, probes it,
    counts, times and announces the command, and returns the connection. That takes
    longer than a lock's own two scripts. Measured in November 2026 with
    tests/benchmarks/locks.py, where the limit is 1.10: acquire and release took 1.03 times the
    CPU of a raw SET NX and a script, and 1.57 times with :class:`PlainWire`.

    Threads may share it; a thread that finds no idle connection opens a new one. The
    first command that finds its connection broken is sent again through the client, so
    a restart of the server does not cause an error.
    """

    def __init__(self, client: Any) -> None:
        super().__init__(client)
        #: Connections are taken out and put back in one atomic step each: an error in between
        #: (a soft time limit) loses the connection, but leaves no mutex locked.
        self._idle: list[_Connection] = []

    def ask(self, *command: str, within: float | None = None) -> Any:
        connection = self._take_idle(within)
        if connection is not None:
            try:
                return self._use(connection, command, within)
            except exceptions.ConnectionError:
                # The connection broke since its last command, most likely in a restart, and so
                # did the other connections.
                self.close()
                if within is None:
                    return super().ask(*command)
        return self._use(self._connect(within), command, within)

    def ask_counted(self, *command: str) -> tuple[Any, bool]:
        connection = self._take_idle()
        if connection is not None and connection.is_broken():
            # Most likely broken in a restart, like the others. The command was not sent on it.
            self.close()
            connection = None
        if connection is None:
            return self._use(self._connect(), command), False
        try:
            return self._use(connection, command), False
        except exceptions.ConnectionError:
            self.close()
            return super().ask(*command), True

    def ask_after_pop(self, key: str, seconds: float, *command: str) -> Any:
        try:
            return self._use(self._take_idle() or self._connect(), command, pop=(key, seconds))
        except (exceptions.ConnectionError, exceptions.TimeoutError, TimeoutError):
            return self._ask_after_pause(*command)

    def close(self) -> None:
        super().close()
        while (connection := self._take_idle()) is not None:
            connection.close()

    def _use(
        self,
        connection: _Connection,
        command: tuple[str, ...],
        within: float | None = None,
        pop: tuple[str, float] | None = None,
    ) -> Any:
        try:
            if pop is not None:
                return connection.ask_after_pop(*pop, command)
            return connection.ask(command, within)
        finally:
            if connection.is_open:
                if len(self._idle) < MOST_IDLE:
                    self._idle.append(connection)
                else:
                    connection.close()
            elif connection.demoted:
                self.close()

    def _connect(self, within: float | None = None) -> _Connection:
        return _Connection(self._pool, within)

    def ask_importer(self, *command: str, within: float | None = None) -> Any:
        """Send a command to the cluster node that is taking its slot over from another node."""
        connection = self._connect(within)
        try:
            connection.ask(("ASKING",), within)
            return connection.ask(command, within)
        finally:
            connection.close()

    def _take_idle(self, within: float | None = None) -> _Connection | None:
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            # A fork shares its parent's socket, and must not write to it. A connection with
            # shorter timeouts is not for a request that may wait as long as the settings say.
            if connection.pid == os.getpid() and (within is not None or not connection.impatient):
                return connection


class _Connection:
    """
    A redis-py connection that is closed when it is garbage-collected.

    Args:
        within: Longest time that each step waits for the server, s, including the connect;
            None: the timeouts in the pool's settings.
    """

    def __init__(self, pool: Any, within: float | None = None) -> None:
        self.pid = os.getpid()
        #: Whether it may serve another command.
        self.is_open = True
        #: Whether its timeouts may be shorter than those in the pool's settings.
        self.impatient = within is not None
        #: Whether its server reported that it is a replica.
        self.demoted = False
        self._connection = pool.connection_class(**_connection_options(pool))
        if within is not None:
            self._bound(within)
        # Otherwise the socket may be collected before the connection that would close it,
        # and Python would warn.
        self._disconnect = weakref.finalize(self, self._connection.disconnect)
        self._disconnect.atexit = False
        self._connection.connect()

    def close(self) -> None:
        """Close the connection; it can't be used again."""
        self.is_open = False
        self._disconnect()

    def _bound(self, within: float) -> None:
        # Not through options: a unix socket, or a project's own class, may have other options.
        for timeout in ("socket_timeout", "socket_connect_timeout"):
            own = getattr(self._connection, timeout, None)
            setattr(self._connection, timeout, within if own is None else min(own, within))
        self._connection.retry = Retry(NoBackoff(), 0)

    def ask(self, command: tuple[Any, ...], within: float | None = None) -> Any:
        try:
            # With ``within``, no health check: it would wait for its own answer first.
            self._connection.send_packed_command(self._pack(command), check_health=within is None)
            if within is not None and not self._connection.can_read(within):
                raise TimeoutError(f"no answer within {within:.3g} s")
            return self._connection.read_response(disable_decoding=True)
        except exceptions.ResponseError as error:
            self._leave_replica(error)
            raise
        except BaseException:
            # An answer that arrives later would be taken for the next command's answer.
            self.close()
            raise

    def is_broken(self) -> bool:
        """Return whether the server closed an idle connection; if so, close it here too."""
        try:
            # A healthy idle connection has nothing to read.
            broken = self._connection.can_read(0)
        except CLIENT_ERRORS:
            broken = True
        if broken:
            self.close()
        return bool(broken)

    def ask_after_pop(self, key: str, seconds: float, command: tuple[str, ...]) -> Any:
        connection = self._connection
        commands = [("BLPOP", key, str(seconds)), command]
        try:
            connection.send_packed_command(connection.pack_commands(commands))
            if not connection.can_read(seconds + POP_MARGIN):
                raise TimeoutError
            popped, answer = [self._read() for _ in commands]
        except BaseException:
            self.close()
            raise
        answer = _answer_after_pop(popped, answer)
        if isinstance(answer, exceptions.ResponseError):
            self._leave_replica(answer)
            raise answer
        return answer

    def _read(self) -> Any:
        try:
            return self._connection.read_response(disable_decoding=True)
        except exceptions.ResponseError as error:
            return error

    def _leave_replica(self, error: Exception) -> None:
        if _is_of_replica(error):
            self.demoted = True
            self.close()

    def _pack(self, command: tuple[Any, ...]) -> list[bytes]:
        if pack_text is None:
            return list(self._connection.pack_command(*command))
        if not TEXT.issuperset(map(type, command)):
            return _TextPacker(pack_text).pack(*command)
        # Packed directly, since a command of texts only needs no _TextPacker, which would take
        # three times as long.
        return [pack_text(command)]


def _connection_options(pool: Any) -> dict[str, Any]:
    options = dict(pool.connection_kwargs)
    if pack_text is not None:
        options.setdefault("command_packer", _TextPacker(pack_text))
    return options


def _answer_after_pop(popped: Any, answer: Any) -> Any:
    # Report the pop's error: otherwise a waiter whose pops are refused would be told "held"
    # again and again, without a pause.
    is_held = isinstance(answer, list)
    return popped if isinstance(popped, exceptions.ResponseError) and is_held else answer


def _is_of_replica(error: Exception) -> bool:
    # The server is no longer a primary; the next connection finds the new one. For a script,
    # Redis 6.2 reports this in the middle of another error text.
    return isinstance(error, exceptions.ReadOnlyError) or "READONLY" in str(error)
