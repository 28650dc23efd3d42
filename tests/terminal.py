"""A question of a management command, on a pseudo-terminal, and the answer to it."""

import io
import os
import sys
from collections.abc import Callable

import pytest
from django.core.management import CommandError, call_command


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
