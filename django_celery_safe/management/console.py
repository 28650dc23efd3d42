"""Shared code of the commands: their actions, how they print rows, and their question."""

from __future__ import annotations

import json
import re
import textwrap
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any, Final

from django.core.management.base import BaseCommand, CommandError
from django.db import Error as DatabaseError
from django.utils.translation import override

from .. import conf
from ..exceptions import CelerySafeError
from ..texts import describe_error, duration, printable

#: Columns of a terminal.
WIDTH: Final = 80
#: Rows that a list shows as text; JSON has all.
MOST_LISTED: Final = 50
#: Exit status if a store or database could not be asked, so that its rows are unknown.
NOT_ASKED: Final = 2
#: Seconds of each unit in which a time can be given.
UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


class ActionCommand(BaseCommand):
    """A command with actions, each a method ``_<action>(options)``."""

    # The commands are needed most when something in the project is wrong.
    requires_system_checks = ()
    #: The name of its rows, such as "lock".
    noun: str

    def add_actions(self, parser: ArgumentParser) -> Any:
        """Add the group of actions; one of them is required."""
        return parser.add_subparsers(dest="action", title="actions", required=True)

    def add_action(self, actions: Any, name: str, text: str) -> ArgumentParser:
        """Add an action; Django's options may stand before or after it."""
        common = BaseCommand().create_parser("", "", add_help=False)
        for option in common._actions:
            option.default = option.help = SUPPRESS
        action: ArgumentParser = actions.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}.", parents=[common]
        )
        return action

    def handle(self, *args: Any, **options: Any) -> None:
        action = options["action"]
        # Output is English in every project, for scripts. But a relay runs project code.
        english = nullcontext() if action == "relay" else override(None)
        try:
            with english:
                getattr(self, f"_{action}")(options)
        except CelerySafeError as error:
            raise CommandError(printable(str(error)), returncode=NOT_ASKED) from error
        except DatabaseError as error:
            reason = printable(describe_error(error).splitlines()[0])
            text = f"The database can't be asked: {reason}. Was manage.py migrate run?"
            raise CommandError(text, returncode=NOT_ASKED) from error

    def write_json(self, values: Any) -> None:
        """Print values as JSON."""
        self.stdout.write(json.dumps(values, indent=2))

    def write_list(
        self,
        options: Mapping[str, Any],
        rows: Iterable[Any],
        headings: Sequence[str],
        describe: Callable[[Any], Sequence[object]],
    ) -> None:
        """Print all rows as JSON, or the first rows as a table of what ``describe`` returns."""
        if options["as_json"]:
            self.write_json([row.as_json() for row in rows])
            return
        found = list(islice(rows, MOST_LISTED + 1))
        if not found:
            self.stdout.write(f"No {self.noun}.")
            return
        self.write_table(headings, map(describe, found[:MOST_LISTED]))
        if len(found) > MOST_LISTED:
            self.stdout.write(f"Only the first {MOST_LISTED} are shown; --json has all.")

    def write_table(self, headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Print rows in columns; what a row has beyond the headings gets lines of its own."""
        lines = [list(headings), *([printable(str(cell)) for cell in row] for row in rows)]
        # Both zip() end with the headings.
        widths = [max(map(len, column)) for column in zip(*lines, strict=False)]
        for line in lines:
            cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=False)]
            self.stdout.write("  ".join(cells).rstrip())
            for text in filter(None, line[len(headings) :]):
                self.stdout.write(fill(text, "    "))

    def write_details(self, values: Mapping[str, Any]) -> None:
        """Print names and values; one that ends in ``_s`` is a duration."""
        for name, value in values.items():
            title = name.removesuffix("_s")
            text = duration(value) if title != name else str("-" if value in (None, "") else value)
            self.stdout.write(fill(printable(text), f"{title:<14}"))

    def confirm(self, question: str, options: Mapping[str, Any]) -> None:
        """
        Ask for confirmation, unless ``--no-input`` was given; only ``yes`` is yes.

        Raises:
            CommandError: The answer is another one, or there is nobody to ask.
        """
        if not options["interactive"]:
            return
        self.stdout.write(fill(question))
        try:
            answer = input("[yes/no] ")
        except EOFError:
            answer = ""
        if answer.strip().lower() != "yes":
            raise CommandError("The answer was not 'yes', so nothing was done. See --no-input.")


def add_json(action: ArgumentParser) -> None:
    """Add ``--json``, which sets ``options["as_json"]``."""
    action.add_argument("--json", action="store_true", dest="as_json", help="print JSON")


def add_no_input(action: ArgumentParser) -> None:
    """Add ``--no-input``, which sets ``options["interactive"]`` to False."""
    names, text = ("--no-input", "--noinput"), "do not ask before"
    action.add_argument(*names, action="store_false", dest="interactive", help=text)


def age(text: str) -> float:
    """Read a time such as 7d as seconds, for argparse; a number without a unit is seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw]?)", text.strip(), re.ASCII)
    seconds = float(found[1]) * UNITS[found[2] or "s"] if found else -1
    if not 0 <= seconds <= conf.LONGEST_RETENTION:
        raise ArgumentTypeError(f"{text!r} is not a valid time; write 90 or 90s, 15m, 12h, 7d, 2w")
    return seconds


def fill(text: str, first: str = "") -> str:
    """Return a text in lines of 80 columns; ``first`` is before it, other lines are indented."""
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_on_hyphens=False,
        break_long_words=False,
    )
