"""
A mail server that misbehaves by a plan, in a thread of its own.

An e-mail that it took is in its journal before the answer is sent.
"""

import asyncio
import socket
from email import message_from_bytes
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, Final, Self

from aiosmtpd.smtp import SMTP, Envelope, Session

from tests.faults.mails.plan import EMAIL_TIMEOUT, Behaviour, Plan
from tests.processes import Journal

HOST: Final = "127.0.0.1"

#: For how long nobody listens, s.
AWAY: Final = 0.3

#: How long after its answer an e-mail is announced, s: so long takes the client to see it.
SEEN: Final = 0.01

#: For how long an answer is held back, s: shorter than clients wait.
HELD_BACK: Final = EMAIL_TIMEOUT / 4

#: For how long it says nothing, s.
SILENT: Final = 10 * EMAIL_TIMEOUT

#: How long its end may take, s.
PATIENCE: Final = 10


class MailServer:
    """
    An SMTP server on this machine, serving while the block runs.

    Args:
        journal: Where it notes each connection and each e-mail that it took.
        away: For how long nobody listens when it goes away, s.
    """

    def __init__(self, plan: Plan, journal: Journal, away: float = AWAY) -> None:
        #: Bodies of e-mails that were taken, to tell whose sender is to be killed.
        self.announced: SimpleQueue[str] = SimpleQueue()
        self.journal = journal
        self._plan, self._away = plan, away
        self._connections = 0
        self._open: set[asyncio.BaseTransport] = set()
        self._listener: asyncio.Task[None] | None = None
        # Keeps the port while nobody listens: it never does, so it refuses by itself.
        self._placeholder = socket.socket()
        self._placeholder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._placeholder.bind((HOST, 0))
        self._ready = Event()
        self._thread = Thread(target=self._run, name="mail server")

    @property
    def port(self) -> int:
        """Where it listens, on 127.0.0.1."""
        port: int = self._placeholder.getsockname()[1]
        return port

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10), "The mail server does not listen."
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()
        self._placeholder.close()

    def go_away(self) -> None:
        """Listen no more for a while."""
        if self._listener is not None:
            self._listener.cancel()
            self._listener = None
            self._loop.call_later(self._away, self._listen)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        self._listen()
        self._ready.set()
        await self._over.wait()
        ends_at = self._loop.time() + PATIENCE
        # One that was just accepted is no open one yet, but has a task.
        while (self._open or len(asyncio.all_tasks()) > 1) and self._loop.time() < ends_at:
            if self._listener is not None:
                self._listener.cancel()
            for transport in list(self._open):
                transport.abort()  # type: ignore[attr-defined]
            await asyncio.sleep(0.01)

    def _listen(self) -> None:
        listening = socket.create_server((HOST, self.port), reuse_port=True)
        listening.setblocking(False)
        self._listener = self._loop.create_task(self._accept(listening))

    async def _accept(self, listening: socket.socket) -> None:
        # Not asyncio's server: closed just after it has accepted somebody, it leaves that
        # connection open for ever (Python 3.11).
        with listening:
            while True:
                connection, _ = await self._loop.sock_accept(listening)
                await self._loop.connect_accepted_socket(self._take_connection, connection)

    def _take_connection(self) -> "Connection":
        number = self._connections
        self._connections += 1
        behaviour = self._plan.behaviour(number)
        self.journal.write("connection", number=number, behaviour=behaviour)
        return Connection(Delivery(self, number, behaviour), self._open, self._loop)


class Delivery:
    """The treatment of the e-mail of one connection; aiosmtpd calls its methods."""

    def __init__(self, server: MailServer, number: int, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self._server, self._number = server, number

    async def handle_RCPT(  # noqa: N802 - aiosmtpd's name
        self, smtp: SMTP, session: Session, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        """Answer a recipient."""
        if self.behaviour is Behaviour.REFUSE_RECIPIENT:
            return "451 4.3.0 Not now, try again later"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(  # noqa: N802 - aiosmtpd's name
        self, smtp: SMTP, session: Session, envelope: Envelope
    ) -> str:
        """Answer an e-mail, or don't."""
        if self.behaviour is Behaviour.DROP_MAIL:
            await drop(smtp)
        body = self._take(envelope)
        match self.behaviour:
            case Behaviour.DROP_ANSWER:
                await drop(smtp)
            case Behaviour.HOLD_ANSWER:
                self._server.announced.put(body)
                await asyncio.sleep(HELD_BACK)
            case Behaviour.ANNOUNCE:
                asyncio.get_running_loop().call_later(SEEN, self._server.announced.put, body)
        return "250 OK"

    def _take(self, envelope: Envelope) -> str:
        content = envelope.content
        assert isinstance(content, bytes)
        body = str(message_from_bytes(content).get_payload()).strip()
        for address in envelope.rcpt_tos:
            self._server.journal.write(
                "took", number=self._number, behaviour=self.behaviour, to=address, run=body
            )
        return body

    def leave(self) -> None:
        """Let the server go away."""
        self._server.go_away()


class Connection(SMTP):
    """One connection, which may end before anything was said."""

    def __init__(
        self,
        delivery: Delivery,
        open_ones: set[asyncio.BaseTransport],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        # The name is given, as to look it up can take seconds.
        super().__init__(delivery, hostname="localhost", loop=loop)
        self._delivery, self._open_ones = delivery, open_ones

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._open_ones.add(transport)
        super().connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        """End."""
        if self.transport is not None:
            self._open_ones.discard(self.transport)
        super().connection_lost(error)

    async def _handle_client(self) -> None:
        match self._delivery.behaviour:
            case Behaviour.REFUSE_CONNECTION:
                await self.push("421 4.3.2 Not now, try again later")
                self.transport.close()  # type: ignore[union-attr]
            case Behaviour.HANG:
                await asyncio.sleep(SILENT)
            case Behaviour.GO_AWAY:
                self._delivery.leave()
                await drop(self)
            case _:
                await super()._handle_client()


async def drop(smtp: Any) -> None:
    """End a connection without a word; does not return, as its handler is cancelled."""
    smtp.transport.abort()
    await asyncio.sleep(SILENT)
