"""``manage.py celery_outbox``: relay and list messages, and retry or discard failed ones."""

from __future__ import annotations

import json
import os
import signal
import threading
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

from celery import current_app
from django.core.management.base import CommandError, CommandParser
from django.db import connections
from django.db.models import Max, Q
from django.db.models.functions import Coalesce

from ... import conf
from ...databases import Now
from ...inspection.messages import DISCARD, STATES, MessageRow, messages_in, status_of
from ...inspection.row import ago, duration
from ...models.message_states import OutboxMessages
from ...models.outbox import OutboxMessage
from ...models.outbox_relay import OutboxRelay
from ...pruning import prune_all
from ...sending.broker import BrokerGone
from ...sending.outbox import outbox_aliases
from ...sending.relay import Relay, drain_all
from ...texts import printable
from ..console import (
    ASKED_ABOUT,
    TableCommand,
    add_json,
    add_no_input,
    age,
    as_page,
    as_text,
    confirm,
    count,
)
from ..heartbeat import HeartbeatFile

#: The report of a decision about messages, without and with --dry-run.
DONE: Final = {
    "retry": ("are due now", "would be due now"),
    "discard": ("were deleted", "would be deleted"),
}
#: The latest moment at which a message failed or died.
LAST_END: Final = Max(Coalesce("ended_at", "dead_at"))
#: How often the main thread checks the relay threads, s.
LISTEN: Final = 0.5


class Command(TableCommand):
    """Parses, calls, prints."""

    help = "Send the messages in the outbox, show them, or decide about those that can't be sent."
    models = (OutboxMessage, OutboxRelay)
    subject = "the outbox"
    database_help = "the outbox of this database; may be repeated (default: all)"

    def add_arguments(self, parser: CommandParser) -> None:
        actions = self.add_actions(parser, "{relay,status,list,show,retry,discard,prune}")
        relaying = self.add_action(actions, "relay", "send what is due, until stopped")
        ending = relaying.add_mutually_exclusive_group()
        ending.add_argument("--once", action="store_true", help="end when nothing is due")
        ending.add_argument(
            "--heartbeat-file",
            type=HeartbeatFile,
            metavar="PATH",
            help="touch this file while the relay goes on, for a probe; removed at the end",
        )
        status = self.add_action(actions, "status", "count messages, and show the longest wait")
        add_json(status)
        status.add_argument(
            "--max-age",
            type=age,
            metavar="AGE",
            help="exit with 1 if a message waits for longer than this",
        )
        status.add_argument(
            "--max-relay-age",
            type=age,
            metavar="AGE",
            help="exit with 1 if no relay was seen for longer than this; each writes a heartbeat "
            "every minute",
        )
        listing = self.add_listing(actions, "show the messages, the oldest first", STATES)
        listing.add_argument("--task", metavar="NAME", help="only those of this task")
        self.add_limit(listing)
        showing = self.add_action(actions, "show", "show all of one message, its traceback too")
        add_json(showing)
        showing.add_argument("id", type=count, metavar="ID", help="as the list shows it")
        retrying = self.add_action(actions, "retry", "let messages that failed be tried again now")
        self._add_choice(retrying)
        discarding = self.add_action(actions, "discard", "delete messages; their tasks never run")
        self._add_choice(discarding)
        add_no_input(discarding)
        pruning = self.add_action(actions, "prune", "delete messages that were sent long ago")
        self.add_pruning(pruning, "how long ago, such as 90s, 12h or 7d (default: RETENTION)")

    def _add_choice(self, parser: ArgumentParser) -> None:
        parser.add_argument("ids", nargs="*", type=count, metavar="ID", help="as the list shows it")
        text = "every message that is dead or failed"
        parser.add_argument("--all", action="store_true", dest="every", help=text)
        parser.add_argument("--task", metavar="NAME", help="of this task only, with --all")
        parser.add_argument("--dry-run", action="store_true", help="only say how many")

    def get_databases(self) -> Iterable[str]:
        return outbox_aliases()

    # relay

    def _relay(self, aliases: list[str], options: dict[str, Any]) -> None:
        try:
            broker = current_app.connection_for_write().as_uri()
        except KeyError as error:
            raise CommandError(f"broker_url names an unknown transport: {error}") from error
        self.stdout.write(f"Relaying the outbox of {', '.join(aliases)} to {broker}.")
        self.stdout.flush()  # so that a log file shows it at once
        relays = [Relay(alias) for alias in aliases]
        heartbeat: HeartbeatFile | None = options["heartbeat_file"]
        try:
            with stopping() as stop:
                if options["once"]:
                    drain_all(relays, stop.is_set)
                elif heartbeat is None:
                    run_all(relays, stop)
                else:
                    with heartbeat.kept(relays) as touch:
                        run_all(relays, stop, touch)
        except BrokerGone as error:
            raise CommandError(
                f"The broker can't be reached, and what was due stays in the outbox: {error}"
            ) from error
        finally:
            self.stdout.write(f"Sent {sum(relay.count for relay in relays)} message(s).")

    # status

    def _status(self, aliases: list[str], options: dict[str, Any]) -> None:
        rows = {alias: status_of(alias) for alias in aliases}
        if options["as_json"]:
            self.stdout.write(json.dumps(rows, indent=2))
        else:
            for alias, row in rows.items():
                self._show_status(alias, row)
        oldest = max((row["oldest_s"] or 0.0 for row in rows.values()), default=0.0)
        longest: timedelta | None = options["max_age"]
        if longest is not None and oldest > longest.total_seconds():
            raise CommandError(
                f"A message has been waiting for {duration(oldest)}, longer than --max-age "
                f"{longest.total_seconds():g}. Is a relay running, and is the broker up?"
            )
        self._check_relays(rows, options["max_relay_age"])

    def _check_relays(self, rows: dict[str, dict[str, Any]], longest: timedelta | None) -> None:
        """Fail if an outbox has no relay that was seen recently."""
        for alias, row in rows.items():
            seen = row["relay_seen_s"]
            if longest is None or (seen is not None and seen <= longest.total_seconds()):
                continue
            absent = "yet" if seen is None else f"for {duration(seen)}"
            raise CommandError(
                f"No relay has been seen in {alias!r} {absent}; --max-relay-age is "
                f"{longest.total_seconds():g}. Run manage.py celery_outbox relay beside the "
                f"workers."
            )

    def _show_status(self, alias: str, row: dict[str, Any]) -> None:
        waits = "" if row["oldest_s"] is None else f", the oldest for {duration(row['oldest_s'])}"
        notes = {"pending": waits}
        counts = "\n".join(f"  {one:<7} {row[one]:>8}{notes.get(one, '')}" for one in STATES)
        seen = "no relay has been seen yet"
        if row["relay"]:
            seen = f"a relay was seen {ago(row['relay_seen_s'])} ({printable(row['relay'])})"
        self.stdout.write(f"{alias}\n{counts}\n  {seen}")

    # list

    def _list(self, aliases: list[str], options: dict[str, Any]) -> None:
        state, task = options["state"], options["task"]

        def read(alias: str, most: int | None) -> Iterable[MessageRow]:
            rows = messages_in(alias)
            if task:
                rows = rows.filter(task=task)
            if state:
                rows = getattr(rows, state)()
            return map(MessageRow, rows[:most])

        empty = "No such message." if state or task else "The outbox is empty."
        self.list_rows(aliases, options, read, empty)

    def _show(self, aliases: list[str], options: dict[str, Any]) -> None:
        alias = self.get_single(aliases)
        message = OutboxMessage.objects.using(alias).filter(pk=options["id"])
        found = message.annotate(asked_at=Now()).first()
        if found is None:
            raise CommandError(f"There is no message {options['id']} in the outbox of {alias!r}.")
        row = MessageRow(found)
        if options["as_json"]:
            shown = {**row.as_json(), "process": row.process, "traceback": row.traceback}
            self.stdout.write(json.dumps(shown, indent=2))
        else:
            self.stdout.write("\n\n".join(filter(None, [as_page(row), row.trace])))

    # retry, discard, prune

    def _retry(self, aliases: list[str], options: dict[str, Any]) -> None:
        chosen = self._choose(aliases, options, OutboxMessages.retryable)
        self._decide(chosen, options, OutboxMessages.revive)

    def _discard(self, aliases: list[str], options: dict[str, Any]) -> None:
        chosen = self._choose(aliases, options, OutboxMessages.discardable)
        if options["interactive"] and not options["dry_run"]:
            if options["every"]:
                # Messages that die or fail while the operator decides are not included.
                ends = [rows.aggregate(last=LAST_END)["last"] for rows in chosen]
                found = zip(chosen, ends, strict=True)
                chosen = [
                    rows.filter(Q(ended_at__lte=end) | Q(dead_at__lte=end))
                    for rows, end in found
                    if end
                ]
            if total := sum(rows.count() for rows in chosen):
                messages = (message for rows in chosen for message in rows[:ASKED_ABOUT])
                shown = (as_text(MessageRow(message)) for message in messages)
                confirm(self.stderr, DISCARD, shown, total, "message")
        self._decide(chosen, options, OutboxMessages.discard)

    def _choose(
        self,
        aliases: list[str],
        options: dict[str, Any],
        which: Callable[[OutboxMessages], OutboxMessages],
    ) -> list[OutboxMessages]:
        """Return each database's messages that were named, or all that wait for an operator."""
        ids, task = set(options["ids"]), options["task"]
        if bool(ids) == options["every"]:
            raise CommandError(
                "Give the IDs that the list shows, or --all for every dead or failed message."
            )
        if task and ids:
            raise CommandError("--task goes with --all; the IDs say which messages are meant.")
        if ids:
            return [which(messages_in(self.get_single(aliases))).filter(pk__in=ids)]
        found = [messages_in(alias).given_up() for alias in aliases]
        return [rows.filter(task=task) for rows in found] if task else found

    def _decide(
        self,
        chosen: list[OutboxMessages],
        options: dict[str, Any],
        step: Callable[[OutboxMessages], int],
    ) -> None:
        """Apply a decision to messages, or count them with ``--dry-run``, and print how many."""
        ids = set(options["ids"])
        total = sum(rows.count() if options["dry_run"] else step(rows) for rows in chosen)
        now, would = DONE[options["action"]]
        self.stdout.write(f"{total} message(s) {would if options['dry_run'] else now}.")
        if total < len(ids):
            raise CommandError(
                f"{len(ids) - total} of {len(ids)} message(s) are not there, or not in a state "
                f"for that. `manage.py celery_outbox list` shows all."
            )

    def _prune(self, aliases: list[str], options: dict[str, Any]) -> None:
        long_ago: timedelta | None = options["older_than"]
        if long_ago is None:
            long_ago = conf.retention("sent")
        messages = (OutboxMessage.objects.using(alias) for alias in aliases)
        chosen = (rows.none() if long_ago is None else rows.older(long_ago) for rows in messages)
        self.prune_rows("sent message", chosen, prune_all, options)


@contextmanager
def stopping() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM and SIGINT set; a second signal ends the process."""
    stop = threading.Event()
    before: dict[int, Any] = {}

    def ask(number: int, frame: Any) -> None:
        if stop.is_set():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        stop.set()

    for number in map(int, (signal.SIGTERM, signal.SIGINT)):
        before[number] = signal.signal(number, ask)
    try:
        yield stop
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)


def run_all(
    relays: list[Relay], stop: threading.Event, watch: Callable[[], None] = lambda: None
) -> None:
    """
    Run each relay in its own thread until ``stop`` is set or a relay fails.

    Args:
        watch: Called every ``LISTEN`` s, or more often.
    """
    app: Any = current_app._get_current_object()  # type: ignore[attr-defined]

    for relay in relays:
        # Each thread opens its own connection, and a pool may have only one.
        connections[relay.using].close()

    def run(relay: Relay) -> None:
        app.set_current()  # Celery's current app is set for each thread
        try:
            relay.run(stop)
        finally:
            relay.close()
            connections[relay.using].close()

    with ThreadPoolExecutor(len(relays)) as threads:
        futures = [threads.submit(run, relay) for relay in relays]
        # With a timeout, so that signals are handled on every platform.
        while wait(futures, timeout=LISTEN, return_when=FIRST_EXCEPTION).not_done:
            if any(future.done() for future in futures):
                stop.set()
            watch()
        for future in futures:
            future.result()
