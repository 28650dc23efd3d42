"""
Checks that each committed task ended, once, in the run that held its row.

Each check is a function of the history that yields what violates it.
"""

from collections import Counter, defaultdict
from itertools import pairwise

from tests.faults.carried.history import History, Row, Run
from tests.faults.carried.plan import FINAL
from tests.faults.oracle import Findings, Oracle, percentiles, scarce


def lost_tasks(history: History) -> Findings:
    """Each committed task comes to its end."""
    ended = final_runs(history)
    for task_id in sorted(history.committed):
        runs = history.runs.get(task_id, [])
        if task_id not in ended:
            yield f"{task_id} was committed and never ended; it was begun {len(runs)} times."


def unended_rows(history: History) -> Findings:
    """In the end only the rows of failed tasks are left."""
    for task_id, row in history.left.items():
        if row.state != "failed":
            yield f"The row of {task_id} is {row.state}."


def wrong_failures(history: History) -> Findings:
    """Exactly the tasks that are to fail have failed, with the planned error."""
    failed = {task_id for task_id, row in history.left.items() if row.state == "failed"}
    failing = {task_id for task_id, ending in history.endings.items() if ending == "failed"}
    for task_id in sorted(failed | failing):
        row = history.left.get(task_id, Row("gone", ""))
        if task_id not in failing or row != ("failed", "PlannedFailure"):
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
    """No task of a rolled back transaction begins."""
    for task_id in sorted(set(history.runs) - set(history.committed)):
        yield f"{task_id} began, and was never committed."


def runs_after_the_end(history: History) -> Findings:
    """No run of a task begins once its row has ended."""
    for run in history.all_begun():
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
            if history.kill_of(run) is None and not history.is_interrupted(run):
                yield f"{run.id} ran in {run.pid}, which lived, and was run again."


def attempts(history: History) -> dict[tuple[str, int], list[Run]]:
    """Return the runs of each attempt of each task."""
    found: dict[tuple[str, int], list[Run]] = defaultdict(list)
    for run in history.all_begun():
        found[run.id, run.retries].append(run)
    return found


def final_runs(history: History) -> dict[str, list[Run]]:
    """Return the runs of each task that ended as done or failed."""
    found: dict[str, list[Run]] = defaultdict(list)
    for run in history.all_begun():
        if run.ending in FINAL:
            found[run.id].append(run)
    return found


def two_at_once(history: History) -> Findings:
    """No two processes run one task at once, unless the first was interrupted."""
    for task_id, runs in history.runs.items():
        for first, second in pairwise(runs):
            over = history.kill_of(first) if first.ended is None else first.ended
            is_over = over is not None and over < second.begun
            if not is_over and not history.is_interrupted(first):
                yield f"{task_id} ran in {first.pid} and {second.pid} at once."


def leases_cut_short(history: History) -> Findings:
    """No process is taken for dead before its lease is over."""
    for death in history.deaths:
        if death.lease > 0:
            yield f"{death.pid} had {death.id} for another {death.lease:.3f} s."


def needless_deaths(history: History) -> Findings:
    """A process that is taken for dead was killed or paused, or its worker ended."""
    gone = {run.pid for run in history.all_begun() if run.worker in history.ended}
    for death in history.deaths:
        if death.pid in gone:
            continue
        harms = [*history.stood_still.get(death.pid, ()), *history.killed.get(death.pid, ())]
        if not any(at < death.at for at in harms):
            yield f"{death.pid} was taken for dead in {death.id}, and was alive."


def late_recoveries(history: History) -> Findings:
    """A task begins again in time after its process was killed, while a worker is idle."""
    for one in history.undisturbed:
        if one.seconds > history.limit:
            yield f"{one.id} began {one.seconds:.2f} s after its process was killed."


def too_little(history: History) -> Findings:
    """Enough has happened for the other checks to mean something."""
    plan, figures = history.plan, count(history)
    wanted = {"tasks": plan.tasks, "rolled back": 1, **plan.harms}
    if plan.child_kills:
        wanted |= {"killed inside a task": 1, "runs again": 1, "deaths counted": 1}
        # In a short run one harm follows the other.
        wanted["of these by an idle worker"] = min(plan.child_kills, plan.tasks // 200) // 10
    return scarce(figures, wanted)


def count(history: History) -> dict[str, float]:
    """Return the figures of the run."""
    endings = Counter(history.endings.values())
    runs, seconds = list(history.all_begun()), [one.seconds for one in history.recoveries]
    undisturbed = [one.seconds for one in history.undisturbed]
    return {
        "tasks": len(history.committed),
        "rolled back": sum(len(each.dropped) for each in history.plan.transactions()),
        "retried": endings["retried"],
        "failed": endings["failed"],
        "lost": len(list(lost_tasks(history))),
        "done twice": sum(len(ended) > 1 for ended in final_runs(history).values()),
        "messages left in the broker": history.waiting,
        **{what: history.harms[what] for what in history.plan.harms},
        "killed inside a task": history.inside,
        "workers that ended by themselves": len(history.ended),
        "runs": len(runs),
        "runs again": len(runs) - len(attempts(history)),
        "deaths counted": len(history.deaths),
        "messages that no worker began in time": history.resent,
        "tasks begun again after a kill": len(seconds),
        **percentiles("seconds from a kill to that", seconds),
        "of these by an idle worker": len(undisturbed),
        **percentiles("seconds from a kill to an idle worker", undisturbed),
        "seconds until all had ended": round(history.seconds, 1),
    }


def measure(history: History) -> dict[str, list[float]]:
    """Return the seconds from each kill inside a task until it began again."""
    return {
        "of all": [round(one.seconds, 3) for one in history.recoveries],
        "by an idle worker": [round(one.seconds, 3) for one in history.undisturbed],
    }


CHECKS = [
    lost_tasks, unended_rows, wrong_failures, wrong_retries, ghosts, runs_after_the_end,
    ends_by_others, needless_runs, two_at_once, leases_cut_short, needless_deaths,
    late_recoveries, too_little,
]  # fmt: skip
ORACLE = Oracle(count, CHECKS, measure)
