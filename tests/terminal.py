"""A management command on a terminal, as a person sees it."""

import fcntl
import io
import os
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
from django.core.management import CommandError, call_command

from tests.processes import wait_for
from tests.processes.settings import settings_environment

ROOT: Final = Path(__file__).resolve().parent.parent
#: Seconds until it must have done what is waited for.
PATIENCE: Final = 30


class Terminal:
    """A management command in a process of its own, on a pseudo-terminal."""

    def __init__(self, command: str, *arguments: str, lines: int = 24, columns: int = 80) -> None:
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        env = {**os.environ, **settings_environment(), "TERM": "xterm"}
        for name in ("LINES", "COLUMNS"):
            env.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "django", command, "--no-color", *arguments],
            cwd=ROOT,
            env=env,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        self._seen: list[bytes] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                read = os.read(self._master, 65536)
            except OSError:  # the last one who had it open is gone
                return
            if not read:
                return
            self._seen.append(read)

    @property
    def text(self) -> str:
        """The text that it has shown so far."""
        return b"".join(self._seen).decode().replace("\r\n", "\n")

    def wait_for(self, text: str, times: int = 1) -> None:
        """Wait until it has shown a text so often."""
        wait_for(lambda: self.text.count(text) >= times, PATIENCE, f"no {text!r}: {self.text!r}")

    def type(self, text: str) -> None:
        """Type a text."""
        os.write(self._master, text.encode())

    def end(self) -> int:
        """Wait for its end, and return its exit status."""
        status = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return status

    def close(self) -> None:
        """End it if it still runs, and leave nothing of it."""
        self.process.kill()
        self.end()
        os.close(self._master)


@contextmanager
def on_terminal(command: str, *arguments: str, **size: int) -> Iterator[Terminal]:
    """Run a command on a terminal while the block runs."""
    terminal = Terminal(command, *arguments, **size)
    try:
        yield terminal
    finally:
        terminal.close()


class _Asked(io.StringIO):
    """An output that types an answer as soon as a question is on it."""

    def __init__(self, keyboard: int, answer: str, meanwhile: Callable[[str], object]) -> None:
        super().__init__()
        self._keyboard, self._answer, self._meanwhile = keyboard, answer, meanwhile
        self._answered = False

    def flush(self) -> None:
        """Answer, once, if this is a question."""
        if self.getvalue().endswith("[yes/no] ") and not self._answered:
            self._answered = True
            self._meanwhile(self.getvalue())
            os.write(self._keyboard, self._answer.encode())


def answer(
    text: str,
    command: str,
    *arguments: str,
    meanwhile: Callable[[str], object] = lambda question: None,
) -> tuple[str, str]:
    """
    Run a command in this process, which asks once, on a terminal, and type an answer.

    Args:
        text: What is typed: a line, or Ctrl-D.
        meanwhile: Gets all that was shown, and runs before the answer is typed.

    Returns:
        All that the command showed, and with what it failed, if it did.
    """
    master, slave = os.openpty()
    shown, failed = _Asked(master, text, meanwhile), ""
    with (
        open(master, "wb"),
        open(slave) as keyboard,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(sys, "stdin", keyboard)
        try:
            call_command(command, *arguments, stdout=shown, stderr=shown)
        except CommandError as error:
            failed = str(error)
    assert shown.getvalue().count("[yes/no] ") == 1
    return shown.getvalue(), failed
