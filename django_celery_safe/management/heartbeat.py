"""The file that shows a probe that the relays are still working."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from django.core.management.base import CommandError

from ..sending.relay import Relay


@contextmanager
def kept_heartbeat(path: str, relays: Sequence[Relay]) -> Iterator[Callable[[], None]]:
    """
    Keep a file during the block; yield a function that touches it after turns of all relays.

    A relay that waits for a broker or database also takes turns, because a restart of its
    process would not help. A relay that hangs takes no turns.

    Raises:
        CommandError: The file can't be written.
    """
    file = Path(path)
    try:
        file.touch()
    except OSError as error:
        raise CommandError(f"--heartbeat-file can't be written: {error}") from error
    seen = [relay.turns for relay in relays]

    def touch() -> None:
        turns = [relay.turns for relay in relays]
        if all(now > before for now, before in zip(turns, seen, strict=True)):
            # If this fails, the probe sees an old file, but relaying continues.
            with suppress(OSError):
                file.touch()
            seen[:] = turns

    try:
        yield touch
    finally:
        with suppress(OSError):
            file.unlink()
