"""``manage.py celery_locks``: who holds what, whether they live, and freeing it."""

from __future__ import annotations

import heapq
import json
import shutil
import time
from argparse import SUPPRESS, ArgumentTypeError
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

from django.core.management.base import CommandError, CommandParser

from ... import conf
from ...exceptions import CelerySafeError, LockBackendError
from ...locks import HeldLock, find_lock, iter_locks, release_lock
from ...locks.lease import RENEW_AFTER
from ...locks.stores import locks_are_shared
from ...locks.stores.base import TICK, is_overdue, seconds_since_renewal
from ...texts import printable
from ..console import (
    ASKED_ABOUT,
    REDRAW,
    WIDTH,
    SafeCommand,
    add_no_input,
    age,
    columns,
    confirm,
    crop,
    cut,
    duration,
    ending_with_its_reader,
    sentence,
    shorten,
    typed,
    wrapped,
    write_array,
)
from ..doctor import add_doctor, run_doctor

#: Exit status if the store could not be asked, or not this way: that says nothing of any lock.
NOT_ASKED: Final = 2
#: How often --watch looks, and at most.
LOOK: Final = timedelta(seconds=2)
SHORTEST_LOOK: Final = 0.1
#: Actions, which --watch takes for its SECONDS if they stand behind it.
ACTIONS: Final = ("list", "show", "release", "doctor")
#: What a NAME is.
NAME_HELP: Final = "its whole name; --json shows it as it is, where the list escapes or cuts it"


class Outcome(NamedTuple):
    """What became of a lock that was to be freed: a word of ``SENTENCES``, and why."""

    name: str
    outcome: str
    reason: str


class Command(SafeCommand):
    """Parses, calls, prints."""

    help = "Show the locks that are held, free some of them, or examine where they live."

    def add_arguments(self, parser: CommandParser) -> None:
        self._add_common(parser)
        self._add_listing(parser)
        actions = parser.add_subparsers(
            dest="action", title="actions", metavar=f"{{{','.join(ACTIONS)}}}"
        )
        listing = self._add_action(actions, "list", "show the locks that are held (default)")
        self._add_listing(listing, default=SUPPRESS)
        showing = self._add_action(
            actions, "show", "show all of one lock, and whether its holder lives"
        )
        showing.add_argument("name", type=typed, metavar="NAME", help=NAME_HELP)
        freeing = self._add_action(
            actions,
            "release",
            "free locks: those named, or all of a task, or all that begin with a text",
            " Whoever holds one is not stopped: it finds out at its next renewal, or when it "
            "calls ensure(). One that its holder renews is left alone.",
        )
        freeing.add_argument("names", nargs="*", type=typed, metavar="NAME", help=NAME_HELP)
        self._add_choice(freeing, default=SUPPRESS)
        freeing.add_argument(
            "--force", action="store_true", help="also those that their holders renew"
        )
        freeing.add_argument("--dry-run", action="store_true", help="only say which")
        add_no_input(freeing)
        examining = self._add_action(
            actions, "doctor", "try out where locks live, and say what it really guarantees"
        )
        add_doctor(examining)

    def _add_action(self, actions: Any, name: str, text: str, more: str = "") -> CommandParser:
        parser: CommandParser = actions.add_parser(
            name, help=text, description=f"{sentence(text)}{more}"
        )
        self._add_common(parser, default=SUPPRESS)
        return parser

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

    def _add_choice(self, parser: CommandParser, **extra: Any) -> None:
        parser.add_argument(
            "--task",
            type=typed,
            metavar="TASK",
            help="those that runs or messages of this task hold",
            **extra,
        )
        parser.add_argument(
            "--prefix",
            type=typed,
            metavar="TEXT",
            help="those whose names begin with this",
            **extra,
        )

    def _add_listing(self, parser: CommandParser, **extra: Any) -> None:
        self._add_choice(parser, **extra)
        parser.add_argument(
            "--sort",
            choices=tuple(SORTS),
            help="by name or task; age: the longest held first; remaining: the first to end "
            "first. Without it each is shown as soon as it is read",
            **extra,
        )
        parser.add_argument(
            "--watch",
            nargs="?",
            type=look,
            const=LOOK,
            metavar="SECONDS",
            help=f"show them anew every SECONDS ({LOOK.total_seconds():g}) until Ctrl-C",
            **extra,
        )

    def handle(self, *args: Any, **options: Any) -> None:
        cache = conf.UNSET if options["cache"] is None else options["cache"]
        action = options["action"] or "list"
        try:
            with ending_with_its_reader(self.stdout):
                if action != "doctor":  # it says so itself, and more
                    self._warn_if_alone(cache)
                getattr(self, f"_{action}")(cache, options)
        except CelerySafeError as error:
            raise CommandError(str(error), returncode=NOT_ASKED) from error

    def _warn_if_alone(self, cache: Any) -> None:
        if not locks_are_shared(cache):
            self.stderr.write(
                "Locks live in this process's own memory: those of workers and web servers "
                "can't be seen from here."
            )

    # list

    def _list(self, cache: Any, options: dict[str, Any]) -> None:
        if options["watch"] is not None:
            if options["as_json"]:
                raise CommandError("--watch is for people: it has no --json.", returncode=NOT_ASKED)
            with suppress(KeyboardInterrupt):
                self._watch(cache, options)
            return
        locks = in_order(find_chosen(cache, options), options["sort"])
        if options["as_json"]:
            write_array(self.stdout, map(as_row, locks))
        else:
            self._print(locks, options)

    def _print(self, locks: Iterable[HeldLock], options: dict[str, Any]) -> None:
        count = 0
        for count, lock in enumerate(locks, 1):
            if count == 1:
                self.stdout.write(HEADING)
            self.stdout.write(as_lines(lock))
        narrowed = options["task"] is not None or options["prefix"] is not None
        nothing = "No such lock is held." if narrowed else "No lock is held."
        self.stdout.write(f"{count} lock(s) held.\n{LEGEND}" if count else nothing)

    def _watch(self, cache: Any, options: dict[str, Any]) -> None:
        """Show locks until Ctrl-C: in their place on a terminal, else anew below."""
        on_screen, answered = self.stdout.isatty(), False
        while True:
            locks = find_chosen(cache, options)
            try:
                if on_screen:
                    self.stdout.write(f"{REDRAW}{crop(as_screen(locks, options['sort']))}")
                else:
                    self._print(in_order(locks, options["sort"]), options)
                answered = True
            except LockBackendError as error:
                if not answered:
                    raise
                said = wrapped(f"Not known at {datetime.now():%H:%M:%S}: {error}")
                self.stdout.write(f"{REDRAW}{crop(said)}" if on_screen else said)
            self.stdout.flush()
            time.sleep(max(SHORTEST_LOOK, options["watch"].total_seconds()))

    # show

    def _show(self, cache: Any, options: dict[str, Any]) -> None:
        lock = find_lock(options["name"], cache)
        if lock is None:
            raise CommandError(
                f"Nobody holds {printable(options['name'])}. `manage.py celery_locks` lists the "
                f"names of all that are held."
            )
        if options["as_json"]:
            self.stdout.write(json.dumps(as_row(lock), indent=2))
        else:
            self.stdout.write(as_page(lock))

    # release

    def _release(self, cache: Any, options: dict[str, Any]) -> None:
        names = list(dict.fromkeys(options["names"]))
        ways = [bool(names), options["task"] is not None, options["prefix"] is not None]
        if ways.count(True) != 1:
            raise CommandError(
                "Say which locks to release in one way: by their NAMEs, by --task or by --prefix.",
                returncode=NOT_ASKED,
            )
        if options["prefix"] == "":
            raise CommandError(
                "An empty --prefix means every lock, which nobody frees at once: nothing was "
                "released. Give the text that their names begin with, or --task.",
                returncode=NOT_ASKED,
            )
        plan = [decide(*one, force=options["force"]) for one in self._find(names, cache, options)]
        locks = [each for each in plan if isinstance(each, HeldLock)]
        if locks and options["interactive"] and not options["dry_run"]:
            self._confirm(plan, locks)
        outcomes: list[Outcome] = []
        try:
            for each in plan:
                outcomes.append(
                    free(each, cache, dry_run=options["dry_run"])
                    if isinstance(each, HeldLock)
                    else each
                )
        finally:
            with ending_with_its_reader(self.stdout):  # and go on: there is a status to tell
                self._tell(outcomes, as_json=options["as_json"])
        if not outcomes:
            raise CommandError("No such lock is held, so there was nothing to release.")
        if left := [each for each in outcomes if each.outcome not in FREED]:
            raise CommandError(f"{len(left)} of {len(outcomes)} lock(s) were not released.")

    def _find(
        self, names: list[str], cache: Any, options: dict[str, Any]
    ) -> Iterator[tuple[str, HeldLock | None]]:
        """Yield the name of each lock that is to be released, and who holds it."""
        if names:
            yield from ((name, find_lock(name, cache)) for name in names)
        else:
            yield from ((lock.name, lock) for lock in find_chosen(cache, options))

    def _confirm(self, plan: list[HeldLock | Outcome], locks: list[HeldLock]) -> None:
        """
        Show what is to be freed and what is left alone, and ask.

        Raises:
            CommandError: The answer is no, or nobody is there to give one.
        """
        shown = [HEADING, *map(as_lines, locks[:ASKED_ABOUT])]
        if len(locks) > ASKED_ABOUT:
            shown.append(f"... and {len(locks) - ASKED_ABOUT} more; --dry-run names all.")
        left = [each for each in plan if isinstance(each, Outcome)]
        shown += map(as_sentence, left[:ASKED_ABOUT])
        if len(left) > ASKED_ABOUT:
            shown.append(f"... and {len(left) - ASKED_ABOUT} more left alone.")
        shown.append(f"Whoever holds them is not stopped. Release {len(locks)} lock(s)?")
        if not confirm(self.stderr, "\n".join(shown)):
            raise CommandError("The answer was not 'yes': no lock was released.")

    def _tell(self, outcomes: list[Outcome], *, as_json: bool) -> None:
        if as_json:
            write_array(self.stdout, (each._asdict() for each in outcomes))
            return
        for each in outcomes:
            self.stdout.write(as_sentence(each))

    # doctor

    def _doctor(self, cache: Any, options: dict[str, Any]) -> None:
        run_doctor(self, cache, options)


def look(text: str) -> timedelta:
    """Read the SECONDS of --watch, for argparse."""
    if text in ACTIONS:
        raise ArgumentTypeError(f"{text!r} is an action, and goes before it: {text} --watch")
    return age(text)


def find_chosen(cache: Any, options: dict[str, Any]) -> Iterator[HeldLock]:
    """Yield the locks that ``--task`` and ``--prefix`` mean."""
    return iter_locks(options["prefix"], options["task"], cache=cache)


def decide(name: str, lock: HeldLock | None, *, force: bool) -> HeldLock | Outcome:
    """Return a lock that is to be freed, or why it is not."""
    if lock is None:
        return Outcome(name, "not_held", "")
    if lock.holder.renewed and not force:
        return Outcome(name, "renewed", why_not(lock))
    return lock


def free(lock: HeldLock, cache: Any, *, dry_run: bool) -> Outcome:
    """Free a lock if that very acquisition still holds it."""
    if dry_run:
        return Outcome(lock.name, "would_release", "")
    if release_lock(lock, cache):
        return Outcome(lock.name, "released", "")
    return Outcome(lock.name, "changed", "it ended meanwhile, or someone else holds it now")


def why_not(lock: HeldLock) -> str:
    """Return why a lock that is renewed is left alone."""
    holder, ago = lock.holder, seconds_since_renewal(lock)
    who = f"process {holder.pid} on {holder.host}"
    free_in = "with its lease" if lock.remaining is None else f"in {duration(lock.remaining)}"
    if is_overdue(lock):
        lives = f"{who} renewed it {duration(ago)} ago and not since, so it may be dead"
    elif ago is None:
        lives = f"{who} renews it while it lives"
    else:
        lives = f"{who} renewed it {duration(ago)} ago, so it lives or died since"
    return (
        f"{lives}; if it is dead the lock is free {free_in}. Freed now, a second run may start "
        f"beside it. Stop that process first, or add --force"
    )


HEADING: Final = (
    f"LOCK\n    {'HELD':>7} {'LEFT':>9}  {'HOLDER':<18}  TASK ID\n"
    f"    {'FENCE':<16}  TASK AND ARGUMENTS"
)
LEGEND: Final = "+: its holder renews the lease. !: that is overdue, so the holder may be dead."
#: Columns before a lock's task.
BEFORE_TASK: Final = 22
#: Columns of a holder that fit behind the times.
LONGEST_HOLDER: Final = 55

#: What became of locks for which nothing was left to do, and how each outcome is told.
FREED: Final = ("released", "would_release")
SENTENCES: Final = {
    "released": "Released {}",
    "would_release": "Would release {}",
    "not_held": "Nobody holds {}",
    "renewed": "Left alone: {}",
    "changed": "Left alone: {}",
}

#: What --sort sorts by; what is not known comes last.
SORTS: Final[dict[str, Callable[[HeldLock], Any]]] = {
    "name": lambda lock: lock.name,
    "task": lambda lock: (lock.holder.task is None, lock.holder.task or "", lock.name),
    "age": lambda lock: (not lock.holder.since, lock.holder.since, lock.name),
    "remaining": lambda lock: (lock.remaining is None, lock.remaining or 0.0, lock.name),
}


def in_order(locks: Iterable[HeldLock], by: str | None) -> Iterable[HeldLock]:
    """Return locks in the order of --sort; None: as they come, one at a time."""
    return locks if by is None else sorted(locks, key=SORTS[by])


def as_screen(locks: Iterator[HeldLock], by: str | None) -> str:
    """Return how many locks there are, and the first of them, for a terminal."""
    count = 0

    def counted() -> Iterator[HeldLock]:
        nonlocal count
        for lock in locks:
            count += 1
            yield lock

    # By name if by nothing else: stores give them in no order, and the picture would jump.
    most = shutil.get_terminal_size().lines
    first = heapq.nsmallest(most, counted(), key=SORTS[by or "name"])
    total = f"{count} lock(s) held at {datetime.now():%H:%M:%S}."
    return "\n".join([total, LEGEND, HEADING, *map(as_lines, first)])


def as_sentence(outcome: Outcome) -> str:
    """Return what became of a lock, and why it was left alone."""
    said = SENTENCES[outcome.outcome].format(shorten(printable(outcome.name)))
    return f"{said}\n{wrapped(outcome.reason, 4)}." if outcome.reason else said


def as_lines(lock: HeldLock) -> str:
    """Return a lock as a line with its name, one with its holder and one with its task."""
    row = as_row(lock)
    sign = "!" if row["overdue"] else "+" if row["renewed"] else ""
    times = f"    {duration(row['age_s']):>7} {duration(row['remaining_s']) + sign:>9}  "
    holder, task_id = printable(by_whom(row)), printable(row["task_id"] or "-")
    if columns(holder) > LONGEST_HOLDER:
        holder = f"{cut(holder, LONGEST_HOLDER - 3)}..."
    details = f"{times}{holder:<18}  {task_id}"
    if columns(details) > WIDTH:  # then the task's id takes a line of its own
        details = f"{times}{holder}\n{wrapped(task_id, len(times))}"
    fence = "-" if row["fence"] is None else str(row["fence"])
    doing = f"    {fence:<16}  {printable(doing_what(row))}"
    if columns(doing) > WIDTH:
        doing = f"    {fence:<16}{wrapped(doing_what(row), BEFORE_TASK)[20:]}"
    return f"{shorten(printable(lock.name))}\n{details}\n{doing}"


def by_whom(row: dict[str, Any]) -> str:
    """Return who holds a lock."""
    if row["host"]:
        return f"{row['host']} pid {row['pid']}"
    # The lock of a message; see concurrency/sent.py and copies.py.
    return "message under way" if row["task_id"] else "unknown"


def doing_what(row: dict[str, Any]) -> str:
    """Return the task that holds a lock, and its arguments."""
    return f"{shorten(row['task'] or '-')} {shorten(row['arguments'] or '')}".rstrip()


def as_page(lock: HeldLock) -> str:
    """Return all that is known of a lock, a line for each thing."""
    row = as_row(lock)
    known = {
        "task": row["task"],
        "arguments": None if row["arguments"] is None else shorten(row["arguments"]),
        "task id": row["task_id"],
        "held by": by_whom(row),
        "since": describe_begin(row),
        "lease": describe_lease(lock),
        "holder": describe_life(lock),
        "free": describe_end(lock),
        "fence": row["fence"],
    }
    lines = [shorten(printable(lock.name))]
    for name, value in known.items():
        lines.append(f"    {name:<11}" + wrapped("-" if value is None else str(value), 15)[15:])
    return "\n".join(lines)


def describe_begin(row: dict[str, Any]) -> str | None:
    """Return when a lock was acquired."""
    if row["since"] is None:
        return None
    since = datetime.fromisoformat(row["since"])
    return f"{since:%Y-%m-%d %H:%M:%S} UTC by its clock, {duration(row['age_s'])} ago"


def describe_lease(lock: HeldLock) -> str:
    """Return how long a lease is, and what is left of it."""
    told, lease = f"{duration(lock.remaining)} left", lock.holder.lease
    ago = seconds_since_renewal(lock)
    # One that was extended is of another length than at first.
    if lease is not None and (lock.remaining is None or lock.remaining <= lease + TICK):
        told += f" of {duration(lease)}"
    if not lock.holder.renewed:
        return f"{told}, not renewed"
    return f"{told}, renewed" + ("" if ago is None else f" {duration(ago)} ago")


def describe_life(lock: HeldLock) -> str:
    """Return whether the holder lives, as far as its lease tells."""
    holder, ago = lock.holder, seconds_since_renewal(lock)
    if not holder.host:
        return "no process yet: a message holds it" if holder.task_id else "not known"
    if not holder.renewed:
        return "not known: it does not renew this lease, so nothing tells whether it lives"
    if ago is None or holder.lease is None:
        return "lives if the lease begins anew from time to time: look again"
    if is_overdue(lock):
        late = duration(ago - holder.lease * RENEW_AFTER)
        return f"dead, stopped or cut off, most likely: its renewal is {late} late"
    return f"lives, or died in the last {duration(ago)}"


def describe_end(lock: HeldLock) -> str:
    """Return when a lock will be free by itself."""
    if lock.remaining is None:
        return "when its lease ends, of which this store can't tell what is left"
    if lock.holder.renewed:
        return f"in {duration(lock.remaining)} if the holder is dead, else when it is done"
    return f"in {duration(lock.remaining)} at the latest"


def as_row(lock: HeldLock) -> dict[str, Any]:
    """Return a lock as ``--json`` shows it; see docs/reference/commands.md for the keys."""
    holder = lock.holder
    since = datetime.fromtimestamp(holder.since, UTC) if holder.since else None
    age = None if since is None else max(0.0, (datetime.now(UTC) - since).total_seconds())
    ago = seconds_since_renewal(lock)
    return {
        "name": lock.name,
        "task": holder.task,
        "arguments": holder.arguments,
        "task_id": holder.task_id,
        "host": holder.host or None,
        "pid": holder.pid or None,
        "since": None if since is None else since.isoformat(),
        "age_s": None if age is None else round(age, 3),
        "remaining_s": None if lock.remaining is None else round(lock.remaining, 3),
        "lease_s": holder.lease,
        "renewed": holder.renewed,
        "renewed_s": None if ago is None else round(ago, 3),
        "overdue": is_overdue(lock),
        "fence": lock.fence,
    }
