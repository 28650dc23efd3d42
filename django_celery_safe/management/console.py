"""Shared code of the commands: reading arguments, printing, asking for confirmation."""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from io import TextIOWrapper
from itertools import chain, groupby, islice
from typing import Any, Final

from django.core.management.base import BaseCommand, CommandError
from django.db import Error as DatabaseError
from django.db import connections
from django.db.models import Model
from django.utils.translation import override

from .. import conf
from ..databases import refuse_untested
from ..exceptions import CelerySafeError, ConfigurationError
from ..foreign_errors import describe_error
from ..inspection.decision import Decision
from ..inspection.row import Row
from ..texts import printable
from ..transactions import lacks_table

#: Columns of a terminal.
WIDTH: Final = 80
#: Rows that a list shows by default.
LIMIT: Final = 50
#: Rows that a confirmation question shows.
ASKED_ABOUT: Final = 20
#: Characters of a name that lists show: three lines of 80.
LONGEST_NAME: Final = 240
#: Seconds of each unit in which a time can be given.
UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


class SafeCommand(BaseCommand):
    """A command whose output never fails: escapes what can't be shown, works without stdout."""

    # The commands are needed most when something in the project is wrong.
    requires_system_checks = ()

    def execute(self, *args: Any, **options: Any) -> str | None:
        for wrapper in (self.stdout, self.stderr):
            if wrapper._out is None:  # the stream was closed before Python started
                wrapper._out = open(os.devnull, "w")  # noqa: SIM115 - as long as the process
            elif isinstance(wrapper._out, TextIOWrapper):
                wrapper._out.reconfigure(errors="backslashreplace")
        # Output is English in every project, for scripts. But a relay runs project code.
        english = nullcontext() if options.get("action") == "relay" else override(None)
        try:
            with english:
                return super().execute(*args, **options)
        except CommandError as error:
            # It may contain foreign text, such as a server's.
            lines = str(error).split("\n")
            raise CommandError(
                "\n".join(map(printable, lines)), returncode=error.returncode
            ) from error


def django_options() -> ArgumentParser:
    """Return Django's options of every command, for an action, whose help does not list them."""
    parser: ArgumentParser = SafeCommand().create_parser("", "", add_help=False)
    for option in parser._actions:
        # An option that is not given after the action may stand before it.
        option.default = option.help = SUPPRESS
    return parser


class TableCommand(SafeCommand):
    """A command with actions on our tables, each a method ``_<action>(aliases, options)``."""

    #: The models whose tables the command needs; if they are missing, ``migrate`` was not run.
    models: tuple[type[Model], ...]
    #: Their common name, such as "the outbox".
    subject: str
    #: The help of ``--database``.
    database_help: str

    def add_actions(self, parser: ArgumentParser, names: str) -> Any:
        """Add ``--database`` and the group of actions; an action is required."""
        self.add_database(parser)
        return parser.add_subparsers(dest="action", title="actions", metavar=names, required=True)

    def add_action(self, actions: Any, name: str, text: str) -> ArgumentParser:
        """Add an action, which also accepts ``--database``."""
        parser: ArgumentParser = actions.add_parser(
            name, help=text, description=sentence(text), parents=[django_options()]
        )
        self.add_database(parser, default=SUPPRESS)
        return parser

    def add_listing(self, actions: Any, text: str, states: Sequence[str]) -> ArgumentParser:
        """Add the action ``list`` with ``--json`` and ``--state``."""
        listing = self.add_action(actions, "list", text)
        add_json(listing)
        listing.add_argument("--state", choices=states, help="only those in this state")
        return listing

    def add_limit(self, parser: ArgumentParser) -> None:
        """Add ``--limit``."""
        parser.add_argument(
            "--limit", type=count, default=LIMIT, help=f"how many at most ({LIMIT}; 0: all)"
        )

    def add_pruning(self, parser: ArgumentParser, text: str) -> None:
        """Add ``--older-than``, with ``text`` as its help, and ``--dry-run``."""
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
        """Return the aliases to use if ``--database`` is not given."""
        raise NotImplementedError

    def list_rows(
        self,
        aliases: list[str],
        options: dict[str, Any],
        read: Callable[[str, int | None], Iterable[Row]],
        empty: str,
    ) -> None:
        """
        Print the rows of these databases, up to ``--limit``, as text or JSON.

        Args:
            read: Called with an alias and the largest number of rows (None: all).
            empty: The line to print when there are no rows.
        """
        limit = options["limit"]
        # Read one row more, to know whether there are more.
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
        """Delete the rows of querysets, or count them with ``--dry-run``, and print how many."""
        dry_run = options["dry_run"]
        total = sum(rows.count() if dry_run else delete(rows) for rows in chosen)
        self.stdout.write(f"{total} {name}(s) {'would be' if dry_run else 'were'} deleted.")

    def get_single(self, aliases: list[str]) -> str:
        """Return the only alias; refuse several, because each database has its own IDs."""
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
        except ConfigurationError as refusal:
            raise CommandError(str(refusal)) from refusal
        if not aliases:
            raise CommandError(f"No database has {self.subject}. Run manage.py migrate.")
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


def add_json(parser: ArgumentParser, **extra: Any) -> None:
    """Add ``--json``, which sets ``options["as_json"]``."""
    parser.add_argument("--json", action="store_true", dest="as_json", help="print JSON", **extra)


def add_no_input(parser: ArgumentParser) -> None:
    """Add ``--no-input``, which sets ``options["interactive"]`` to False."""
    names, text = ("--no-input", "--noinput"), "do not ask before"
    parser.add_argument(*names, action="store_false", dest="interactive", help=text)


def sentence(text: str) -> str:
    """Return the short help of an action as a full sentence, for the action's own help."""
    return f"{text[0].upper()}{text[1:]}."


def typed(text: str) -> str:
    """Read a name, for argparse; bytes that the locale could not decode are read as UTF-8."""
    with suppress(UnicodeError):
        return os.fsencode(text).decode()
    return text


def count(text: str) -> int:
    """Read a whole number such as an ID, for argparse."""
    with suppress(ValueError):
        if 0 <= (value := int(text)) < 2**63:
            return value
    raise ArgumentTypeError(f"{text!r} is not a whole number from 0 on")


def age(text: str) -> timedelta:
    """Read a time such as 7d, for argparse; a number without a unit is seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw]?)", text.strip(), re.ASCII)
    seconds = float(found[1]) * UNITS[found[2] or "s"] if found else -1
    if not 0 <= seconds <= conf.LONGEST_RETENTION:
        raise ArgumentTypeError(f"{text!r} is not a valid time; write 90 or 90s, 15m, 12h, 7d, 2w")
    return timedelta(seconds=seconds)


def shorten(name: str) -> str:
    """Return a name as lists show it, cut if it is too long."""
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[:LONGEST_NAME]}... ({len(name)} characters; --json shows all)"


def fill(text: str, first: str, others: str) -> str:
    """Return a text in lines of 80 columns; ``first`` and ``others`` are the lines' prefixes."""
    text = printable(text)
    if len(first) + len(text) <= WIDTH:  # saves textwrap's time in a list of 100,000 locks
        return first + text
    return textwrap.fill(
        text, WIDTH, initial_indent=first, subsequent_indent=others, break_on_hyphens=False
    )


def wrapped(text: str, indent: int = 0) -> str:
    """Return a text in lines of 80 columns, indented; without indent, only from line 2 on."""
    before = " " * indent
    return fill(text, before, before or " " * 4)


def as_text(row: Row) -> str:
    """Return a row as lists show it: its title with indented lines below."""
    lines = [wrapped(line, 4) for line in row.lines()]
    return "\n".join([shorten(printable(row.title)), *lines])


def as_page(row: Row) -> str:
    """Return all details of a row, one line for each."""
    texts = row.texts()
    width = max(map(len, texts)) + 6
    lines = [fill(text, f"    {name}".ljust(width), " " * width) for name, text in texts.items()]
    return "\n".join([shorten(printable(row.title)), *lines])


def write_array(out: Any, values: Iterable[dict[str, Any]]) -> None:
    """
    Write objects as one JSON array, each in its own line, as they arrive.

    If an object can't be read, the array stays unclosed, so a reader sees that it is incomplete.
    """
    before = "["
    for value in values:
        out.write(f"{before}\n{json.dumps(value)}", ending="")
        before = ","
    out.write("[]" if before == "[" else "\n]")


@contextmanager
def ending_with_its_reader(out: Any) -> Iterator[None]:
    """End the block silently when the reader of the output exits, as ``head`` does."""
    try:
        with suppress(BrokenPipeError):
            yield
    finally:
        try:
            out.flush()
        except BrokenPipeError:
            # Otherwise the interpreter flushes the rest when it exits, and prints an error.
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), sys.stdout.fileno())


def confirm(
    err: Any, decision: Decision, shown: Iterable[str], total: int, noun: str, more: str = ""
) -> None:
    """
    Show the rows of a decision, and ask for confirmation on the terminal; only ``yes`` is yes.

    Args:
        err: The stream for the question, so that the output contains only what was done.
        shown: The rows that the decision is about; only the first are shown.
        total: The number of rows.
        noun: The name of the rows.
        more: A line below the rows.

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
    lines.append(fill(str(decision.consequence), "", ""))
    question = f"{decision.label} {total} {noun}(s)? [yes/no] "
    try:
        err.write("\n".join([*lines, question]), style_func=str, ending="")
        err.flush()
        answer = input()
    except (EOFError, KeyboardInterrupt, UnicodeError):
        err.write("", style_func=str)
        answer = ""
    if answer.strip().lower() != "yes":
        raise CommandError("The answer was not 'yes': nothing was done.")
