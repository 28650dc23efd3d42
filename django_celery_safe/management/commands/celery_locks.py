"""``manage.py celery_locks``: list locks and their holders, release locks, examine the store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from django.core.management.base import CommandError, CommandParser

from ...inspection.doctor import examine
from ...leases.holder import HeldLock
from ...locks import find_lock, iter_locks, release_lock
from ...locks.stores import get_store
from ...texts import duration, printable
from ..console import ActionCommand, add_json, add_no_input, fill

HEADINGS: Final = ("HELD", "LEFT", "RENEWED", "LOCK")
#: The verdicts of the doctor after which locks are not known to be safe, worst first.
NOT_SAFE: Final = (
    ("unsafe", 1, "Locks are not safe here"),
    ("unknown", 2, "Whether locks are safe here is not known"),
)


class Command(ActionCommand):
    """Parses, calls, prints."""

    help = "Show the locks that are held, free some of them, or examine their store."
    noun = "lock is held"

    def add_arguments(self, parser: CommandParser) -> None:
        actions = self.add_actions(parser)
        listing = self.add_action(actions, "list", "show the locks that are held")
        listing.add_argument("--task", help="only those of this task")
        add_json(listing)
        showing = self.add_action(actions, "show", "show one lock, and whether its holder lives")
        showing.add_argument("name", metavar="NAME")
        add_json(showing)
        freeing = self.add_action(
            actions, "release", "free locks; their holders are not stopped, and find out later"
        )
        freeing.add_argument("names", nargs="*", metavar="NAME", help="as --json shows it")
        freeing.add_argument("--task", help="all locks of this task")
        text = "also those that their holders renew, so that a second run may start beside them"
        freeing.add_argument("--force", action="store_true", help=text)
        add_no_input(freeing)
        examining = self.add_action(
            actions, "doctor", "test the lock store: two processes compete for a lock"
        )
        add_json(examining)

    def _list(self, options: dict[str, Any]) -> None:
        self._warn_if_alone()
        self.write_list(options, iter_held(options["task"]), HEADINGS, describe)

    def _show(self, options: dict[str, Any]) -> None:
        self._warn_if_alone()
        lock = find_lock(options["name"])
        if lock is None:
            raise CommandError(f"Nobody holds {printable(options['name'])}.")
        values = {**lock.as_json(), "liveness": lock.liveness}
        (self.write_json if options["as_json"] else self.write_details)(values)

    def _release(self, options: dict[str, Any]) -> None:
        self._warn_if_alone()
        names, task = list(dict.fromkeys(options["names"])), options["task"]
        if bool(names) == bool(task):
            raise CommandError("Give the NAMEs of the locks to release, or --task for all of it.")
        found = {name: find_lock(name) for name in names}
        if task:
            found = {lock.name: lock for lock in iter_held(task)}
        chosen = []
        for name, lock in found.items():
            if lock is None:
                self.stdout.write(f"Nobody holds {printable(name)}.")
            elif lock.holder.renewed and not options["force"]:
                self._leave(lock, f"{lock.liveness} Stop it first, or add --force.")
            else:
                chosen.append(lock)
        if chosen:
            if options["interactive"]:
                self.write_table(HEADINGS, map(describe, chosen))
            question = (
                f"Release {len(chosen)} lock(s)? The holders are not stopped: each finds out at "
                f"its next renewal, and until then a second run may start beside it."
            )
            self.confirm(question, options)
        released = sum(map(self._free, chosen))
        if not found or released < len(found):
            raise CommandError(f"{released} of {len(found)} lock(s) were released.")

    def _free(self, lock: HeldLock) -> bool:
        """Release a lock if the acquisition that was shown still holds it."""
        is_freed = release_lock(lock)
        if is_freed:
            self.stdout.write(f"Released {printable(lock.name)}.")
        else:
            self._leave(lock, "It ended meanwhile, or someone else holds it now.")
        return is_freed

    def _leave(self, lock: HeldLock, reason: str) -> None:
        self.stdout.write(f"Left alone: {printable(lock.name)}")
        self.stdout.write(fill(printable(reason), "    "))

    def _doctor(self, options: dict[str, Any]) -> None:
        findings = []
        for finding in examine():
            findings.append(finding)
            if not options["as_json"]:
                head = f"{finding.verdict:<9}{finding.check:<12}"
                self.stdout.write(fill(printable(finding.text), head))
        if options["as_json"]:
            self.write_json([finding._asdict() for finding in findings])
        for verdict, status, text in NOT_SAFE:
            if checks := [finding.check for finding in findings if finding.verdict == verdict]:
                raise CommandError(f"{text}: {', '.join(checks)}.", returncode=status)
        if not options["as_json"]:
            self.stdout.write("Locks are safe here.")

    def _warn_if_alone(self) -> None:
        if not get_store().shared:
            self.stderr.write(
                "Locks live in this process's own memory: those of workers and web servers "
                "can't be seen from here."
            )


def iter_held(task: str | None) -> Iterator[HeldLock]:
    """Yield the locks of a task (None: of all), without markers, which keep nobody waiting."""
    return (lock for lock in iter_locks(task=task) if lock.kind != "marker")


def describe(lock: HeldLock) -> list[object]:
    """Return the columns of a lock, and the lines below them."""
    holder, renewed = lock.holder, "yes" if lock.holder.renewed else "no"
    place = f"place {lock.place} of {lock.limit}" if lock.limit > 1 else ""
    return [
        duration(lock.age),
        duration(lock.remaining),
        "overdue" if lock.overdue else renewed,
        lock.name,
        ", ".join(filter(None, [holder.process or lock.kind, place, holder.task_id])),
        " ".join(filter(None, [holder.task, holder.arguments])),
    ]
