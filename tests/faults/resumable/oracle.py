"""Says whether each row was written to once, and whether workers that shut down were obeyed."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Self

from django_celery_safe.models import OutboxMessage
from tests.app.models import Person
from tests.faults.oracle import Findings, Oracle, percentiles, scarce
from tests.faults.resumable.work import DELETED, PERIOD
from tests.faults.scenario import Witness, WorkersPlan, option

#: Seconds from a shutdown until each task has left its worker, in which a chunk takes one.
OBEYED = 3.0


@dataclass(frozen=True, kw_only=True)
class Plan(WorkersPlan):
    """The plan of one recording; ``at_most`` is how long it may take, s."""

    rows: int = option(40_000, "how many rows there are")
    tasks: int = option(20, "how many parts they have")
    child_kills: int = option(60, "how many children are killed")
    worker_kills: int = option(3, "how many workers are killed")
    shutdowns: int = option(3, "how many workers are shut down")
    at_most: float = 3600.0

    @property
    def harms(self) -> dict[str, int]:
        """How often each harm is done."""
        return {
            "children killed": self.child_kills,
            "workers killed": self.worker_kills,
            "workers shut down": self.shutdowns,
        }

    @property
    def pause(self) -> float:
        """How long a task waits at each row, s, so that there is time for all harms."""
        harms = self.child_kills + 5 * (self.worker_kills + self.shutdowns)
        return 0.8 * harms * self.workers * self.concurrency / self.rows


@dataclass
class History:
    """
    The events of one recording.

    Attributes:
        written: How many rows were written to so many times.
        left: The states of the messages that are left.
        runs: How many runs began.
        harms: How often each harm was done, and how many tasks were in what was killed.
        obeyed: Seconds from each shutdown until the last task had left the worker.
    """

    plan: Plan
    written: Counter[int] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    harms: Counter[str] = field(default_factory=Counter)
    obeyed: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @classmethod
    def read(cls, plan: Plan, witness: Witness, alias: str, seconds: float = 0.0) -> Self:
        """Put together what the witness wrote, and the rows."""
        rows = Person.everyone.using(alias).values_list("pk", "email")
        times = (len(text) for pk, text in rows.iterator() if pk % PERIOD != DELETED)
        states = OutboxMessage.objects.using(alias).values_list("state", flat=True)
        history = cls(plan, Counter(times), Counter(states), seconds=seconds)
        history.runs = witness.journal.count("begun")
        lefts = witness.journal.entries("left")
        for entry in witness.trouble.entries():
            match entry["effect"]:
                case "killed":
                    history.harms["killed inside a task"] += entry["inside"]
                case "told":
                    told = entry["at_ns"]
                    ours = [one["at_ns"] for one in lefts if one["pid"] in entry["inside"]]
                    after = [at - told for at in ours if at > told]
                    history.obeyed.append(max(after, default=0) / 1e9)
                case harm:
                    history.harms[harm] += 1
        return history


def rows_written_twice(history: History) -> Findings:
    """No chunk is done again after its commit."""
    if twice := sum(number for times, number in history.written.items() if times > 1):
        yield f"{twice} rows were written to more than once."


def rows_left_out(history: History) -> Findings:
    """Each row is walked."""
    if history.written[0]:
        yield f"{history.written[0]} rows were never written to."


def unended_tasks(history: History) -> Findings:
    """Each task comes to its end, whatever happens to its processes."""
    if history.left:
        yield f"Messages are left: {dict(history.left)}."


def slow_shutdowns(history: History) -> Findings:
    """A task leaves a worker that shuts down behind its open chunk."""
    for seconds in history.obeyed:
        if seconds > OBEYED:
            yield f"A task left its worker {seconds:.1f} s after its shutdown."


def too_little(history: History) -> Findings:
    """Enough has happened for the other checks to mean something."""
    # The last ones may find no task to harm.
    wanted = {what: number * 0.8 for what, number in history.plan.harms.items()}
    yield from scarce(history.harms, {**wanted, "killed inside a task": 1})


def count(history: History) -> dict[str, float]:
    """Count what happened."""
    return {
        "rows written once": history.written[1],
        "runs": history.runs,
        **{what: history.harms[what] for what in (*history.plan.harms, "killed inside a task")},
        **percentiles("s from a shutdown to the hand-over", sorted(history.obeyed)),
        "seconds until all had ended": round(history.seconds, 1),
    }


CHECKS = [rows_written_twice, rows_left_out, unended_tasks, slow_shutdowns, too_little]
ORACLE = Oracle(count, CHECKS)
