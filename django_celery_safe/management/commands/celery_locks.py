"""``manage.py celery_locks``: list locks and their holders, release locks, examine the store."""

from __future__ import annotations

import json
from argparse import SUPPRESS
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

from django.core.management.base import CommandError, CommandParser

from ...exceptions import CelerySafeError
from ...inspection.decision import Refused
from ...inspection.doctor import examine
from ...inspection.locks import RELEASE, LockRow, find_other_places, find_row, iter_rows
from ...locks.stores import locks_are_shared
from ...texts import printable
from ..console import (
    ASKED_ABOUT,
    SafeCommand,
    add_json,
    add_no_input,
    as_page,
    as_text,
    confirm,
    django_options,
    ending_with_its_reader,
    fill,
    sentence,
    shorten,
    typed,
    wrapped,
    write_array,
)

#: Exit status if the store did not answer or can't list locks, so that the locks are unknown.
NOT_ASKED: Final = 2
#: The verdicts of the doctor after which locks are not known to be safe, worst first.
NOT_SAFE: Final = (
    ("unsafe", 1, "Locks are not safe here"),
    ("unknown", 2, "Whether locks are safe here is not known"),
)
#: Help text of NAME.
NAME_HELP: Final = "its whole name; --json shows it as it is, where the list escapes or cuts it"

HEADING: Final = (
    f"LOCK\n    {'HELD':>7} {'LEFT':>9}  {'KIND':<7}  HOLDER\n    TASK AND ARGUMENTS\n    TASK ID"
)
LEGEND: Final = "+: its holder renews the lease. !: that is overdue, so the holder may be dead."

#: The report of each outcome of a release; the first two are successes.
SENTENCES: Final = {
    "released": "Released {}",
    "would_release": "Would release {}",
    "not_held": "Nobody holds {}",
    "renewed": "Left alone: {}",
    "changed": "Left alone: {}",
}
FREED: Final = ("released", "would_release")


class Command(SafeCommand):
    """Parses, calls, prints."""

    help = "Show the locks that are held, free some of them, or examine their store."

    def add_arguments(self, parser: CommandParser) -> None:
        self._add_common(parser)
        self._add_choice(parser)
        actions = parser.add_subparsers(
            dest="action", title="actions", metavar="{list,show,release,doctor}"
        )
        listing = self._add_action(actions, "list", "show the locks that are held (default)")
        self._add_choice(listing, default=SUPPRESS)
        showing = self._add_action(
            actions, "show", "show all of one lock, and whether its holder lives"
        )
        showing.add_argument("name", type=typed, metavar="NAME", help=NAME_HELP)
        freeing = self._add_action(
            actions,
            "release",
            "free locks: those named, or all of a task, or all that begin with a text",
            " Their holders are not stopped: a holder finds out at its next renewal, or when it "
            "calls ensure(). A lock that its holder renews is left alone.",
        )
        freeing.add_argument("names", nargs="*", type=typed, metavar="NAME", help=NAME_HELP)
        self._add_choice(freeing, default=SUPPRESS)
        freeing.add_argument(
            "--force", action="store_true", help="also those that their holders renew"
        )
        freeing.add_argument("--dry-run", action="store_true", help="only say which")
        add_no_input(freeing)
        self._add_action(actions, "doctor", "test the lock store: two processes compete for a lock")

    def _add_action(self, actions: Any, name: str, text: str, more: str = "") -> CommandParser:
        parser: CommandParser = actions.add_parser(
            name,
            help=text,
            description=f"{sentence(text)}{more}",
            parents=[django_options()],
        )
        self._add_common(parser, default=SUPPRESS)
        return parser

    def _add_common(self, parser: CommandParser, **extra: Any) -> None:
        add_json(parser, **extra)

    def _add_choice(self, parser: CommandParser, **extra: Any) -> None:
        for flag, metavar, text in (
            ("--task", "TASK", "those that runs or messages of this task hold"),
            ("--prefix", "TEXT", "those whose names begin with this"),
        ):
            parser.add_argument(flag, type=typed, metavar=metavar, help=text, **extra)
        text = "also the markers of copies of messages"
        parser.add_argument("--all", action="store_true", dest="markers", help=text, **extra)

    def handle(self, *args: Any, **options: Any) -> None:
        action = options["action"] or "list"
        try:
            with ending_with_its_reader(self.stdout):
                if action != "doctor":  # the doctor reports this itself, with details
                    self._warn_if_alone()
                getattr(self, f"_{action}")(options)
        except CelerySafeError as error:
            raise CommandError(str(error), returncode=NOT_ASKED) from error

    def _warn_if_alone(self) -> None:
        if not locks_are_shared():
            self.stderr.write(
                "Locks live in this process's own memory: those of workers and web servers "
                "can't be seen from here."
            )

    # list, show

    def _list(self, options: dict[str, Any]) -> None:
        rows = iter_chosen(options)
        if options["as_json"]:
            write_array(self.stdout, (row.as_json() for row in rows))
            return
        total, places = 0, Counter[tuple[str, int]]()
        for total, row in enumerate(rows, 1):
            if total == 1:
                self.stdout.write(HEADING)
            self.stdout.write(as_text(row))
            if row.limit > 1:
                places[row.lock, row.limit] += 1
        narrowed = options["task"] is not None or options["prefix"] is not None
        nothing = "No such lock is held." if narrowed else "No lock is held."
        for (name, limit), held in sorted(places.items()):
            self.stdout.write(f"{shorten(printable(name))}: {held} of {limit} places held.")
        self.stdout.write(f"{total} lock(s) held.\n{LEGEND}" if total else nothing)

    def _show(self, options: dict[str, Any]) -> None:
        row = find_row(options["name"])
        if row is None:
            name = options["name"]
            raise CommandError(
                f"Nobody holds {printable(name)}. {_other_places(name)}"
                f"`manage.py celery_locks` lists the names of all that are held."
            )
        as_json = options["as_json"]
        self.stdout.write(json.dumps(row.as_json(), indent=2) if as_json else as_page(row))

    # release

    def _release(self, options: dict[str, Any]) -> None:
        found, dry_run = self._find(options), options["dry_run"]
        if options["interactive"] and not dry_run:
            self._confirm(found, options)
        outcomes: list[dict[str, str]] = []
        try:
            for name, row in found:
                outcome = release(name, row, force=options["force"], dry_run=dry_run)
                if row is None:
                    outcome["reason"] = _other_places(name).rstrip(". ")
                outcomes.append(outcome)
        finally:
            with ending_with_its_reader(self.stdout):  # then continue to the exit status
                if options["as_json"]:
                    write_array(self.stdout, outcomes)
                else:
                    for outcome in outcomes:
                        self.stdout.write(as_sentence(outcome))
        if not outcomes:
            raise CommandError("No such lock is held, so there was nothing to release.")
        if left := [each for each in outcomes if each["outcome"] not in FREED]:
            raise CommandError(f"{len(left)} of {len(outcomes)} lock(s) were not released.")

    def _find(self, options: dict[str, Any]) -> list[tuple[str, LockRow | None]]:
        """Return the name of each selected lock, and the lock itself if it is held."""
        names = list(dict.fromkeys(options["names"]))
        ways = [bool(names), options["task"] is not None, options["prefix"] is not None]
        if ways.count(True) != 1:
            raise CommandError(
                "Say which locks to release in one way: by their NAMEs, by --task or by --prefix.",
                returncode=NOT_ASKED,
            )
        if options["prefix"] == "":
            raise CommandError(
                "An empty --prefix would mean every lock, so nothing was released. Give the text "
                "that their names begin with, or --task.",
                returncode=NOT_ASKED,
            )
        if names:
            return [(name, find_row(name)) for name in names]
        return [(row.name, row) for row in iter_chosen(options)]

    def _confirm(self, found: list[tuple[str, LockRow | None]], options: dict[str, Any]) -> None:
        """Show the locks to release, and why others are left alone, and ask for confirmation."""
        rows, left = [], []
        for name, row in found:
            outcome = release(name, row, force=options["force"], dry_run=True)
            if row is not None and outcome["outcome"] in FREED:
                rows.append(row)
            else:
                left.append(as_sentence(outcome))
        if rows:
            more = left[:ASKED_ABOUT]
            if len(left) > len(more):
                more.append(f"... and {len(left) - len(more)} more left alone.")
            shown = list(map(as_text, rows))
            shown[0] = f"{HEADING}\n{shown[0]}"
            confirm(self.stderr, RELEASE, shown, len(rows), "lock", "\n".join(more))

    # doctor

    def _doctor(self, options: dict[str, Any]) -> None:
        findings = []
        for finding in examine():
            findings.append(finding)
            if not options["as_json"]:
                head = f"{finding.verdict:<9}{finding.check:<12}"
                self.stdout.write(fill(finding.text, head, " " * len(head)))
        if options["as_json"]:
            write_array(self.stdout, (finding._asdict() for finding in findings))
        for verdict, status, text in NOT_SAFE:
            if checks := [finding.check for finding in findings if finding.verdict == verdict]:
                raise CommandError(f"{text}: {', '.join(checks)}.", returncode=status)
        if not options["as_json"]:
            self.stdout.write("Locks are safe here.")


def iter_chosen(options: dict[str, Any]) -> Iterator[LockRow]:
    """Yield the locks that ``--task``, ``--prefix`` and ``--all`` select."""
    return iter_rows(options["prefix"], options["task"], markers=options["markers"])


def _other_places(name: str) -> str:
    """Return which other places of a lock are held, as a sentence; "": no other place is."""
    places = find_other_places(name)
    return f"Other places of it are held: {', '.join(map(printable, places))}. " if places else ""


def release(name: str, row: LockRow | None, *, force: bool, dry_run: bool) -> dict[str, str]:
    """Release a lock if the same acquisition still holds it; return the outcome and reason."""
    outcome, reason = "would_release" if dry_run else "released", ""
    if row is None:
        outcome = "not_held"
    elif not force and (reason := RELEASE.why_not(row)):
        outcome, reason = "renewed", f"{reason}, or add --force"
    elif not dry_run:
        try:
            RELEASE.take(row, force=True)
        except Refused as refusal:
            outcome, reason = "changed", str(refusal)
    return {"name": name, "outcome": outcome, "reason": reason}


def as_sentence(outcome: dict[str, str]) -> str:
    """Return the outcome for a lock as a sentence, with the reason if it was left alone."""
    said = SENTENCES[outcome["outcome"]].format(shorten(printable(outcome["name"])))
    return f"{said}\n{wrapped(outcome['reason'], 4)}." if outcome["reason"] else said
