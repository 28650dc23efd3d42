"""
The history of a run, put together from the journals of processes and the database's ledger.

A journal keeps the entries of a process that was killed later. The ledger has the commits and
their moments.
"""

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, Self

from django_celery_safe.leases.holder import decode_holder
from django_celery_safe.locks import HeldLock
from django_celery_safe.models import OutboxMessage
from tests.faults.carried.plan import LEASE, RELAY_LOOK, Plan
from tests.faults.ledger import Ledger
from tests.faults.oracle import WithKills
from tests.faults.scenario import Witness

#: Longest time, s, that tasks wait after a harm to a server, a worker or a relay: all processes
#: have to connect again.
AFTERMATH = 5.0


@dataclass
class Run:
    """One run of a task; moments are ns; ``ended`` is None if the run never ended."""

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
        lease: The time left of its lease, s.
    """

    id: str
    pid: int
    at: int
    lease: float


class Recovery(NamedTuple):
    """
    A task whose process was killed in it, and that began again.

    Attributes:
        kill: The moment of the kill.
        begun: The beginning of the next run.
        worker: The worker of the next run.
    """

    id: str
    kill: int
    begun: int
    worker: int

    @property
    def seconds(self) -> float:
        """The seconds from the kill to the next run."""
        return (self.begun - self.kill) / 1e9


class Row(NamedTuple):
    """A row that is still there in the end."""

    state: str
    error_type: str


@dataclass
class History(WithKills):
    """
    The events of one recording; moments are in ns.

    Attributes:
        committed: The tasks of committed transactions, and the moments of the commits.
        runs: The runs of each task, in the order in which they began.
        ends: The moment at which each row was deleted, or said that its task failed.
        deaths: The deaths of processes that the rows have counted.
        killed: The moments at which a process with this id was killed; a new process may get
            the id of a dead one.
        ended: Workers that ended by themselves, and the moment at which the nemesis saw it.
        stood_still: The moments at which processes were paused, or saw that they had been.
        left: Rows, by the ids of their tasks.
        resent: How often a message was re-sent because no worker had begun its task.
        harms: How often each harm was done, by its name in the plan.
        struck: Spans in which tasks may wait for another reason than their own kill: from the
            beginning of a harm that may lose messages until its effects are over.
        inside: How many processes were killed inside a task.
        waiting: How many messages the broker has in the end.
    """

    plan: Plan
    committed: dict[str, int] = field(default_factory=dict)
    runs: dict[str, list[Run]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[str, int] = field(default_factory=dict)
    deaths: list[Death] = field(default_factory=list)
    killed: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    ended: dict[int, int] = field(default_factory=dict)
    stood_still: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    left: dict[str, Row] = field(default_factory=dict)
    resent: int = 0
    harms: Counter[str] = field(default_factory=Counter)
    struck: list[tuple[int, int]] = field(default_factory=list)
    inside: int = 0
    waiting: int = 0
    seconds: float = 0.0

    @classmethod
    def read(cls, plan: Plan, witness: Witness, ledger: Ledger, alias: str, **more: Any) -> Self:
        """Put the history together from the journals, the ledger and the rows."""
        history = cls(plan, **more)
        for row in OutboxMessage.objects.using(alias):
            history.left[row.task_id] = Row(row.state, row.error_type)
        for note in ledger.read():
            match note.what:
                case "committed":
                    history.committed[note.task_id] = note.at
                case "gone" | "failed":
                    history.ends.setdefault(note.task_id, note.at)
                case "resent":
                    history.resent += 1
                case "death":
                    pid = decode_holder(note.holder, HeldLock("")).holder.pid
                    history.deaths.append(Death(note.task_id, pid, note.at, note.lease))
        for entry in sorted(witness.journal.entries(), key=itemgetter("at_ns")):
            history._add_run(entry)
        for entry in witness.trouble.entries():
            history._add_trouble(entry)
        return history

    def _add_run(self, entry: dict[str, Any]) -> None:
        task_id, pid, at = entry["id"], entry["pid"], entry["at_ns"]
        match entry["effect"]:
            case "begun":
                run = Run(task_id, pid, at, entry["retries"], entry["worker"])
                self.runs[task_id].append(run)
            case "ended":
                ours = [one for one in self.runs[task_id] if one.pid == pid]
                ours[-1].ended, ours[-1].ending = at, entry["ending"]
            case "stood still":
                self.stood_still[pid].append(at)

    def _add_trouble(self, entry: dict[str, Any]) -> None:
        at = entry["at_ns"]
        after = at + int(AFTERMATH * 1e9)
        match entry["effect"]:
            case "killed":
                self.killed[entry["child"]].append(at)
                self.inside += entry["inside"]
                if not entry["inside"]:  # perhaps with a message
                    self.struck.append((at, at))
            case "worker ended":
                self.ended[entry["worker"]] = at
                self.struck.append((at, after))
            case "paused":
                self.stood_still[entry["child"]].append(at)
            case harm:
                self.harms[harm] += 1
                if harm not in ("children killed", "children paused"):
                    self.struck.append((entry["began_ns"], after))

    def all_begun(self) -> Iterator[Run]:
        """Yield the runs of all tasks, each task's in order."""
        for runs in self.runs.values():
            yield from runs

    def is_interrupted(self, run: Run) -> bool:
        """Return whether a run's process stood still, or its worker ended, in it or right after."""
        ended = [self.ended[run.worker]] if run.worker in self.ended else []
        moments = (*self.stood_still.get(run.pid, ()), *ended)
        return any(self.was_in(run, at) for at in moments)

    @cached_property
    def endings(self) -> dict[str, str]:
        """The planned ending of each committed task."""
        planned = (task for each in self.plan.transactions() for task in each.tasks)
        return {task.id: task.ending for task in planned if task.id in self.committed}

    @cached_property
    def recoveries(self) -> list[Recovery]:
        """The tasks that were begun again after a kill inside them, the quickest first."""
        found = [
            Recovery(run.id, kill, later.begun, later.worker)
            for runs in self.runs.values()
            for run, later in pairwise(runs)
            if run.ended is None and (kill := self.kill_of(run)) is not None and later.begun > kill
        ]
        return sorted(found, key=attrgetter("seconds"))

    @cached_property
    def undisturbed(self) -> list[Recovery]:
        """The recoveries during which nothing else was harmed, and whose worker was idle."""
        return [one for one in self.recoveries if not self._is_struck(one) and self._was_idle(one)]

    def _is_struck(self, one: Recovery) -> bool:
        return any(began < one.begun and over > one.kill for began, over in self.struck)

    def _was_idle(self, one: Recovery) -> bool:
        """
        Return whether the worker had time for the task when it was to begin again.

        The worker had time if it began another task that was sent after this one was due again.
        """
        sent, late = (int(one.kill + after * 1e9) for after in (LEASE + RELAY_LOOK, self.limit))
        begun = self._first_runs[one.worker]
        place = bisect.bisect(begun, (sent,))
        return any(
            self.committed.get(task_id, 0) > sent
            for at, task_id in begun[place : bisect.bisect(begun, (late,))]
        )

    @property
    def limit(self) -> float:
        """The longest time, s, that a killed task waits for an idle worker."""
        return LEASE + RELAY_LOOK + self.plan.grace

    @cached_property
    def _first_runs(self) -> dict[int, list[tuple[int, str]]]:
        """The first runs of tasks in each worker: when they began, and the ids of the tasks."""
        begun: dict[int, list[tuple[int, str]]] = defaultdict(list)
        for run in sorted((runs[0] for runs in self.runs.values()), key=attrgetter("begun")):
            begun[run.worker].append((run.begun, run.id))
        return begun
