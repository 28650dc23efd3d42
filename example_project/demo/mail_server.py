"""An SMTP server that refuses at first, lets some wait, and counts what it accepts."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from aiosmtpd.controller import BaseThreadedController

if TYPE_CHECKING:
    from asyncio import AbstractServer

    from aiosmtpd.smtp import SMTP, Envelope, Session

#: How often an e-mail that is held looks whether it may go on, s.
LOOK_EVERY: Final = 0.02


class MailServer:
    """
    A mail server on this machine.

    Everything it remembers is written by its own thread and only read by others.
    """

    def __init__(self) -> None:
        #: How many more e-mails are refused with "try again later".
        self.refusals_left = 0
        self.refused = 0
        #: Accepted e-mails by the address they went to.
        self.accepted: Counter[str] = Counter()
        #: How many e-mails to an address were held, accepted afterwards or not.
        self.met_hold: Counter[str] = Counter()
        #: Held e-mails whose sender went away; they were not accepted.
        self.cut_off: Counter[str] = Counter()
        self._held: set[str] = set()
        self._socket = socket.create_server(("127.0.0.1", 0))

    def hold(self, address: str) -> None:
        """Let e-mails to an address wait for their answer until :meth:`release`."""
        self._held.add(address)

    def release(self, address: str) -> None:
        """Answer the e-mails to an address, those that wait and those to come."""
        self._held.discard(address)

    @property
    def port(self) -> int:
        """Where it listens, on 127.0.0.1."""
        port: int = self._socket.getsockname()[1]
        return port

    @contextmanager
    def running(self) -> Iterator[MailServer]:
        """Serve for as long as the block runs."""
        controller = _Controller(self, self._socket)
        controller.start()
        try:
            yield self
        finally:
            controller.stop()
            self._socket.close()

    async def handle_DATA(  # noqa: N802 - aiosmtpd's name
        self, server: SMTP, session: Session, envelope: Envelope
    ) -> str:
        """Answer an e-mail; called by aiosmtpd."""
        if self.refusals_left:
            self.refusals_left -= 1
            self.refused += 1
            return "451 4.3.0 Not now, try again later"
        self.met_hold.update(self._held.intersection(envelope.rcpt_tos))
        try:
            while not self._held.isdisjoint(envelope.rcpt_tos):
                await asyncio.sleep(LOOK_EVERY)
        except asyncio.CancelledError:
            # By aiosmtpd, whose client is gone.
            self.cut_off.update(envelope.rcpt_tos)
            raise
        self.accepted.update(envelope.rcpt_tos)
        return "250 OK"


class _Controller(BaseThreadedController):
    """aiosmtpd's controller on a socket that is bound already: a free port can't be lost again."""

    def __init__(self, handler: MailServer, listening: socket.socket) -> None:
        # The name is given, as to look it up can take seconds.
        super().__init__(handler, server_hostname="localhost")
        self._listening = listening

    def _create_server(self) -> Awaitable[AbstractServer]:
        return self.loop.create_server(self._factory_invoker, sock=self._listening)

    def _trigger_server(self) -> Any:
        address = self._listening.getsockname()
        with socket.create_connection(address, timeout=self.ready_timeout) as connection:
            connection.recv(1024)
