"""
Says from what witnesses saw whether single-instance tasks kept their promises.

Each check is a function of the history that yields what violates it; ``check`` runs all.
"The lock" of a task and key is never looked at while the run goes on.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Self

from django_celery_safe import HeldLock
from tests.chaos.plan import Witness

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


class Violation(NamedTuple):
    """What was violated, and how."""

    check: str
    text: str


@dataclass
class History:
    """
    What happened.

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
        history.overlaps = witness.gauge.violations()
        history.entries = witness.gauge.entered()
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
            case "killed":
                self.killed[details["child"]] = details["what"]


class Story:
    """A history with what was made out of it once for all checks."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.published = {send.id: send for send in history.sends if send.duplicate_of is None}
        self.duplicates = [send for send in history.sends if send.duplicate_of is not None]
        self.runs: dict[str, list[Run]] = defaultdict(list)
        for run in history.runs:
            self.runs[run.id].append(run)
        #: When each message was taken up first, ns.
        self.taken_up: dict[str, int] = {}
        latest: dict[int, str] = {}
        for one in sorted(history.tries, key=lambda one: one.at):
            self.taken_up.setdefault(one.id, one.at)
            latest[one.pid] = one.id
        #: Ids of the messages that killed processes had taken up last.
        self.victims = {latest[pid] for pid in history.killed if pid in latest}

    def ended(self, task_id: str) -> int | None:
        """Return when a task first came to an end for good, ns; None: never."""
        ends = [run.until for run in self.runs[task_id] if run.ending not in AGAIN]
        return min(ends, default=None)

    def sends_of_each(self) -> Iterator[tuple[str, str, list[Send]]]:
        """Yield ``unique_until``, key and sends, in order, of each task and key."""
        sends: dict[tuple[str, str], list[Send]] = defaultdict(list)
        for send in sorted(self.history.sends, key=lambda send: send.sent):
            sends[send.until, send.key].append(send)
        return ((until, key, of_one) for (until, key), of_one in sends.items())


#: What need not happen: runs of a task that had come to its end, delivered again.
REPEATED = "runs repeated"

Check = Callable[[Story], Iterator[Violation]]


def check(history: History) -> tuple[Story, list[Violation]]:
    """Run every check; return what was made out of the history, and all violations."""
    story = Story(history)
    return story, [violation for each in CHECKS for violation in each(story)]


def two_at_once(story: Story) -> Iterator[Violation]:
    """At most one run of a task and key goes on at a time."""
    for entry in story.history.overlaps:
        text = f"{entry['number']} of {entry['section']} ran at once, at {entry['at_ns']} ns."
        yield Violation("two at once", text)


def lost_tasks(story: Story) -> Iterator[Violation]:
    """Each task that was published runs until it comes to an end for good."""
    for task_id, send in story.published.items():
        if story.ended(task_id) is None:
            begun = len(story.runs[task_id])
            taken = "taken up" if task_id in story.taken_up else "never taken up"
            text = f"{task_id}, {send.until} of {send.key}: {taken}, {begun} runs, and no end."
            yield Violation("lost tasks", text)


def undone_work(story: Story) -> Iterator[Violation]:
    """
    What was there to do before the last send is done.

    Where a task is unique until its start, by a run that began after that send. Where it
    is unique until its end, the last that was published does it, see ``lost_tasks``, or
    the send was swallowed, see there.
    """
    for until, key, sends in story.sends_of_each():
        if until != "start":
            continue
        asked = max(send.asked for send in sends)
        runs = (run for send in sends for run in story.runs[send.id])
        if not any(run.since > asked and run.ending not in AGAIN for run in runs):
            text = f"{key}: no run began after the last send, at {asked} ns, and ended."
            yield Violation("undone work", text)


def swallowed_sends(story: Story) -> Iterator[Violation]:
    """
    A send is a duplicate only while the one that was sent before is unique still.

    Until its start: a run of it begins after this send. Until its end: it is over only
    after this send. If it was killed, that is the end of its last run.
    """
    for send in story.duplicates:
        first = send.duplicate_of or ""
        if send.until == "start":
            unique_until = max((run.since for run in story.runs[first]), default=0)
        else:
            unique_until = story.history.over.get(first, 0)
        if first in story.published and unique_until > send.asked:
            continue
        which = "which began or ended before, or never"
        if first not in story.published:
            which = "which was never published"
        text = f"{send.id}, {send.until} of {send.key}: a duplicate of {first}, {which}."
        yield Violation("swallowed sends", text)


def sent_twice(story: Story) -> Iterator[Violation]:
    """
    Of two that were published, one was no more unique when the other was.

    It had been taken up (until its start), or had ended or been killed (until its end),
    since the lock of a dead run is free within its lease.
    """
    for until, key, sends in story.sends_of_each():
        published = [send for send in sends if send.duplicate_of is None]
        for one, other in pairwise(published):
            if _is_free(story, one, other.sent) or _is_free(story, other, one.sent):
                continue
            text = f"{until} of {key}: {one.id} and {other.id} were both published."
            yield Violation("sent twice", text)


def _is_free(story: Story, send: Send, by: int) -> bool:
    if send.until == "start":
        return story.taken_up.get(send.id, by) < by
    ended = story.ended(send.id)
    return send.id in story.victims or (ended is not None and ended < by)


def ghosts(story: Story) -> Iterator[Violation]:
    """No message is taken up that was not published."""
    for task_id in story.taken_up:
        if task_id not in story.published:
            yield Violation("ghosts", f"{task_id} was taken up, but it was not published.")


def leftovers(story: Story) -> Iterator[Violation]:
    """In the end there is no message and no lock."""
    for task_id in story.history.messages:
        yield Violation("leftovers", f"The broker has a message of {task_id}.")
    for lock in story.history.locks:
        text = f"{lock.name} is held by {lock.holder} for {lock.remaining} s more."
        yield Violation("leftovers", text)


def too_little(story: Story) -> Iterator[Violation]:
    """Enough has happened for the other checks to mean something."""
    for name, number in count(story).items():
        if not number and name != REPEATED:
            yield Violation("too little", f"{name}: none.")


def count(story: Story) -> dict[str, int]:
    """Count what happened."""
    history = story.history
    ways = [run.ending for run in history.runs]
    kills = list(history.killed.values())
    return {
        "sends": len(history.sends),
        "published": len(story.published),
        "duplicates until start": sum(one.until == "start" for one in story.duplicates),
        "duplicates until end": sum(one.until == "end" for one in story.duplicates),
        "messages taken up": len(history.tries),
        "stepped aside": len(history.tries) - history.entries,
        "runs": history.entries,
        "runs killed inside": history.entries - len(history.runs),
        **{f"runs {way}": ways.count(way) for way in ("done", "failed", *sorted(AGAIN))},
        REPEATED: sum(
            sum(run.since > (story.ended(run.id) or run.since) for run in runs)
            for runs in story.runs.values()
        ),
        "children killed": kills.count("child"),
        "processes killed with a worker": kills.count("worker"),
    }


CHECKS: Iterable[Check] = (
    two_at_once,
    lost_tasks,
    undone_work,
    swallowed_sends,
    sent_twice,
    ghosts,
    leftovers,
    too_little,
)
