"""``manage.py celery_locks``: who holds what, and freeing it."""

from __future__ import annotations

import json
from argparse import SUPPRESS
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Final

from django.core.management.base import BaseCommand, CommandError, CommandParser

from ... import conf
from ...exceptions import CelerySafeError
from ...locks import HeldLock, find_lock, iter_locks, release_lock
from ...locks.stores import locks_are_shared
from ..console import WIDTH, duration, printable, shorten


class Command(BaseCommand):
    """Parses, calls, prints."""

    help = "List the locks that are held, or free some of them."

    def add_arguments(self, parser: CommandParser) -> None:
        self._add_common(parser)
        actions = parser.add_subparsers(dest="action", title="actions", metavar="{list,release}")
        listing = actions.add_parser("list", help="show every lock that is held (default)")
        self._add_common(listing, default=SUPPRESS)
        freeing = actions.add_parser(
            "release",
            help="free locks by their names",
            description="Free locks by their names. Whoever holds such a lock is not stopped: it "
            "finds out at its next renewal, or when it calls ensure().",
        )
        freeing.add_argument("names", nargs="+", metavar="NAME", help="the lock's name")
        self._add_common(freeing, default=SUPPRESS)

    def _add_common(self, parser: CommandParser, **extra: Any) -> None:
        parser.add_argument(
            "--json", action="store_true", dest="as_json", help="print JSON", **extra
        )
        parser.add_argument(
            "--cache",
            metavar="ALIAS",
            help="look into this cache (default: where the settings keep locks)",
            **extra,
        )

    def handle(self, *args: Any, **options: Any) -> None:
        cache = conf.UNSET if options["cache"] is None else options["cache"]
        try:
            self._warn_if_alone(cache)
            if options["action"] == "release":
                self._release(options["names"], cache, as_json=options["as_json"])
            else:
                self._list(iter_locks(cache=cache), as_json=options["as_json"])
        except CelerySafeError as error:
            raise CommandError(str(error)) from error

    def _warn_if_alone(self, cache: Any) -> None:
        if not locks_are_shared(cache):
            self.stderr.write(
                "Locks live in this process's own memory: those of workers and web servers "
                "can't be seen from here."
            )

    def _list(self, locks: Iterable[HeldLock], *, as_json: bool) -> None:
        if as_json:
            self.stdout.write(json.dumps([as_row(lock) for lock in locks], indent=2))
            return
        count = 0
        for lock in locks:
            if not count:
                self.stdout.write(HEADING)
            count += 1
            self.stdout.write(as_lines(lock))
        total = f"{count} lock(s) held; + means that the holder renews the lease."
        self.stdout.write(total if count else "No lock is held.")

    def _release(self, names: list[str], cache: Any, *, as_json: bool) -> None:
        outcomes = {name: self._try_release(name, cache) for name in names}
        if as_json:
            self.stdout.write(json.dumps({"released": outcomes}, indent=2))
        else:
            for name, released in outcomes.items():
                did = "Released" if released else "Nobody holds"
                self.stdout.write(f"{did} {printable(name)}")
        missing = [name for name, released in outcomes.items() if not released]
        if missing:
            raise CommandError(
                f"{len(missing)} of {len(outcomes)} lock(s) were not held, so there was nothing "
                f"to release. `manage.py celery_locks` lists the names."
            )

    def _try_release(self, name: str, cache: Any) -> bool:
        lock = find_lock(name, cache)
        return lock is not None and release_lock(lock, cache)


HEADING: Final = f"LOCK\n    {'HELD':>7} {'LEFT':>9}  {'HOLDER':<18}  TASK ID"


def as_lines(lock: HeldLock) -> str:
    """Return a lock as a line with its name and one with its holder, for 80 columns."""
    row = as_row(lock)
    left = "?" if row["remaining_s"] is None else duration(row["remaining_s"])
    holder = f"{row['host']} pid {row['pid']}" if row["host"] else "unknown"
    if row["task_id"] and not row["host"]:
        # The lock of a message; see concurrency/sent.py and copies.py.
        holder = "message under way"
    times = f"    {duration(row['age_s']):>7} {left + ('+' if row['renewed'] else ''):>9}  "
    holder, task_id = printable(holder), printable(row["task_id"] or "-")
    details = f"{times}{holder:<18}  {task_id}"
    if len(details) > WIDTH:  # then the task's id takes a line of its own
        details = f"{times}{holder}\n{'':{len(times)}}{task_id}"
    return f"{shorten(printable(lock.name))}\n{details}"


def as_row(lock: HeldLock) -> dict[str, Any]:
    """Return a lock as ``--json`` shows it; see docs/reference/commands.md for the keys."""
    holder = lock.holder
    since = datetime.fromtimestamp(holder.since, UTC) if holder.since else None
    age = None if since is None else max(0.0, (datetime.now(UTC) - since).total_seconds())
    return {
        "name": lock.name,
        "task": holder.task,
        "task_id": holder.task_id,
        "host": holder.host or None,
        "pid": holder.pid or None,
        "since": None if since is None else since.isoformat(),
        "age_s": None if age is None else round(age, 3),
        "remaining_s": None if lock.remaining is None else round(lock.remaining, 3),
        "renewed": holder.renewed,
        "fence": lock.fence,
    }
