"""``manage.py celery_outbox``: relay and list messages, and retry or discard failed ones."""

from __future__ import annotations

import os
import signal
import threading
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain
from pathlib import Path
from typing import Any, Final

from celery import current_app
from django.core.management.base import CommandError, CommandParser
from django.db import DEFAULT_DB_ALIAS, connections

from ...inspection.overview import OutboxFigures, outbox_figures, shown
from ...models.outbox import OutboxMessage, OutboxMessages
from ...sending.outbox import outbox_aliases
from ...sending.publisher import BrokerGone
from ...sending.relay import Relay, drain_all
from ...texts import duration, printable
from ..console import MOST_LISTED, NOT_ASKED, ActionCommand, add_json, add_no_input, age

#: How often the main thread checks the relay threads, s.
LISTEN: Final = 0.5
#: Rows that one statement changes; every database accepts that many parameters.
BATCH: Final = 500
HEADINGS: Final = ("ID", "STATE", "AGE", "TASK")


class Command(ActionCommand):
    """Parses, calls, prints."""

    help = "Send the messages in the outbox, show them, or decide about those that can't be sent."
    noun = "message"

    def add_arguments(self, parser: CommandParser) -> None:
        actions = self.add_actions(parser)
        relaying = self.add_action(actions, "relay", "send what is due, until stopped")
        text = "end when nothing is due, such as from cron"
        relaying.add_argument("--once", action="store_true", help=text)
        text = "touch this file while the relay goes on, for a probe"
        relaying.add_argument("--heartbeat-file", metavar="PATH", help=text)
        text = "only the outbox of this database (default: all)"
        relaying.add_argument("--database", metavar="ALIAS", choices=list(connections), help=text)
        status = self.add_action(actions, "status", "count messages, and say when a relay was seen")
        text = "exit with 1 if a message waits, or no relay was seen, for longer: 90s, 15m, 12h"
        status.add_argument("--max-age", type=age, metavar="AGE", help=text)
        add_json(status)
        listing = self.add_action(actions, "list", "show the messages, the oldest first")
        states = OutboxMessage.State.values
        listing.add_argument("--state", choices=states, help="only those in this state")
        listing.add_argument("--task", help="only those of this task")
        add_json(listing)
        showing = self.add_action(actions, "show", "show all of one message, its traceback too")
        showing.add_argument("id", metavar="ID")
        add_json(showing)
        retrying = self.add_action(actions, "retry", "let messages that failed be tried again now")
        self._add_choice(retrying)
        discarding = self.add_action(actions, "discard", "delete messages; their tasks never run")
        self._add_choice(discarding)
        add_no_input(discarding)

    def _add_choice(self, action: ArgumentParser) -> None:
        choice = action.add_mutually_exclusive_group(required=True)
        choice.add_argument("ids", nargs="*", default=[], metavar="ID", help="as the list shows it")
        text = "every message that is dead or failed"
        choice.add_argument("--all", action="store_true", dest="every", help=text)

    # relay

    def _relay(self, options: dict[str, Any]) -> None:
        aliases = [options["database"]] if options["database"] else get_aliases()
        broker = current_app.connection_for_write().as_uri()
        self.stdout.write(f"Relaying the outbox of {', '.join(aliases)} to {broker}.")
        self.stdout.flush()  # so that a log file shows it at once
        relays, path = [Relay(alias) for alias in aliases], options["heartbeat_file"]
        try:
            with (
                stopping() as stop,
                kept_heartbeat(path, relays) if path else nullcontext(lambda: None) as touch,
            ):
                if options["once"]:
                    drain_all(relays, stop.is_set)
                else:
                    run_all(relays, stop, touch)
        except BrokerGone as error:
            text = f"The broker can't be reached, and what was due stays in the outbox: {error}"
            raise CommandError(printable(text), returncode=NOT_ASKED) from error
        finally:
            self.stdout.write(f"Sent {sum(relay.count for relay in relays)} message(s).")

    # status

    def _status(self, options: dict[str, Any]) -> None:
        outboxes = {alias: outbox_figures(alias) for alias in get_aliases()}
        if options["as_json"]:
            self.write_json({alias: outbox.as_json() for alias, outbox in outboxes.items()})
        else:
            headings = (
                "OUTBOX", "PENDING", "SENT", "RUNNING", "FAILED", "DEAD", "OLDEST", "RELAY SEEN",
            )  # fmt: skip
            self.write_table(headings, [describe_outbox(*each) for each in outboxes.items()])
        most: float | None = options["max_age"]
        if most is None:
            return
        for alias, outbox in outboxes.items():
            if (outbox.oldest_s or 0.0) > most:
                raise CommandError(
                    f"A message in {alias!r} has been waiting for {duration(outbox.oldest_s)}. Is "
                    f"a relay running, and is the broker up?"
                )
            if outbox.relay is None or outbox.relay.ago_s > most:
                seen = "yet" if outbox.relay is None else f"for {duration(outbox.relay.ago_s)}"
                raise CommandError(
                    f"No relay has been seen in {alias!r} {seen}. Run manage.py celery_outbox "
                    f"relay beside the workers."
                )

    # list, show

    def _list(self, options: dict[str, Any]) -> None:
        chosen = {name: options[name] for name in ("state", "task") if options[name]}
        outboxes = [messages_of(alias).filter(**chosen) for alias in get_aliases()]
        rows = chain.from_iterable(messages.iterator() for messages in outboxes)
        self.write_list(options, rows, HEADINGS, describe)

    def _show(self, options: dict[str, Any]) -> None:
        (found,) = find_messages([options["id"]])
        message = found.first()
        if message is None:
            raise CommandError(f"There is no message {options['id']}.")
        values = {**message.as_json(), "finished": message.finished, "arguments": message.arguments}
        if options["as_json"]:
            self.write_json({**values, "traceback": message.traceback})
            return
        self.write_details(values)
        for line in message.traceback.splitlines():
            self.stdout.write(printable(line))

    # retry, discard

    def _retry(self, options: dict[str, Any]) -> None:
        total = change(self._choose(options), OutboxMessages.revive)
        self._report(options, total, "due now")

    def _discard(self, options: dict[str, Any]) -> None:
        chosen = self._choose(options)
        if chosen:
            if options["interactive"]:
                self.write_table(HEADINGS, map(describe, chosen[:MOST_LISTED]))
            question = (
                f"Discard {len(chosen)} message(s)? They are deleted, and their tasks never run. "
                f"This can't be undone."
            )
            self.confirm(question, options)
        self._report(options, change(chosen, OutboxMessages.discard), "deleted")

    def _choose(self, options: dict[str, Any]) -> list[OutboxMessage]:
        """Return the messages that were named, or all that are dead or failed."""
        if options["every"]:
            found = [messages_of(alias).given_up() for alias in get_aliases()]
        else:
            found = find_messages(options["ids"])
        return list(chain.from_iterable(found))

    def _report(self, options: dict[str, Any], total: int, done: str) -> None:
        self.stdout.write(f"{total} message(s) are {done}.")
        if (wanted := len(set(options["ids"]))) > total:
            raise CommandError(
                f"{wanted - total} of {wanted} message(s) are not there, or in no state for that."
            )


def get_aliases() -> list[str]:
    """
    Return the aliases of the databases with an outbox.

    Raises:
        CommandError: No database has one.
    """
    if aliases := outbox_aliases():
        return aliases
    raise CommandError("No database has the outbox. Run manage.py migrate.")


def messages_of(alias: str) -> OutboxMessages:
    """Return the messages of an outbox, oldest first."""
    return OutboxMessage.objects.using(alias).listed().order_by("pk")


def find_messages(ids: Iterable[str]) -> list[OutboxMessages]:
    """
    Return the messages with these IDs, as the list shows them, by database.

    Raises:
        CommandError: It is not an ID.
    """
    pks = defaultdict(list)
    for text in ids:
        alias, _, pk = text.rpartition(":")
        alias = alias or DEFAULT_DB_ALIAS
        if alias not in connections or not (pk.isdecimal() and len(pk) < 19):
            raise CommandError(f"{printable(text)} is not an ID that the list shows.")
        pks[alias].append(int(pk))
    return [messages_of(alias).filter(pk__in=found) for alias, found in pks.items()]


def change(messages: Iterable[OutboxMessage], decide: Callable[[OutboxMessages], int]) -> int:
    """Let a decision change messages that may; return how many it changed."""
    pks = defaultdict(list)
    for message in messages:
        pks[message.database].append(message.pk)
    return sum(
        decide(OutboxMessage.objects.using(alias).filter(pk__in=found[at : at + BATCH]))
        for alias, found in pks.items()
        for at in range(0, len(found), BATCH)
    )


def describe(message: OutboxMessage) -> list[object]:
    """Return the columns of a message, and the lines below them."""
    alias = message.database
    return [
        message.pk if alias == DEFAULT_DB_ALIAS else f"{alias}:{message.pk}",
        message.state,
        duration(message.age_s),
        message.task,
        message.task_id,
        message.reason,
    ]


def describe_outbox(alias: str, outbox: OutboxFigures) -> list[object]:
    """Return the columns of an outbox, and the line below them."""
    relay = outbox.relay
    seen = ("never", "") if relay is None else (f"{duration(relay.ago_s)} ago", relay)
    return [alias, *map(shown, outbox.counts.values()), duration(outbox.oldest_s), *seen]


@contextmanager
def kept_heartbeat(path: str, relays: Sequence[Relay]) -> Iterator[Callable[[], None]]:
    """
    Keep a file during the block; yield a function that dates it to the oldest turn of the relays.

    A relay that waits for a broker or database also takes turns, because a restart of its
    process would not help. A relay that hangs takes no turns.

    Raises:
        OSError: The file can't be written.
    """
    file = Path(path)
    file.touch()

    def touch() -> None:
        turned_at = min(relay.turned_at for relay in relays)
        # If this fails, the probe sees an old file, but relaying continues.
        with suppress(OSError):
            os.utime(file, (turned_at, turned_at))

    try:
        yield touch
    finally:
        file.unlink(missing_ok=True)


@contextmanager
def stopping() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM and SIGINT set; a second signal ends the process."""
    stop, numbers = threading.Event(), (signal.SIGTERM, signal.SIGINT)

    def ask(number: int, frame: Any) -> None:
        stop.set()
        for each in numbers:
            signal.signal(each, signal.SIG_DFL)

    before = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_all(relays: list[Relay], stop: threading.Event, watch: Callable[[], None]) -> None:
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
