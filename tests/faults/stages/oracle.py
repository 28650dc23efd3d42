"""
Says whether each stage was begun once and each step succeeded once, in runs that all ended.

Each check is a function of the history that yields what violates it.
A journal keeps the entries of a process that was killed later. The database's own ledger has
its commits.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, Self

from django_celery_safe.models import OutboxMessage, StageRun, StageStep
from tests.faults.ledger import Ledger
from tests.faults.oracle import Findings, Oracle, WithKills, scarce
from tests.faults.scenario import Witness
from tests.faults.stages.plan import TWICE, Plan

#: The harms that the nemesis does, in the order of the report.
HARMS = ("children killed", "workers killed", "killed inside a step", "broker restarted")


class Run(NamedTuple):
    """A run's row in the end."""

    status: str
    params: frozenset[str]


class Step(NamedTuple):
    """A step's row in the end."""

    run: int
    stage: int
    position: int
    task_id: str
    status: str
    has_end: bool

    def __str__(self) -> str:
        return f"step {self.position} of stage {self.stage} of run {self.run}"


@dataclass
class Execution:
    """One execution of a step; moments are ns, None: it never came so far."""

    step: int
    pid: int
    begun: int
    known: int = 0
    ended: int | None = None


@dataclass
class History(WithKills):
    """
    The events of a run.

    Attributes:
        runs: Rows, by their ids.
        steps: Rows, by their ids.
        left: Messages that the outbox has in the end.
        messages: How often a message with each task id was committed.
        successes: How often it was committed that the step with each task id succeeded.
        executions: The executions of each step, in order.
        lost: Processes that were told to have lost a step, with the step.
        killed: When processes with this id were, ns.
        harms: How often each harm was done, how often it killed inside a step, and how often a
            message was delivered ``again``.
    """

    plan: Plan
    runs: dict[int, Run] = field(default_factory=dict)
    steps: dict[int, Step] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    messages: Counter[str] = field(default_factory=Counter)
    successes: Counter[str] = field(default_factory=Counter)
    executions: dict[int, list[Execution]] = field(default_factory=lambda: defaultdict(list))
    lost: set[tuple[int, int]] = field(default_factory=set)
    killed: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    harms: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @classmethod
    def read(cls, plan: Plan, witness: Witness, ledger: Ledger, alias: str, seconds: float) -> Self:
        """Put together what the witnesses wrote, and the rows."""
        history = cls(plan, seconds=seconds)
        for run in StageRun.objects.using(alias):
            history.runs[run.pk] = Run(run.status, frozenset(run.params))
        for row in StageStep.objects.using(alias):
            place = (row.run_id, row.stage - 1, row.position)
            history.steps[row.pk] = Step(*place, row.task_id, row.status, row.ended_at is not None)
        rows = OutboxMessage.objects.using(alias).pending()
        history.left = list(map(str, rows))
        history.messages, history.successes = ledger.tally("message"), ledger.tally("success")
        for entry in witness.journal.entries():
            step, pid, at = entry["step"], entry["pid"], entry["at_ns"]
            if entry["effect"] == "begun":
                history.executions[step].append(Execution(step, pid, at, entry["known"]))
            else:
                ours = [one for one in history.executions[step] if one.pid == pid]
                ours[-1].ended = at
        ids = {step.task_id: pk for pk, step in history.steps.items()}
        lost = witness.trouble.entries("lost")
        history.lost = {(entry["pid"], ids[entry["task_id"]]) for entry in lost}
        kills = witness.trouble.entries("killed")
        for entry in kills:
            history.killed[entry["child"]].append(entry["at_ns"])
        history.harms = witness.trouble.tally("effect")
        history.harms["children killed"] = sum(entry["what"] == "child" for entry in kills)
        history.harms["killed inside a step"] = sum(entry["inside"] for entry in kills)
        return history

    def all_begun(self) -> Iterator[Execution]:
        """Yield them, each step's in order."""
        for executions in self.executions.values():
            yield from executions

    def were_lost(self, executions: Iterable[Execution]) -> list[Execution]:
        """Return those whose process was told that it had lost the step."""
        return [one for one in executions if (one.pid, one.step) in self.lost]

    def stage(self, run: int, stage: int) -> list[int]:
        """Return the ids of a stage's steps."""
        return [pk for pk, step in self.steps.items() if (step.run, step.stage) == (run, stage)]


def stuck_runs(history: History) -> Findings:
    """In the end every run has succeeded."""
    for pk, run in history.runs.items():
        if run.status != "succeeded":
            yield f"Run {pk} is {run.status}."


def lost_params(history: History) -> Findings:
    """A run's params have what each step returned, and a step finds those of all stages before."""
    for pk, run in history.runs.items():
        of_run = [step for step in history.steps.values() if step.run == pk]
        wanted = {f"{step.stage}.{step.position}" for step in of_run}
        if run.status == "succeeded" and run.params != wanted:
            yield f"Run {pk} lacks {sorted(wanted - run.params)}."
    for one in history.all_begun():
        step = history.steps[one.step]
        if one.known != step.stage * history.plan.steps:
            yield f"{step} was given {one.known} params."


def early_steps(history: History) -> Findings:
    """No step begins before each step of the stage before has come to its end."""
    for run in history.runs:
        for stage in range(1, history.plan.stages):
            begun = [
                one.begun for pk in history.stage(run, stage) for one in history.executions[pk]
            ]
            for pk in history.stage(run, stage - 1):
                ends = [one.ended for one in history.executions[pk] if one.ended is not None]
                if begun and (not ends or min(ends) > min(begun)):
                    yield f"Stage {stage} began before {history.steps[pk]} had ended."


def stages_begun(history: History) -> Findings:
    """Each stage is begun once: its messages are written once."""
    for step in history.steps.values():
        times = history.messages[step.task_id]
        if times != 1:
            yield f"{step} was begun {times} times."


def steps_succeeded(history: History) -> Findings:
    """Each step succeeds exactly once, and its row says when."""
    for pk, step in history.steps.items():
        times, begun = history.successes[step.task_id], len(history.executions[pk])
        is_good = step.status == "succeeded" and step.has_end and times == 1
        if not is_good or not begun:
            yield f"{step} is {step.status}: succeeded {times} times, begun {begun} times."


def needless_executions(history: History) -> Findings:
    """A step runs again only if its process was killed, or it was lost to another."""
    for pk, executions in history.executions.items():
        lost = history.were_lost(executions)
        good = [one for one in executions if one not in lost and history.kill_of(one) is None]
        if len(good) > 1:
            yield f"{history.steps[pk]} ran {len(executions)} times, {len(good)} for no reason."


def two_at_once(history: History) -> Findings:
    """No two processes run one step at once, unless the first was told that it lost it."""
    for pk, executions in history.executions.items():
        lost = history.were_lost(executions)
        for first, second in pairwise(executions):
            over = history.kill_of(first) if first.ended is None else first.ended
            if first not in lost and (over is None or over > second.begun):
                yield f"{history.steps[pk]} ran in {first.pid} and {second.pid} at once."


def leftovers(history: History) -> Findings:
    """In the end the outbox has no message to send."""
    for one in history.left:
        yield f"The outbox has {one}."


def too_little(history: History) -> Findings:
    """Enough has happened for the other checks to mean something."""
    plan, figures = history.plan, count(history)
    again = TWICE * figures["messages written"]
    wanted = {
        "runs": plan.runs,
        "steps": plan.runs * plan.stages * plan.steps,
        # By chance, and not at all to who was killed.
        "messages delivered twice": max(1, int(0.75 * again - 3 * again**0.5)),
        "killed inside a step": 1,
        "children killed": 1,
        **plan.harms,
    }
    return scarce(figures, wanted)


def count(history: History) -> dict[str, float]:
    """Count what happened."""
    executions = list(history.all_begun())
    return {
        "runs": len(history.runs),
        "steps": len(history.steps),
        "messages written": history.messages.total(),
        "messages delivered twice": history.harms["again"],
        **{what: history.harms[what] for what in HARMS},
        "executions": len(executions),
        "steps run again": len(executions) - len(history.executions),
        "steps lost": len(history.lost),
        "seconds in all": round(history.seconds, 1),
    }


CHECKS = [
    stuck_runs, lost_params, early_steps, stages_begun, steps_succeeded, needless_executions,
    two_at_once, leftovers, too_little,
]  # fmt: skip
ORACLE = Oracle(count, CHECKS)
