"""
Says from what witnesses saw whether single-instance tasks kept their promises.

Each check is a function of the history that yields what violates it.
"The lock" of a task and key is never looked at while the run goes on.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple, Self

from django_celery_safe import HeldLock
from tests.faults.oracle import Findings, Oracle, scarce
from tests.faults.scenario import Witness
from tests.faults.tasks.work import GAUGE, LEASE
from tests.processes import Gauge

#: Endings after which a task comes again by itself.
AGAIN = {"retried", "taken up again"}


class Send(NamedTuple):
    """
    A task that was sent, or was to be.

    Attributes:
        until: The task's ``unique_until``.
        asked: Before the send, ns.
        sent: After it.
        duplicate_of: Id of the one that was sent before; None: this one was published.
    """

    id: str
    until: str
    key: str
    asked: int
    sent: int
    duplicate_of: str | None = None


class Run(NamedTuple):
    """A run that came to its own end."""

    id: str
    since: int
    until: int
    ending: str


class Try(NamedTuple):
    """A message that was taken up by a process, run or not."""

    id: str
    at: int
    pid: int


@dataclass
class History:
    """
    The events of a run.

    Attributes:
        over: When each task was over last, its locks being given back, ns.
        killed: Processes that were killed, and whether as part of a worker.
        overlaps: Entries of runs while another of their task and key went on.
        entries: How many runs began.
        messages: Ids of messages that the broker has in the end.
        locks: Locks that are held in the end.
    """

    sends: list[Send] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    tries: list[Try] = field(default_factory=list)
    over: dict[str, int] = field(default_factory=dict)
    killed: dict[int, str] = field(default_factory=dict)
    overlaps: list[dict[str, Any]] = field(default_factory=list)
    entries: int = 0
    messages: list[str] = field(default_factory=list)
    locks: list[HeldLock] = field(default_factory=list)

    @classmethod
    def read(cls, witness: Witness, messages: list[str], locks: list[HeldLock]) -> Self:
        """Put together what the witnesses wrote."""
        history = cls(messages=messages, locks=locks)
        for entry in witness.journal.entries():
            history._add(**entry)
        for entry in witness.trouble.entries("killed"):
            history.killed[entry["child"]] = entry["what"]
        gauge = Gauge(witness.folder / GAUGE)
        history.overlaps, history.entries = gauge.violations(), gauge.entered()
        return history

    def _add(self, effect: str, at_ns: int, pid: int, id: str = "", **details: Any) -> None:  # noqa: A002
        match effect:
            case "sent":
                self.sends.append(Send(id, sent=at_ns, **details))
            case "ended":
                self.runs.append(Run(id, until=at_ns, **details))
            case "tried":
                self.tries.append(Try(id, at_ns, pid))
            case "over":
                self.over[id] = max(at_ns, self.over.get(id, 0))

    @cached_property
    def published(self) -> dict[str, Send]:
        """Sends of which a message was published, by their ids."""
        return {send.id: send for send in self.sends if send.duplicate_of is None}

    @cached_property
    def duplicates(self) -> list[Send]:
        """Sends of which none was."""
        return [send for send in self.sends if send.duplicate_of is not None]

    @cached_property
    def runs_of(self) -> dict[str, list[Run]]:
        """The runs of each task."""
        runs: dict[str, list[Run]] = defaultdict(list)
        for run in self.runs:
            runs[run.id].append(run)
        return runs

    @cached_property
    def taken_up(self) -> dict[str, int]:
        """When each message was taken up first, ns."""
        return {one.id: one.at for one in sorted(self.tries, key=attrgetter("at"), reverse=True)}

    @cached_property
    def victims(self) -> set[str]:
        """Ids of the messages that killed processes had taken up last."""
        latest = {one.pid: one.id for one in sorted(self.tries, key=attrgetter("at"))}
        return {latest[pid] for pid in self.killed if pid in latest}

    def ended(self, task_id: str) -> int | None:
        """Return when a task first came to an end for good, ns; None: never."""
        ends = [run.until for run in self.runs_of[task_id] if run.ending not in AGAIN]
        return min(ends, default=None)

    def sends_of_each(self) -> Iterator[tuple[str, str, list[Send]]]:
        """Yield ``unique_until``, key and sends, in order, of each task and key."""
        sends: dict[tuple[str, str], list[Send]] = defaultdict(list)
        for send in sorted(self.sends, key=attrgetter("sent")):
            sends[send.until, send.key].append(send)
        return ((until, key, of_one) for (until, key), of_one in sends.items())


def two_at_once(history: History) -> Findings:
    """At most one run of a task and key goes on at a time."""
    for entry in history.overlaps:
        yield f"Another of {entry['section']} began during a run, at {entry['at_ns']} ns."


def lost_tasks(history: History) -> Findings:
    """Each task that was published runs until it comes to an end for good."""
    for task_id, send in history.published.items():
        if history.ended(task_id) is None:
            begun = len(history.runs_of[task_id])
            taken = "taken up" if task_id in history.taken_up else "never taken up"
            yield f"{task_id}, {send.until} of {send.key}: {taken}, {begun} runs, and no end."


def undone_work(history: History) -> Findings:
    """
    All work that was there before the last send is done.

    Where a task is unique until its start, by a run that began after that send. Where it
    is unique until its end, the last that was published does it, see ``lost_tasks``, or
    the send was swallowed, see there.
    """
    for until, key, sends in history.sends_of_each():
        if until != "start":
            continue
        asked = max(send.asked for send in sends)
        runs = (run for send in sends for run in history.runs_of[send.id])
        if not any(run.since > asked and run.ending not in AGAIN for run in runs):
            yield f"{key}: no run began after the last send, at {asked} ns, and ended."


def swallowed_sends(history: History) -> Findings:
    """
    A send is a duplicate only while the one that was sent before is unique still.

    Until its start: a run of it begins after this send. Until its end: it is over only
    after this send. If it was killed right after its work, its lock ends by the lease.
    """
    for send in history.duplicates:
        first = send.duplicate_of or ""
        if send.until == "start":
            unique_until = max((run.since for run in history.runs_of[first]), default=0)
        else:
            ends = (run.until for run in history.runs_of[first] if first in history.victims)
            unique_until = history.over.get(first, max(ends, default=0) + int(LEASE * 1e9))
        is_published = first in history.published
        if is_published and unique_until > send.asked:
            continue
        which = "began or ended before, or never" if is_published else "was never published"
        yield f"{send.id}, {send.until} of {send.key}: a duplicate of {first}, which {which}."


def sent_twice(history: History) -> Findings:
    """
    If two messages were published, the lock of one was free before the other was sent.

    Its message had been taken up (until its start), or had ended or been killed (until its end),
    since the lock of a dead run is free within its lease.
    """
    for until, key, sends in history.sends_of_each():
        published = [send for send in sends if send.duplicate_of is None]
        for one, other in pairwise(published):
            if _is_free(history, one, other.sent) or _is_free(history, other, one.sent):
                continue
            yield f"{until} of {key}: {one.id} and {other.id} were both published."


def _is_free(history: History, send: Send, by: int) -> bool:
    if send.until == "start":
        return history.taken_up.get(send.id, by) < by
    ended = history.ended(send.id)
    return send.id in history.victims or (ended is not None and ended < by)


def ghosts(history: History) -> Findings:
    """No message is taken up that was not published."""
    for task_id in history.taken_up:
        if task_id not in history.published:
            yield f"{task_id} was taken up, but it was not published."


def leftovers(history: History) -> Findings:
    """In the end there is no message and no lock, but for marks of runs that were long."""
    for task_id in history.messages:
        yield f"The broker has a message of {task_id}."
    for lock in history.locks:
        if lock.kind != "marker":
            yield f"{lock.name} is held by {lock.holder} for {lock.remaining} s more."


def too_little(history: History) -> Findings:
    """Enough has happened for the other checks to mean something."""
    counts = count(history)
    return scarce(counts, dict.fromkeys(counts, 1))


def count(history: History) -> dict[str, int]:
    """Count what happened."""
    ways = [run.ending for run in history.runs]
    kills = list(history.killed.values())
    return {
        "sends": len(history.sends),
        "published": len(history.published),
        "duplicates until start": sum(one.until == "start" for one in history.duplicates),
        "duplicates until end": sum(one.until == "end" for one in history.duplicates),
        "messages taken up": len(history.tries),
        "stepped aside": len(history.tries) - history.entries,
        "runs": history.entries,
        "runs killed inside": history.entries - len(history.runs),
        **{f"runs {way}": ways.count(way) for way in ("done", "failed", *sorted(AGAIN))},
        "children killed": kills.count("child"),
        "processes killed with a worker": kills.count("worker"),
    }


CHECKS = [
    two_at_once, lost_tasks, undone_work, swallowed_sends, sent_twice, ghosts, leftovers,
    too_little,
]  # fmt: skip
ORACLE = Oracle(count, CHECKS)
