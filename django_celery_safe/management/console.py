"""What the commands share: how they read their arguments, how they print, how they ask."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
import unicodedata
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from io import TextIOWrapper
from itertools import islice
from typing import Any, Final

from django.core.management.base import BaseCommand, CommandError
from django.db import Error as DatabaseError
from django.db import connections
from django.db.models import Model

from .. import conf
from ..databases import refuse_untested
from ..exceptions import BackendNotSupported, CelerySafeError, describe_error
from ..texts import printable
from ..transactions import lacks_table

#: Columns of a terminal.
WIDTH: Final = 80
#: Rows that a list shows if nothing else is said.
LIMIT: Final = 50
#: Rows that a question shows.
ASKED_ABOUT: Final = 20
#: Columns of a name that lists show: three lines of 80.
LONGEST_NAME: Final = 240
#: Takes a terminal's cursor to its first place, and clears what follows.
REDRAW: Final = "\x1b[H\x1b[J"
#: Seconds in what a time can be given in.
UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


class SafeCommand(BaseCommand):
    """A command that fails on no character that its output can't show, nor where there is none."""

    # It is needed most when something in the project is wrong.
    requires_system_checks = ()

    def execute(self, *args: Any, **options: Any) -> str | None:
        for wrapper in (self.stdout, self.stderr):
            if wrapper._out is None:  # it was closed before Python started
                wrapper._out = open(os.devnull, "w")  # noqa: SIM115 - as long as the process
            elif isinstance(wrapper._out, TextIOWrapper):
                wrapper._out.reconfigure(errors="backslashreplace")
        try:
            return super().execute(*args, **options)
        except CommandError as error:
            # It may hold text of others, such as a server's.
            lines = str(error).split("\n")
            raise CommandError(
                "\n".join(map(printable, lines)), returncode=error.returncode
            ) from error


class TableCommand(SafeCommand):
    """A command with actions on tables of ours, each a method ``_<action>(aliases, options)``."""

    #: The tables; without them ``migrate`` was forgotten.
    models: tuple[type[Model], ...]
    #: What they are, such as "the outbox".
    subject: str
    #: What ``--database`` says of itself.
    database_help: str

    def add_action(self, actions: Any, name: str, text: str) -> ArgumentParser:
        """Add an action, which takes ``--database`` too."""
        parser: ArgumentParser = actions.add_parser(name, help=text, description=sentence(text))
        self.add_database(parser, default=SUPPRESS)
        return parser

    def add_json(self, parser: Any) -> None:
        """Add ``--json``, which is ``options["as_json"]``."""
        parser.add_argument("--json", action="store_true", dest="as_json", help="print JSON")

    def add_limit(self, parser: ArgumentParser) -> None:
        """Add ``--limit``."""
        parser.add_argument(
            "--limit", type=count, default=LIMIT, help=f"how many at most ({LIMIT}; 0: all)"
        )

    def add_pruning(self, parser: ArgumentParser, text: str) -> None:
        """Add ``--older-than``, of which help says ``text``, and ``--dry-run``."""
        parser.add_argument("--older-than", type=age, metavar="AGE", help=text)
        parser.add_argument("--dry-run", action="store_true", help="only say how many")

    def add_database(self, parser: ArgumentParser, **extra: Any) -> None:
        """Add ``--database``."""
        parser.add_argument(
            "--database",
            metavar="ALIAS",
            dest="databases",
            action="append",
            help=self.database_help,
            **extra,
        )

    def find_databases(self) -> Iterable[str]:
        """Return the aliases that are meant when none is given."""
        raise NotImplementedError

    def handle(self, *args: Any, **options: Any) -> None:
        given = options["databases"]
        for alias in given or ():
            if alias not in connections:
                known = ", ".join(connections)
                raise CommandError(f"DATABASES has no {alias!r}; it has {known}.")
        try:
            aliases = list(dict.fromkeys(given or self.find_databases()))
            for alias in aliases:
                refuse_untested(alias, f"hold {self.subject}")
        except BackendNotSupported as refusal:
            raise CommandError(str(refusal)) from refusal
        if not aliases:
            raise CommandError(
                f"No database has {self.subject}. Run manage.py migrate, on PostgreSQL or SQLite."
            )
        for alias in aliases:
            if not connections.settings[alias]["AUTOCOMMIT"]:
                raise CommandError(
                    f"The database {alias!r} has AUTOCOMMIT off, so nothing that is done there "
                    f"would be committed. Name others by --database=ALIAS."
                )
        try:
            getattr(self, f"_{options['action']}")(aliases, options)
        except CelerySafeError as error:
            raise CommandError(str(error)) from error
        except DatabaseError as error:
            said = describe_error(error).splitlines()[0]
            for alias in aliases:
                if lacks_table(alias, *self.models):
                    raise CommandError(
                        f"The database {alias!r} has no table for {self.subject} ({said}). Run "
                        f"manage.py migrate --database={alias}."
                    ) from error
            where = ", ".join(aliases)
            raise CommandError(f"The database can't be asked, of {where}: {said}") from error


def add_no_input(parser: ArgumentParser) -> None:
    """Add ``--no-input``, without which ``options["interactive"]`` is true."""
    parser.add_argument(
        "--no-input",
        "--noinput",
        action="store_false",
        dest="interactive",
        help="do not ask before",
    )


def sentence(text: str) -> str:
    """Return what help says of an action in a list as it says it of the action alone."""
    return f"{text[0].upper()}{text[1:]}."


def typed(text: str) -> str:
    """Read a name, for argparse; what the locale could not decode is UTF-8 all the same."""
    with suppress(UnicodeError):
        return os.fsencode(text).decode()
    return text


def count(text: str) -> int:
    """Read a number such as an ID, for argparse."""
    with suppress(ValueError):
        if 0 <= (value := int(text)) < 2**63:
            return value
    raise ArgumentTypeError(f"{text!r} is no whole number from 0 on")


def age(text: str) -> timedelta:
    """Read a time such as 7d, for argparse; without a unit it is seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw]?)", text.strip(), re.ASCII)
    seconds = float(found[1]) * UNITS[found[2] or "s"] if found else -1
    if not 0 <= seconds <= conf.LONGEST_RETENTION:
        raise ArgumentTypeError(f"{text!r} is no time; write 90 or 90s, 15m, 12h, 7d, 2w")
    return timedelta(seconds=seconds)


def columns(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    if text.isascii():
        return str.__len__(text)
    return sum(
        0
        if unicodedata.category(char) in ("Mn", "Me")  # drawn over the one before
        else 2
        if unicodedata.east_asian_width(char) in "WF"
        else 1
        for char in text
    )


def cut(text: str, most: int) -> str:
    """Return as much of a text as so many columns hold."""
    taken = 0
    for place, char in enumerate(text):
        taken += columns(char)
        if taken > most:
            return text[:place]
    return text


def shorten(name: str) -> str:
    """Return a name as lists show it."""
    if columns(name) <= LONGEST_NAME:
        return name
    return f"{cut(name, LONGEST_NAME)}... ({len(name)} characters; --json shows all)"


class _Chunk(str):
    """A part of a text, as long as it is wide."""

    __slots__ = ()

    def __len__(self) -> int:
        return columns(self)


class _Wrapper(textwrap.TextWrapper):
    """Counts columns, where textwrap counts characters."""

    def _split(self, text: str) -> list[str]:
        return [_Chunk(chunk) for chunk in super()._split(text)]

    def _handle_long_word(
        self, reversed_chunks: list[str], cur_line: list[str], cur_len: int, width: int
    ) -> None:
        word = str(reversed_chunks.pop())
        if begin := cut(word, width - cur_len):
            cur_line.append(_Chunk(begin))
        reversed_chunks.append(_Chunk(word[len(begin) :]))


def fill(text: str, first: str, others: str) -> str:
    """Return a text in lines of 80 columns, the first of which begins like this, and the others."""
    return _Wrapper(
        WIDTH, initial_indent=first, subsequent_indent=others, break_on_hyphens=False
    ).fill(printable(text))


def wrapped(text: str, indent: int = 0) -> str:
    """Return a text in lines of 80 columns, all indented but those of a sentence of its own."""
    before = " " * indent
    return fill(text, before, before or " " * 4)


def crop(text: str) -> str:
    """Return as much of a text as a terminal shows at once."""
    screen = shutil.get_terminal_size()
    lines = text.splitlines()[: max(1, screen.lines - 1)]
    return "\n".join(cut(line, screen.columns) for line in lines)


def write_array(out: Any, rows: Iterable[dict[str, Any]]) -> None:
    """
    Write rows as one JSON array, each in a line of its own, as they come.

    If a row can't be read the array stays open, so that nobody takes it for all.
    """
    before = "["
    for row in rows:
        out.write(f"{before}\n{json.dumps(row)}", ending="")
        before = ","
    out.write("[]" if before == "[" else "\n]")


@contextmanager
def ending_with_its_reader(out: Any) -> Iterator[None]:
    """End the block without a word when whoever reads the output has gone, as ``head`` does."""
    try:
        with suppress(BrokenPipeError):
            yield
    finally:
        try:
            out.flush()
        except BrokenPipeError:
            # Else the interpreter writes what is left at its end, and complains.
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), sys.stdout.fileno())


def confirm(err: Any, question: str) -> bool:
    """
    Ask on the terminal; only ``yes`` is yes.

    Args:
        err: Where to ask, so that the output holds nothing but the answer.

    Raises:
        CommandError: There is no terminal to ask at.
    """
    if sys.stdin is None or not sys.stdin.isatty():
        raise CommandError(
            "This asks before it does anything, and there is no terminal to ask at: nothing was "
            "done. Add --no-input to do it without a question."
        )
    err.write(f"{question} [yes/no] ", style_func=str, ending="")
    err.flush()
    try:
        return input().strip().lower() == "yes"
    except (EOFError, KeyboardInterrupt, UnicodeError):
        err.write("", style_func=str)
        return False


def preview(rows: Iterable[str], total: int) -> list[str]:
    """Return the first of some rows, and how many more there are, for a question."""
    shown = list(islice(rows, ASKED_ABOUT))
    return [*shown, f"... and {total - len(shown)} more."] if total > len(shown) else shown


def duration(seconds: float | None) -> str:
    """Return a time in as few characters as say enough; None: it is not known."""
    if seconds is None:
        return "?"
    if seconds < 100:
        return f"{seconds:.1f}s"
    if seconds < 6000:
        return f"{seconds / 60:.0f}min"
    if seconds < 360_000:
        return f"{seconds / 3600:.0f}h"
    return f"{seconds / 86400:.0f}d"
