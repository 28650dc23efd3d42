"""``manage.py celery_idempotency``: what was done once, and letting it be done again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import islice
from typing import Any, Final

from django.core.management.base import CommandError, CommandParser
from django.db.models import Q
from django.db.models.functions import Now

from ...idempotency.records import find_prunable, read_claim, record_store
from ...locks.stores.base import HASHED, plain_name
from ...models import IdempotencyRecord, IdempotencyRecords
from ...texts import printable
from ..console import (
    TableCommand,
    add_no_input,
    confirm,
    duration,
    preview,
    shorten,
    typed,
    wrapped,
)

#: What a KEY is.
KEY_HELP: Final = "its whole key; --json shows it as it is, where the list escapes or cuts it"


class Command(TableCommand):
    """Parses, calls, prints."""

    help = "Show the records of @idempotent work, forget some of them, or delete old ones."
    models = (IdempotencyRecord,)
    subject = "the records"
    database_help = "the records in this database (default: where the router writes them)"

    def add_arguments(self, parser: CommandParser) -> None:
        self.add_database(parser)
        actions = parser.add_subparsers(
            dest="action", title="actions", metavar="{list,show,forget,prune}", required=True
        )
        listing = self.add_action(actions, "list", "show the records, the newest first")
        self.add_json(listing)
        listing.add_argument(
            "--state", choices=IdempotencyRecord.State.values, help="only those in this state"
        )
        listing.add_argument(
            "--prefix", type=typed, metavar="TEXT", help="only keys that begin with this"
        )
        self.add_limit(listing)
        showing = self.add_action(actions, "show", "show all of one record, its result too")
        self.add_json(showing)
        showing.add_argument("key", type=typed, metavar="KEY", help=KEY_HELP)
        forgetting = self.add_action(
            actions, "forget", "delete records, so that what they stand for is done again"
        )
        forgetting.add_argument("keys", nargs="+", type=typed, metavar="KEY", help=KEY_HELP)
        forgetting.add_argument(
            "--force", action="store_true", help="even if it is being done: then it is done twice"
        )
        forgetting.add_argument("--dry-run", action="store_true", help="only say how many")
        add_no_input(forgetting)
        pruning = self.add_action(actions, "prune", "delete records that say nothing any more")
        self.add_pruning(
            pruning, "those that ended so long ago, whatever their ttl: 90s, 15m, 12h, 7d, 2w"
        )

    def find_databases(self) -> Iterable[str]:
        return [record_store().alias]

    def _list(self, aliases: list[str], options: dict[str, Any]) -> None:
        limit = options["limit"]
        found: list[dict[str, Any]] = []
        for alias in aliases:
            rows = records_in(alias).annotate(asked_at=Now()).order_by("-claimed_at")
            if options["state"]:
                rows = rows.filter(state=options["state"])
            # One more, to know whether there is more.
            end = limit + 1 - len(found) if limit else None
            found += islice(with_prefix(rows, options["prefix"]), end)
        shown = found[: limit or None]
        if options["as_json"]:
            self.stdout.write(json.dumps(shown, indent=2))
            return
        for row in shown:
            self.stdout.write(as_lines(row))
        if not shown:
            narrowed = options["state"] or options["prefix"]
            self.stdout.write("No such record." if narrowed else "There is no record.")
        elif len(found) > limit > 0:
            self.stdout.write(f"There are more: --limit is {limit}.")

    def _show(self, aliases: list[str], options: dict[str, Any]) -> None:
        found = (of_keys(alias, [options["key"]]).annotate(asked_at=Now()) for alias in aliases)
        row = next((row for rows in found for row in rows), None)
        if row is None:
            raise CommandError(f"There is no record {options['key']!r}.")
        if options["as_json"]:
            result = json.loads(row.result) if row.result else None
            self.stdout.write(json.dumps({**as_row(row), "result": result}, indent=2))
            return
        self.stdout.write(as_details(row))

    def _forget(self, aliases: list[str], options: dict[str, Any]) -> None:
        keys = {plain_name(key): key for key in options["keys"]}
        chosen = [of_keys(alias, keys) for alias in aliases]
        records = [row for rows in chosen for row in rows.annotate(asked_at=Now())]
        found = [as_row(row) for row in records]
        if not options["force"]:
            if busy := [row for row in found if row["remaining_s"]]:
                names = ", ".join(f"{row['key']} ({by_whom(row)})" for row in busy)
                raise CommandError(
                    f"Being done now: {printable(names)}. Forgotten, it would be done twice. Wait "
                    f"until it ends, or add --force. Nothing was forgotten."
                )
            chosen = [rows.idle() for rows in chosen]
        if found and options["interactive"] and not options["dry_run"]:
            self._confirm(found)
            # What was done anew while the question stood was not shown.
            chosen = [rows.filter(token__in=[row.token for row in records]) for rows in chosen]
        total = sum(rows.count() if options["dry_run"] else rows.forget() for rows in chosen)
        would = "would be" if options["dry_run"] else "were"
        self.stdout.write(f"{total} record(s) {would} forgotten.")
        there = {plain_name(row["key"]) for row in found}
        if missing := [key for plain, key in keys.items() if plain not in there]:
            raise CommandError(
                f"There is no record {printable(', '.join(missing))}. `manage.py "
                f"celery_idempotency list` shows the keys."
            )
        if total < len(found):
            raise CommandError(
                f"{len(found) - total} record(s) were claimed, or gone, before they could be "
                f"forgotten. Look at the list again."
            )

    def _confirm(self, found: list[dict[str, Any]]) -> None:
        """
        Show what is to be forgotten, and ask.

        Raises:
            CommandError: The answer is no, or nobody is there to give one.
        """
        shown = preview(map(as_lines, found), len(found))
        question = f"Each is done again by the next who comes. Forget {len(found)} record(s)?"
        if not confirm(self.stderr, "\n".join([*shown, question])):
            raise CommandError("The answer was not 'yes': no record was forgotten.")

    def _prune(self, aliases: list[str], options: dict[str, Any]) -> None:
        chosen = [find_prunable(records_in(alias), options["older_than"]) for alias in aliases]
        total = sum(rows.count() if options["dry_run"] else rows.erase() for rows in chosen)
        would = "would be" if options["dry_run"] else "were"
        self.stdout.write(f"{total} record(s) {would} deleted.")


def records_in(alias: str) -> IdempotencyRecords:
    """Return the records of a database."""
    return record_store(alias).all()


def of_keys(alias: str, keys: Iterable[str]) -> IdempotencyRecords:
    """Return the records of these keys, each whole or as it stands in the table."""
    return records_in(alias).filter(key__in=[plain_name(key) for key in keys])


def with_prefix(rows: IdempotencyRecords, prefix: str | None) -> Iterator[dict[str, Any]]:
    """Yield the rows whose key begins with a text, as ``--json`` shows them; None: all."""
    if prefix is not None:
        # Hashed keys are with the holder; and SQLite takes small letters for large ones.
        hashed = Q(key__startswith=HASHED)
        plain = plain_name(prefix) == prefix
        rows = rows.filter(hashed | Q(key__startswith=prefix) if plain else hashed)
    for row in rows.iterator():
        shown = as_row(row)
        if prefix is None or shown["key"].startswith(prefix):
            yield shown


def as_row(row: Any) -> dict[str, Any]:
    """Return a record as ``--json`` shows it; neither arguments nor the result are in it."""
    claim = read_claim(row)
    holder = claim.holder
    runs = row.state == row.State.RUNNING
    return {
        "key": claim.name,
        "state": row.state,
        "task": holder.task,
        "task_id": holder.task_id,
        "host": holder.host or None,
        "pid": holder.pid or None,
        "claims": row.claims,
        "claimed_at": row.claimed_at.isoformat(),
        "ended_at": None if row.ended_at is None else row.ended_at.isoformat(),
        "age_s": seconds_from(row.claimed_at, row.asked_at),
        "remaining_s": round(claim.remaining or 0.0, 3) if runs else None,
        "expires_in_s": None
        if row.expires_at is None
        else seconds_from(row.asked_at, row.expires_at),
        "error": row.error,
    }


def seconds_from(begin: datetime, end: datetime) -> float:
    """Return the time from one moment to another, s; 0 if that is not later."""
    return round(max(0.0, (end - begin).total_seconds()), 3)


def as_lines(row: dict[str, Any]) -> str:
    """Return a record as a line with its key and some with what is known, for 80 columns."""
    told = [f"{row['state']}, claimed {duration(row['age_s'])} ago"]
    if row["remaining_s"] is not None:
        told.append(
            f"lease of {duration(row['remaining_s'])}"
            if row["remaining_s"]
            else "its holder is gone"
        )
    if row["claims"] > 1:
        told.append(f"{row['claims']} times")
    if row["expires_in_s"] is not None:
        left = row["expires_in_s"]
        told.append(f"expires in {duration(left)}" if left else "expired")
    lines = [
        shorten(printable(row["key"])),
        f"    {', '.join(told)}",
        wrapped(by_whom(row), 4),
    ]
    if row["error"]:
        lines.append(wrapped(row["error"], 4))
    return "\n".join(lines)


def by_whom(row: dict[str, Any]) -> str:
    """Return who claimed a record last."""
    process = f"pid {row['pid']} on {row['host']}" if row["host"] else "by someone unknown"
    return f"{row['task_id']}, {process}" if row["task_id"] else process


def as_details(row: Any) -> str:
    """Return all that is known of a record, a line for each thing."""
    known = {**as_row(row), "result": row.result or None}
    width = max(map(len, known))
    return "\n".join(
        f"{name:<{width}}  {printable('-' if value in (None, '') else str(value))}"
        for name, value in known.items()
    )
