"""
How the Redis store sends its commands: :class:`PlainWire`, or :class:`Wire`, which is faster.

``RedisStore.wire_class`` decides, and nothing else knows: the contract holds with both.
"""

from __future__ import annotations

import os
import random
import time
import weakref
from typing import Any, Final

from redis import ConnectionPool, Redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry
from redis.utils import HIREDIS_AVAILABLE

if HIREDIS_AVAILABLE:
    import hiredis

#: A pop that the server has not ended by so much after its time, s, is given up.
POP_MARGIN: Final = 0.5
#: Idle connections that are kept: waiters may have needed hundreds.
MOST_IDLE: Final = 20
#: Longest pause after a pop that broke, s.
PAUSE: Final = 0.05


#: What hiredis packs without a call that a signal's handler could interrupt.
TEXT: Final = frozenset({str, bytes})


class _TextPacker:
    """
    Makes text of every number before hiredis packs it.

    hiredis 3.5 crashes when a signal's handler (a soft time limit) raises while it
    packs an int, and redis-py greets a server with some.
    """

    def pack(self, *args: Any) -> list[bytes]:
        words = args[0].encode().split() if isinstance(args[0], str) else [args[0]]
        texts = [one if isinstance(one, str | bytes) else str(one) for one in args[1:]]
        return [hiredis.pack_command((*words, *texts))]


class PlainWire:
    """
    Sends commands through a client of redis-py, with the settings of ``client``'s pool.

    Its connections are beside that pool, so that locks can't use up those of the project.
    """

    def __init__(self, client: Any) -> None:
        self._pool = client.connection_pool
        options = _connection_options(self._pool)
        self._own_pool = ConnectionPool(self._pool.connection_class, **options)
        self._client: Any = Redis(connection_pool=self._own_pool)

    def ask(self, *command: str, within: float | None = None) -> Any:
        """
        Send a command and return the answer, with bytes whatever ``decode_responses`` says.

        Args:
            within: Longest that the answer may take, s, and so each step of opening a
                connection for it, where the wire can bound them; None: the socket timeout.

        Raises:
            redis.exceptions.RedisError: As the client's own ``execute_command``.
            TimeoutError: The answer took longer than ``within``.
        """
        return self._client.execute_command(*command, NEVER_DECODE=True)

    def ask_counted(self, *command: str) -> tuple[Any, bool]:
        """
        As :meth:`ask`, for a command that answers otherwise when it is done again.

        Returns:
            The answer, and whether it is that to a second try although the server may have
            done the first one, whose answer was lost.
        """
        connection: Any = self._own_pool.get_connection()
        try:
            connection.send_command(*command)
            return connection.read_response(disable_decoding=True), False
        except RedisConnectionError:
            return PlainWire.ask(self, *command), True
        except BaseException:
            connection.disconnect()  # an answer that nobody read would be the next command's
            raise
        finally:
            self._own_pool.release(connection)

    def ask_after_pop(self, key: str, seconds: float, *command: str) -> Any:
        """
        Let the server wait for an element of a list, ``seconds`` at the most, and then ask.

        Both are sent at once: whatever the pop brings, the command is run right after
        it. If that does not work, it is asked after a short pause.

        Raises:
            redis.exceptions.RedisError: As :meth:`ask`.
        """
        both = self._client.pipeline(transaction=False)
        both.execute_command("BLPOP", key, str(seconds))
        both.execute_command(*command, NEVER_DECODE=True)
        try:
            popped, answer = both.execute(raise_on_error=False)
        except (RedisConnectionError, RedisTimeoutError):
            return self._ask_after_pause(*command)
        answer = _answer_after_pop(popped, answer)
        if isinstance(answer, ResponseError):
            if _is_of_replica(answer):
                self.close()
            raise answer
        return answer

    def _ask_after_pause(self, *command: str) -> Any:
        # A restart, most likely, which ends every pop. Not all at once, and not in a
        # loop without a pause where something between us and the server ends them all.
        time.sleep(random.uniform(0, PAUSE))  # noqa: S311
        return self.ask(*command)

    def close(self) -> None:
        """Close the connections; the next command opens another."""
        self._own_pool.disconnect(inuse_connections=False)


class Wire(PlainWire):
    """
    Keeps connections for requests that are shorter than taking one from a pool.

    redis-py's client takes a connection out of its pool for each command, probes it,
    counts, times and announces the command, and gives the connection back. That takes
    longer than a lock's own two scripts do. Measured in November 2026 as in
    tests/benchmarks/locks.py, where the limit is 1.10: acquire and release took 1.03 times the
    CPU of a raw SET NX and a script, and 1.57 times with :class:`PlainWire`.

    Threads may share it; each that finds no connection idle opens another. The
    first command that finds its connection broken goes through the client, so
    that a server that was restarted costs no error.
    """

    def __init__(self, client: Any) -> None:
        super().__init__(client)
        #: Taken out and put back in one step each: an error that hits in between (a
        #: soft time limit) costs the connection, and leaves no lock behind.
        self._idle: list[_Connection] = []

    def ask(self, *command: str, within: float | None = None) -> Any:
        connection = self._take_idle(within)
        if connection is None:
            return self._use(self._connect(within), command, within)
        try:
            return self._use(connection, command, within)
        except RedisConnectionError:
            # Broken since the last command, most likely by a restart, and the others too.
            self.close()
            if within is not None:
                return self._use(self._connect(within), command, within)
            return super().ask(*command)

    def ask_counted(self, *command: str) -> tuple[Any, bool]:
        connection = self._take_idle()
        if connection is not None and connection.is_broken():
            # By a restart, most likely, and the others too. It gets nothing of this.
            self.close()
            connection = None
        if connection is None:
            return self._use(self._connect(), command), False
        try:
            return self._use(connection, command), False
        except RedisConnectionError:
            self.close()
            return super().ask(*command), True

    def ask_after_pop(self, key: str, seconds: float, *command: str) -> Any:
        try:
            return self._use(self._take_idle() or self._connect(), command, pop=(key, seconds))
        except (RedisConnectionError, RedisTimeoutError, TimeoutError):
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
            if connection.close.alive:
                if len(self._idle) < MOST_IDLE:
                    self._idle.append(connection)
                else:
                    connection.close()
            elif connection.demoted:
                self.close()

    def _connect(self, within: float | None = None) -> _Connection:
        return _Connection(self._pool, within)

    def _take_idle(self, within: float | None = None) -> _Connection | None:
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            # A fork shares its parent's socket, and must not write to it. An impatient one
            # serves nobody who may wait as long as the settings say.
            if connection.pid == os.getpid() and (within is not None or not connection.impatient):
                return connection


class _Connection:
    """
    A connection of redis-py, closed when nobody has it any more.

    Args:
        within: Longest that it waits for the server at a time, s, be it to connect; None:
            as the pool's settings say.
    """

    def __init__(self, pool: Any, within: float | None = None) -> None:
        self.pid = os.getpid()
        #: Whether it gives up sooner than the pool's settings say.
        self.impatient = within is not None
        #: Whether its server said that it is no master.
        self.demoted = False
        self._connection = pool.connection_class(**_connection_options(pool))
        if within is not None:
            self._bound(within)
        # Without it the socket may be collected before the connection that would
        # close it, and Python warns of that.
        self.close = weakref.finalize(self, self._connection.disconnect)
        self.close.atexit = False
        self._connection.connect()

    def _bound(self, within: float) -> None:
        # Not by options: those of a unix socket, or of a class of the project's own, may differ.
        for timeout in ("socket_timeout", "socket_connect_timeout"):
            own = getattr(self._connection, timeout, None)
            setattr(self._connection, timeout, within if own is None else min(own, within))
        self._connection.retry = Retry(NoBackoff(), 0)

    def ask(self, command: tuple[Any, ...], within: float | None = None) -> Any:
        try:
            # A health check would wait for its own answer first.
            self._connection.send_packed_command(self._pack(command), check_health=within is None)
            if within is not None and not self._connection.can_read(within):
                raise TimeoutError(f"no answer within {within:.3g} s")
            return self._connection.read_response(disable_decoding=True)
        except ResponseError as error:
            self._leave_replica(error)
            raise
        except BaseException:
            # An answer that is still to come would be taken for that of the next command.
            self.close()
            raise

    def is_broken(self) -> bool:
        """Return whether an idle connection was closed by the server, and close it then."""
        try:
            # There is nothing to be read from one that is in order.
            broken = self._connection.can_read(0)
        except (RedisError, OSError):
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
        if isinstance(answer, ResponseError):
            self._leave_replica(answer)
            raise answer
        return answer

    def _read(self) -> Any:
        try:
            return self._connection.read_response(disable_decoding=True)
        except ResponseError as error:
            return error

    def _leave_replica(self, error: ResponseError) -> None:
        if _is_of_replica(error):
            self.demoted = True
            self.close()

    def _pack(self, command: tuple[Any, ...]) -> list[bytes]:
        if not HIREDIS_AVAILABLE:
            return list(self._connection.pack_command(*command))
        if not TEXT.issuperset(map(type, command)):
            return _TextPacker().pack(*command)
        # As the stores' are: the packer would take three times as long.
        return [hiredis.pack_command(command)]


def _connection_options(pool: Any) -> dict[str, Any]:
    options = dict(pool.connection_kwargs)
    if HIREDIS_AVAILABLE:
        options.setdefault("command_packer", _TextPacker())
    return options


def _answer_after_pop(popped: Any, answer: Any) -> Any:
    # Otherwise a waiter whose pops are refused would hear "held" again and again, at once.
    is_held = isinstance(answer, list)
    return popped if isinstance(popped, ResponseError) and is_held else answer


def _is_of_replica(error: ResponseError) -> bool:
    # A master no more: the next connection finds out who is. Redis 6.2 says it of a
    # script in the middle of its own words.
    return isinstance(error, ReadOnlyError) or "READONLY" in str(error)
