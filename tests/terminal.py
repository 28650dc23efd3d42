"""A question of a management command, and the answer to it."""

import builtins
import io
from collections.abc import Callable

import pytest
from django.core.management import CommandError, call_command


def answer(
    text: str,
    command: str,
    *arguments: str,
    meanwhile: Callable[[str], object] = lambda question: None,
) -> tuple[str, str]:
    """
    Run a command that asks once, and answer.

    Args:
        text: The answer; "": the end of the input.
        meanwhile: Gets all that was shown, and runs before the answer.

    Returns:
        All that the command showed, and with what it failed, if it did.
    """
    shown, failed, asked = io.StringIO(), "", []

    def read(prompt: str) -> str:
        asked.append(prompt)
        meanwhile(shown.getvalue())
        if not text:
            raise EOFError
        return text

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtins, "input", read)
        try:
            call_command(command, *arguments, stdout=shown, stderr=shown)
        except CommandError as error:
            failed = str(error)
    assert asked == ["[yes/no] "]
    return shown.getvalue(), failed
