"""What the commands share: how they read their arguments, and how they print."""

from __future__ import annotations

import re
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

from django.core.management.base import BaseCommand, CommandError
from django.db import Error as DatabaseError
from django.db import connections
from django.db.models import Model

from .. import conf
from ..exceptions import CelerySafeError, describe_error
from ..transactions import lacks_table

#: Columns of a terminal.
WIDTH: Final = 80
#: Rows that a list shows if nothing else is said.
LIMIT: Final = 50
#: Characters of a name that lists show: three lines of 80 columns.
LONGEST_NAME: Final = 240
#: Seconds in what a time can be given in.
UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


class TableCommand(BaseCommand):
    """A command with actions on tables of ours, each a method ``_<action>(aliases, options)``."""

    # It is needed most when something in the project is wrong.
    requires_system_checks = ()

    #: The tables; without them ``migrate`` was forgotten.
    models: tuple[type[Model], ...]
    #: What they are, such as "the outbox".
    subject: str
    #: What ``--database`` says of itself.
    database_help: str

    def add_action(self, actions: Any, name: str, text: str) -> ArgumentParser:
        """Add an action, which takes ``--database`` too."""
        parser: ArgumentParser = actions.add_parser(name, help=text, description=text)
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
        aliases = list(dict.fromkeys(given or self.find_databases()))
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


def printable(text: str) -> str:
    """Return ``text`` with everything that could steer a terminal written as an escape."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def shorten(name: str) -> str:
    """Return a name as lists show it."""
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[:LONGEST_NAME]}... ({len(name)} characters; --json shows all)"


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
