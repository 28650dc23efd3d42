"""An SMTP server that can refuse e-mails, or let them wait, and counts what it accepts."""

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

from aiosmtpd.controller import Controller

if TYPE_CHECKING:
    from aiosmtpd.smtp import SMTP, Envelope, Session


class MailServer(Controller):
    """
    A mail server on a free port; it serves while it is used as a context manager.

    Everything it remembers is written by its own thread and only read by others.
    """

    def __init__(self) -> None:
        #: How many more e-mails are refused with "try again later".
        self.refusals_left = 0
        #: Addresses whose e-mails wait for their answer, and how many wait.
        self.held: set[str] = set()
        self.waiting: Counter[str] = Counter()
        #: Accepted e-mails by the address they went to.
        self.accepted: Counter[str] = Counter()
        # The name is given, because looking it up can take seconds.
        super().__init__(self, "127.0.0.1", 0, server_hostname="localhost")

    def __enter__(self) -> "MailServer":
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _trigger_server(self) -> None:
        self.port = self.server.sockets[0].getsockname()[1]
        super()._trigger_server()

    async def handle_DATA(self, server: "SMTP", session: "Session", envelope: "Envelope") -> str:  # noqa: N802 - aiosmtpd's name
        """Answer an e-mail; called by aiosmtpd, which cancels it if the client goes away."""
        address: Any = envelope.rcpt_tos[0]
        if self.refusals_left:
            self.refusals_left -= 1
            return "451 4.3.0 Not now, try again later"
        self.waiting[address] += 1
        try:
            while address in self.held:
                await asyncio.sleep(0.02)
        finally:
            self.waiting[address] -= 1
        self.accepted[address] += 1
        return "250 OK"
