"""
Says whether each committed task was brought to its end, once, by who had it then.

Each check is a function of the history that yields what violates it. What a process noted is
known even if it was killed afterwards; what was committed, and when, is known from the
database's own ledger.
"""

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple, Self

from django_celery_safe.leases.holder import decode_holder
from django_celery_safe.locks import HeldLock
from django_celery_safe.models import OutboxMessage
from tests.faults.carried.ledger import DEATH, FAILED, GONE, RESENT, WRITTEN, Ledger
from tests.faults.carried.plan import Plan, Witness
from tests.faults.oracle import Findings, Oracle, scarce

#: How a run ends after which its task does not go on.
FINAL = {"done", "failed"}


@dataclass
class Run:
    """One run of a task; moments are ns, None: it never came so far."""

    id: str
    pid: int
    begun: int
    retries: int = 0
    worker: int = 0
    ended: int | None = None
    ending: str = ""


class Death(NamedTuple):
    """
    The record that one more process died in the task of a row.

    Attributes:
        pid: The process.
        lease: What was left of its lease, s.
    """

    id: str
    pid: int
    at: int
    lease: float


class Row(NamedTuple):
    """A row that is left in the end."""

    state: str
    error_type: str


@dataclass
class History:
    """
    The events of one recording; moments are in ns.

    Attributes:
        committed: Ids of the tasks whose rows were committed.
        runs: Of each task, in the order in which they began.
        ends: When each row went, or said that its task failed.
        deaths: The deaths of processes that the rows have counted.
        killed: When each killed process was.
        ended: Workers that ended by themselves, with their children, and when that was seen.
        stood_still: When processes were paused, or noted that they had stood still.
        left: Rows, by the ids of their tasks.
        resent: How often a message was sent again since no worker had begun its task.
        harms: How often what was done to the run, by its names in the plan.
        inside: How many processes were killed inside a task.
    """

    plan: Plan
    committed: set[str] = field(default_factory=set)
    runs: dict[str, list[Run]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[str, int] = field(default_factory=dict)
    deaths: list[Death] = field(default_factory=list)
    killed: dict[int, int] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)
    stood_still: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    left: dict[str, Row] = field(default_factory=dict)
    resent: int = 0
    harms: Counter[str] = field(default_factory=Counter)
    inside: int = 0
    seconds: float = 0.0

    @classmethod
    def read(cls, plan: Plan, witness: Witness, ledger: Ledger, alias: str, seconds: float) -> Self:
        """Put together what the witnesses wrote, and the rows."""
        history = cls(plan, seconds=seconds)
        for row in OutboxMessage.objects.using(alias):
            history.left[row.task_id] = Row(row.state, row.error_type)
        history._read_ledger(ledger)
        history._read_runs(witness)
        history._read_trouble(witness)
        return history

    def _read_ledger(self, ledger: Ledger) -> None:
        for note in ledger.read():
            if note.what == WRITTEN:
                self.committed.add(note.task_id)
            elif note.what in (GONE, FAILED):
                self.ends.setdefault(note.task_id, note.at)
            elif note.what == RESENT:
                self.resent += 1
            elif note.what == DEATH:
                pid = decode_holder(note.holder, HeldLock("")).holder.pid
                self.deaths.append(Death(note.task_id, pid, note.at, note.lease))

    def _read_runs(self, witness: Witness) -> None:
        for entry in sorted(witness.runs.entries(), key=lambda entry: entry["at_ns"]):
            task_id, pid, at = entry["id"], entry["pid"], entry["at_ns"]
            match entry["effect"]:
                case "begun":
                    self.runs[task_id].append(
                        Run(task_id, pid, at, entry["retries"], entry["worker"])
                    )
                case "ended":
                    ours = [one for one in self.runs[task_id] if one.pid == pid]
                    ours[-1].ended, ours[-1].ending = at, entry["ending"]
                case "stood still":
                    self.stood_still[pid].append(at)

    def _read_trouble(self, witness: Witness) -> None:
        for entry in witness.trouble.entries():
            match entry["effect"]:
                case "killed":
                    self.killed.setdefault(entry["child"], entry["at_ns"])
                    self.inside += entry["inside"]
                case "worker ended":
                    self.ended[entry["worker"]] = entry["at_ns"]
                case "paused":
                    self.stood_still[entry["child"]].append(entry["at_ns"])
                case harm:
                    self.harms[harm] += 1

    def all_runs(self) -> Iterator[Run]:
        """Yield them, each task's in order."""
        for runs in self.runs.values():
            yield from runs

    def kill_of(self, run: Run) -> int | None:
        """Return when a run's process was killed, in it or right after it; None: it was not."""
        killed = self.killed.get(run.pid)
        return killed if killed is not None and self._was_in(run, killed) else None

    def is_interrupted(self, run: Run) -> bool:
        """Return whether its process stood still, or its worker ended, in it or right after it."""
        moments = [*self.stood_still.get(run.pid, ())]
        if run.worker in self.ended:
            moments.append(self.ended[run.worker])
        return any(self._was_in(run, at) for at in moments)

    def _was_in(self, run: Run, moment: int) -> bool:
        """Return whether this is the run that a process had begun last at a moment."""
        begun = self._begun[run.pid]
        place = bisect.bisect(begun, moment)
        return place > 0 and begun[place - 1] == run.begun

    @cached_property
    def _begun(self) -> dict[int, list[int]]:
        begun: dict[int, list[int]] = defaultdict(list)
        for run in sorted(self.all_runs(), key=attrgetter("begun")):
            begun[run.pid].append(run.begun)
        return begun

    @cached_property
    def endings(self) -> dict[str, str]:
        """How each committed task is to end."""
        planned = (task for each in self.plan.transactions() for task in each.tasks)
        return {task.id: task.ending for task in planned if task.id in self.committed}

    @property
    def failing(self) -> set[str]:
        """The committed tasks that are to fail."""
        return {task_id for task_id, ending in self.endings.items() if ending == "failed"}

    @cached_property
    def recoveries(self) -> list[float]:
        """Seconds from each kill inside a run to the next beginning of its task, in order."""
        seconds = [
            (later.begun - kill) / 1e9
            for runs in self.runs.values()
            for run, later in pairwise(runs)
            if (kill := self.kill_of(run)) is not None and later.begun > kill
        ]
        return sorted(seconds)


def lost_tasks(history: History) -> Findings:
    """Each committed task comes to its end."""
    for task_id in sorted(history.committed):
        runs = history.runs.get(task_id, [])
        if not any(run.ending in FINAL for run in runs):
            yield f"{task_id} was committed and never ended; it was begun {len(runs)} times."


def unended_rows(history: History) -> Findings:
    """In the end no row is left but those of tasks that failed."""
    for task_id, row in history.left.items():
        if row.state != "failed":
            yield f"The row of {task_id} is {row.state}."


def wrong_failures(history: History) -> Findings:
    """Those that failed are those that are to fail, and of what they failed."""
    failed = {task_id for task_id, row in history.left.items() if row.state == "failed"}
    for task_id in sorted(failed | history.failing):
        row = history.left.get(task_id, Row("gone", ""))
        if task_id not in history.failing or row != ("failed", "PlannedFailure"):
            planned = history.endings.get(task_id)
            yield f"{task_id}, which is to be {planned}, is {row.state} {row.error_type}."


def wrong_retries(history: History) -> Findings:
    """A task that is to retry ends in its second attempt, and every other one in its first."""
    for task_id, ending in history.endings.items():
        wanted = int(ending == "retried")
        for run in history.runs.get(task_id, []):
            is_wrong = run.retries != wanted if run.ending in FINAL else run.retries > wanted
            if is_wrong:
                yield f"{task_id}, which is to be {ending}, was run as retry {run.retries}."


def ghosts(history: History) -> Findings:
    """No task of what was rolled back begins."""
    for task_id in sorted(set(history.runs) - history.committed):
        yield f"{task_id} began, and was never committed."


def runs_after_the_end(history: History) -> Findings:
    """No run of a task begins once its row has ended."""
    for run in history.all_runs():
        end = history.ends.get(run.id)
        if end is not None and run.begun > end:
            yield f"{run.id} began {(run.begun - end) / 1e9:.3f} s after its row had ended."


def ends_by_others(history: History) -> Findings:
    """A row ends only when the run that began last has come to its end."""
    for task_id, end in history.ends.items():
        before = [run for run in history.runs.get(task_id, []) if run.begun < end]
        if not before:
            yield f"The row of {task_id} ended before its first run."
        elif before[-1].ending not in FINAL or (before[-1].ended or 0) > end:
            yield f"The row of {task_id} ended while {before[-1].pid} was running it."


def needless_runs(history: History) -> Findings:
    """An attempt is run again only if its process was killed, or interrupted."""
    for runs in attempts(history).values():
        for run in runs[:-1]:
            if not is_explained(history, run):
                yield f"{run.id} ran in {run.pid}, which lived, and was run again."


def attempts(history: History) -> dict[tuple[str, int], list[Run]]:
    """Return the runs of each attempt of each task."""
    found: dict[tuple[str, int], list[Run]] = defaultdict(list)
    for run in history.all_runs():
        found[run.id, run.retries].append(run)
    return found


def is_explained(history: History, run: Run) -> bool:
    """Return whether another process may have to do a run once more."""
    return history.kill_of(run) is not None or history.is_interrupted(run)


def two_at_once(history: History) -> Findings:
    """No two processes run one task at once, unless the first was interrupted."""
    for task_id, runs in history.runs.items():
        for first, second in pairwise(runs):
            over = history.kill_of(first) if first.ended is None else first.ended
            is_over = over is not None and over < second.begun
            if not is_over and not history.is_interrupted(first):
                yield f"{task_id} ran in {first.pid} and {second.pid} at once."


def leases_cut_short(history: History) -> Findings:
    """Nobody is taken for dead before its lease is over."""
    for death in history.deaths:
        if death.lease > 0:
            yield f"{death.pid} had {death.id} for another {death.lease:.3f} s."


def needless_deaths(history: History) -> Findings:
    """A process that is taken for dead was killed or paused, or its worker has ended."""
    gone = {run.pid for run in history.all_runs() if run.worker in history.ended}
    for death in history.deaths:
        if death.pid in gone:
            continue
        harms = [*history.stood_still.get(death.pid, ())]
        if death.pid in history.killed:
            harms.append(history.killed[death.pid])
        if not any(at < death.at for at in harms):
            yield f"{death.pid} was taken for dead in {death.id}, and was alive."


def too_little(history: History) -> Findings:
    """Enough has happened for the other checks to mean something."""
    plan, figures = history.plan, count(history)
    wanted = {"tasks": plan.tasks, "rolled back": 1, **plan.harms}
    if plan.child_kills:
        wanted |= {"killed inside a task": 1, "runs again": 1, "deaths counted": 1}
    return scarce(figures, wanted)


def count(history: History) -> dict[str, float]:
    """Count what happened."""
    endings = Counter(history.endings.values())
    runs, seconds = list(history.all_runs()), history.recoveries
    return {
        "tasks": len(history.committed),
        "rolled back": sum(len(each.dropped) for each in history.plan.transactions()),
        "retried": endings["retried"],
        "failed": endings["failed"],
        **{what: history.harms[what] for what in history.plan.harms},
        "killed inside a task": history.inside,
        "workers that ended by themselves": len(history.ended),
        "runs": len(runs),
        "runs again": len(runs) - len(attempts(history)),
        "deaths counted": len(history.deaths),
        "messages that no worker began in time": history.resent,
        "tasks begun again after a kill": len(seconds),
        "seconds from a kill to that, p50": percentile(seconds, 0.5),
        "seconds from a kill to that, p99": percentile(seconds, 0.99),
        "seconds from a kill to that, max": percentile(seconds, 1),
        "seconds until all had ended": round(history.seconds, 1),
    }


def percentile(values: list[float], part: float) -> float:
    """Return which of some sorted values this part does not exceed; 0: there are none."""
    place = min(len(values) - 1, int(part * len(values)))
    return round(values[place], 2) if values else 0.0


ORACLE = Oracle(
    count,
    [
        lost_tasks,
        unended_rows,
        wrong_failures,
        wrong_retries,
        ghosts,
        runs_after_the_end,
        ends_by_others,
        needless_runs,
        two_at_once,
        leases_cut_short,
        needless_deaths,
        too_little,
    ],
)
