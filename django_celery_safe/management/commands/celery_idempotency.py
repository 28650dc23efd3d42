"""``manage.py celery_idempotency``: list the records of work done once, and delete them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, Final

from django.core.management.base import CommandError, CommandParser

from ...idempotency.record_table import get_prunable, record_table
from ...inspection.decision import Refused
from ...inspection.records import FORGET, RecordRow, records_in, records_of
from ...leases.holder import plain_name
from ...models.idempotency import IdempotencyRecord
from ...pruning import prune_all
from ...texts import printable
from ..console import TableCommand, add_json, add_no_input, as_page, as_text, confirm, typed

#: Help text of KEY.
KEY_HELP: Final = "its whole key; --json shows it as it is, where the list escapes or cuts it"


class Command(TableCommand):
    """Parses, calls, prints."""

    help = "Show the records of @idempotent work, forget some of them, or delete old ones."
    models = (IdempotencyRecord,)
    subject = "the records"
    database_help = "the records in this database (default: where the router writes them)"

    def add_arguments(self, parser: CommandParser) -> None:
        actions = self.add_actions(parser, "{list,show,forget,prune}")
        states = IdempotencyRecord.State.values
        listing = self.add_listing(actions, "show the records, the newest first", states)
        listing.add_argument(
            "--prefix", type=typed, metavar="TEXT", help="only keys that begin with this"
        )
        self.add_limit(listing)
        showing = self.add_action(actions, "show", "show all of one record, its result too")
        add_json(showing)
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
        pruning = self.add_action(actions, "prune", "delete records that have expired")
        self.add_pruning(
            pruning, "those that ended so long ago, whatever their ttl: 90s, 15m, 12h, 7d, 2w"
        )

    def get_databases(self) -> Iterable[str]:
        return [record_table().alias]

    def _list(self, aliases: list[str], options: dict[str, Any]) -> None:
        state, prefix = options["state"], options["prefix"]
        self.list_rows(
            aliases,
            options,
            lambda alias, most: records_in(alias, state, prefix, most),
            "No such record." if state or prefix else "There is no record.",
        )

    def _show(self, aliases: list[str], options: dict[str, Any]) -> None:
        row = next(find_all(aliases, [options["key"]]), None)
        if row is None:
            raise CommandError(f"There is no record {options['key']!r}.")
        if options["as_json"]:
            # NaN and infinity become texts, because JSON has no such numbers.
            result = json.loads(row.result, parse_constant=str) if row.result else None
            self.stdout.write(json.dumps({**row.as_json(), "result": result}, indent=2))
        else:
            self.stdout.write(as_page(row))

    def _forget(self, aliases: list[str], options: dict[str, Any]) -> None:
        keys = {plain_name(key): key for key in options["keys"]}
        rows = list(find_all(aliases, keys))
        if not options["force"] and (busy := [row for row in rows if row.remaining_s]):
            names = ", ".join(f"{row.key} ({row.claimer})" for row in busy)
            raise CommandError(
                f"Still running: {printable(names)}. If you forget it now, it is done twice. Wait "
                f"until it ends, or add --force. Nothing was forgotten."
            )
        if rows and options["interactive"] and not options["dry_run"]:
            confirm(self.stderr, FORGET, map(as_text, rows), len(rows), "record")
        total = len(rows) if options["dry_run"] else sum(forget(row, options) for row in rows)
        would = "would be" if options["dry_run"] else "were"
        self.stdout.write(f"{total} record(s) {would} forgotten.")
        if missing := keys.keys() - {row.pk for row in rows}:
            names = ", ".join(key for plain, key in keys.items() if plain in missing)
            raise CommandError(
                f"There is no record {printable(names)}. `manage.py celery_idempotency list` "
                f"shows the keys."
            )
        if total < len(rows):
            raise CommandError(
                f"{len(rows) - total} record(s) were claimed, or gone, before they could be "
                f"forgotten. Look at the list again."
            )

    def _prune(self, aliases: list[str], options: dict[str, Any]) -> None:
        tables = (record_table(alias).all() for alias in aliases)
        chosen = (get_prunable(records, options["older_than"]) for records in tables)
        self.prune_rows("record", chosen, prune_all, options)


def find_all(aliases: list[str], keys: Iterable[str]) -> Iterator[RecordRow]:
    """Yield the records of these keys in these databases."""
    for alias in aliases:
        yield from records_of(alias, keys)


def forget(row: RecordRow, options: dict[str, Any]) -> bool:
    """Delete a record if it is still the claim that was shown; return whether it was."""
    try:
        FORGET.take(row, force=options["force"])
    except Refused:
        return False
    return True
