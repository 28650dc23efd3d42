"""The file that shows a probe that the relays are still working."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from django.core.management.base import CommandError

from ..sending.relay import Relay


class HeartbeatFile:
    """
    A file that is touched whenever all relays of a process have taken a turn.

    Args:
        path: The file's path; an existing file is used.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    @contextmanager
    def kept(self, relays: Sequence[Relay]) -> Iterator[Callable[[], None]]:
        """
        Keep the file during the block; yield a function that touches it after turns of all relays.

        A relay that waits for a broker or database also takes turns, because a restart of its
        process would not help. A relay that hangs takes no turns.

        Raises:
            CommandError: The file can't be written.
        """
        try:
            self.path.touch()
        except OSError as error:
            raise CommandError(f"--heartbeat-file can't be written: {error}") from error
        seen = [relay.turns for relay in relays]

        def touch() -> None:
            turns = [relay.turns for relay in relays]
            if any(now == before for now, before in zip(turns, seen, strict=True)):
                return
            # If this fails, the probe sees an old file, but relaying continues.
            with suppress(OSError):
                self.path.touch()
            seen[:] = turns

        try:
            yield touch
        finally:
            with suppress(OSError):
                self.path.unlink()
