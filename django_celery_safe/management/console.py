"""Shared by the commands: reading arguments, printing, asking for confirmation."""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from io import TextIOWrapper
from itertools import chain, groupby, islice
from typing import Any, Final

from django.core.management.base import BaseCommand, CommandError
from django.db import Error as DatabaseError
from django.db import connections
from django.db.models import Model

from .. import conf
from ..databases import refuse_untested
from ..exceptions import BackendNotSupported, CelerySafeError, describe_error
from ..inspection.decision import Decision
from ..inspection.row import Row
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

    def add_actions(self, parser: ArgumentParser, names: str) -> Any:
        """Add ``--database`` and the place of the actions, of which one must be given."""
        self.add_database(parser)
        return parser.add_subparsers(dest="action", title="actions", metavar=names, required=True)

    def add_action(self, actions: Any, name: str, text: str) -> ArgumentParser:
        """Add an action, which takes ``--database`` too."""
        parser: ArgumentParser = actions.add_parser(name, help=text, description=sentence(text))
        self.add_database(parser, default=SUPPRESS)
        return parser

    def add_listing(self, actions: Any, text: str, states: Sequence[str]) -> ArgumentParser:
        """Add the action ``list`` with ``--json`` and ``--state``."""
        listing = self.add_action(actions, "list", text)
        self.add_json(listing)
        listing.add_argument("--state", choices=states, help="only those in this state")
        return listing

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

    def get_databases(self) -> Iterable[str]:
        """Return the aliases that are meant when none is given."""
        raise NotImplementedError

    def list_rows(
        self,
        aliases: list[str],
        options: dict[str, Any],
        read: Callable[[str, int | None], Iterable[Row]],
        empty: str,
    ) -> None:
        """
        Print the rows of some databases, as many as ``--limit`` says, as text or JSON.

        Args:
            read: Called with an alias and the largest number of rows (None: all).
            empty: The line to print when there are no rows.
        """
        limit = options["limit"]
        # One more, to know whether there is more.
        most = limit + 1 if limit else None
        rows = list(islice(chain.from_iterable(read(alias, most) for alias in aliases), most))
        shown = rows[: limit or None]
        if options["as_json"]:
            self.stdout.write(json.dumps([row.as_json() for row in shown], indent=2))
            return
        for database, group in groupby(shown, key=lambda row: row.database):
            if len(aliases) > 1:
                self.stdout.write(database)
            for row in group:
                self.stdout.write(as_text(row))
        if not shown:
            self.stdout.write(empty)
        elif len(rows) > len(shown):
            self.stdout.write(f"There are more: --limit is {limit}.")

    def prune_rows(
        self,
        name: str,
        chosen: Iterable[Any],
        delete: Callable[[Any], int],
        options: dict[str, Any],
    ) -> None:
        """Delete the rows of querysets, or with ``--dry-run`` count them, and print how many."""
        dry_run = options["dry_run"]
        total = sum(rows.count() if dry_run else delete(rows) for rows in chosen)
        self.stdout.write(f"{total} {name}(s) {'would be' if dry_run else 'were'} deleted.")

    def get_single(self, aliases: list[str]) -> str:
        """Return the alias in which IDs are meant, if there is but one."""
        if len(aliases) > 1:
            raise CommandError(
                f"{' and '.join(aliases)} have IDs of their own: say which is meant by --database."
            )
        return aliases[0]

    def handle(self, *args: Any, **options: Any) -> None:
        given = options["databases"]
        for alias in given or ():
            if alias not in connections:
                known = ", ".join(connections)
                raise CommandError(f"DATABASES has no {alias!r}; it has {known}.")
        try:
            aliases = list(dict.fromkeys(given or self.get_databases()))
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
        raise ArgumentTypeError(f"{text!r} is not a valid time; write 90 or 90s, 15m, 12h, 7d, 2w")
    return timedelta(seconds=seconds)


def shorten(name: str) -> str:
    """Return a name as lists show it."""
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[:LONGEST_NAME]}... ({len(name)} characters; --json shows all)"


def fill(text: str, first: str, others: str) -> str:
    """Return a text in lines of 80 columns, the first of which begins like this, and the others."""
    text = printable(text)
    if len(first) + len(text) <= WIDTH:  # without the wrapper's time, for 100,000 locks
        return first + text
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=others,
        break_on_hyphens=False,
    )


def wrapped(text: str, indent: int = 0) -> str:
    """Return a text in lines of 80 columns, all indented but those of a sentence of its own."""
    before = " " * indent
    return fill(text, before, before or " " * 4)


def as_text(row: Row) -> str:
    """Return a row as lists show it: its title, and indented lines below."""
    lines = [wrapped(line, 4) for line in row.lines()]
    return "\n".join([shorten(printable(row.title)), *lines])


def as_page(row: Row) -> str:
    """Return all that is known of a row, a line for each thing."""
    texts = row.texts()
    width = max(map(len, texts)) + 6
    lines = [fill(text, f"    {name}".ljust(width), " " * width) for name, text in texts.items()]
    return "\n".join([shorten(printable(row.title)), *lines])


def write_array(out: Any, values: Iterable[dict[str, Any]]) -> None:
    """
    Write objects as one JSON array, each in a line of its own, as they come.

    If one can't be read, the array stays unclosed: a reader then sees that it is incomplete.
    """
    before = "["
    for value in values:
        out.write(f"{before}\n{json.dumps(value)}", ending="")
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
            # Otherwise the interpreter writes what is left at its end, and complains.
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), sys.stdout.fileno())


def confirm(
    err: Any, decision: Decision, shown: Iterable[str], total: int, noun: str, more: str = ""
) -> None:
    """
    Show what a decision is about, and ask on the terminal; only ``yes`` is yes.

    Args:
        err: Where to ask, so that the output holds nothing but what was done.
        shown: The rows that it is about; the first of them are shown.
        total: How many they are.
        noun: The name of the rows.
        more: A line below them.

    Raises:
        CommandError: The answer is no, or there is no terminal to ask at.
    """
    if sys.stdin is None or not sys.stdin.isatty():
        raise CommandError(
            "This asks before it does anything, and there is no terminal to ask at: nothing was "
            "done. Add --no-input to do it without a question."
        )
    lines = list(islice(shown, ASKED_ABOUT))
    if total > ASKED_ABOUT:
        lines.append(f"... and {total - ASKED_ABOUT} more.")
    lines += [more] if more else []
    lines.append(fill(decision.consequence, "", ""))
    question = f"{decision.label} {total} {noun}(s)? [yes/no] "
    err.write("\n".join([*lines, question]), style_func=str, ending="")
    err.flush()
    try:
        answer = input()
    except (EOFError, KeyboardInterrupt, UnicodeError):
        err.write("", style_func=str)
        answer = ""
    if answer.strip().lower() != "yes":
        raise CommandError("The answer was not 'yes': nothing was done.")
