"""
Says whether ``do_once`` kept its promise, from what witnesses outside of it noted.

Each check is a function of the history that yields what violates it.
The witnesses are the post, the tasks, and who killed them. An e-mail is matched to the run that
sent it by the run's id, which is its body.
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self, get_args

from django_celery_safe.idempotency.flags import Guarantee
from tests.faults.oracle import Findings, Oracle, scarce
from tests.faults.scenario import Plan as AnyPlan
from tests.faults.scenario import Witness, option

#: Why an e-mail did not count, and another was sent.
KILLED_WAITING, KILLED_LATER = "killed before the answer", "killed before the commit"
DROPPED = "answer dropped"


class Behaviour(StrEnum):
    """The post's treatment of one e-mail."""

    ACCEPT = "accepted"
    REFUSE = "refused"
    KILL_EARLY = "killed, and not taken"
    DROP_ANSWER = "taken, and the answer dropped"
    KILL = "taken, and killed before the answer"
    KILL_LATE = "taken, and killed after the answer"


@dataclass(frozen=True, kw_only=True)
class Plan(AnyPlan):
    """
    The plan of one recording.

    Args:
        pause: Mean time between the sends for two users, s.
        between_kills: Shortest and longest time between two kills at random, s.
        workers: How many there are.
        concurrency: Children of each.
        at_most: All must be done after this time, s.
    """

    guarantee: str = option("at_least_once", "of do_once", get_args(Guarantee))
    users: int = option(200, "one e-mail each")
    copies: int = option(2, "how often each user's task is sent, at once")
    pause: float = 0.1
    between_kills: tuple[float, float] = (0.3, 0.9)
    workers: int = 2
    concurrency: int = 3
    at_most: float = 300.0


@dataclass
class Run:
    """
    One run of a task, by what it noted; moments are ns, None: it never came so far.

    Attributes:
        begun: When it began to send.
        behaviour: The post's, if it took the e-mail.
        answered: When the post's answer had come.
        failed: When the send had failed, by ``error``.
        over: When it was out of ``do_once``, by ``raised`` if not well.
    """

    id: str
    user: int
    pid: int
    taken: int
    begun: int | None = None
    behaviour: str | None = None
    answered: int | None = None
    failed: int | None = None
    over: int | None = None
    error: str | None = None
    raised: str | None = None


@dataclass
class History:
    """
    The events of a run.

    Attributes:
        flags: Whether the flag of each user is set in the end.
        runs: By their id.
        killed: When each killed process was, ns.
        kills: How often processes were, by what.
        posts: How often the post did what.
        messages: Ids of messages that the broker has in the end.
    """

    plan: Plan
    flags: dict[int, bool] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)
    killed: dict[int, int] = field(default_factory=dict)
    kills: Counter[str] = field(default_factory=Counter)
    posts: Counter[str] = field(default_factory=Counter)
    messages: list[str] = field(default_factory=list)

    @classmethod
    def read(
        cls, plan: Plan, witness: Witness, flags: dict[int, bool], messages: list[str]
    ) -> Self:
        """Put together what the witnesses wrote."""
        history = cls(plan, flags, messages=messages)
        for entry in witness.journal.entries():
            run_id, what, at = entry["run"], entry["effect"], entry["at_ns"]
            if what == "taken":
                history.runs[run_id] = Run(run_id, entry["user"], entry["pid"], at)
                continue
            run = history.runs[run_id]
            setattr(run, what, entry.get("behaviour", at))
            if what in ("failed", "over"):
                setattr(run, "raised" if what == "over" else "error", entry["error"])
        history.posts = witness.open("post").tally("behaviour")
        history.kills = witness.trouble.tally("what")
        for entry in witness.trouble.entries("killed"):
            history.killed.setdefault(entry["child"], entry["at_ns"])
        return history

    def was_killed(self, run: Run) -> bool:
        """Tell whether a run's process was killed in the middle of it."""
        return run.over is None and self.killed.get(run.pid, 0) > run.taken

    @property
    def undisturbed(self) -> set[int]:
        """Users of whom no send failed, and no run was killed."""
        runs = self.runs.values()
        return set(self.flags) - {
            run.user for run in runs if run.failed is not None or self.was_killed(run)
        }

    def cause(self, run: Run) -> str | None:
        """Return why a user whom this e-mail had reached may get another; None: for nothing."""
        if self.was_killed(run):
            return KILLED_WAITING if run.answered is None else KILLED_LATER
        is_dropped = run.behaviour == Behaviour.DROP_ANSWER and run.answered is None
        return DROPPED if is_dropped else None

    @property
    def mailed(self) -> dict[int, list[Run]]:
        """The runs whose e-mails the post took, by their user."""
        found: dict[int, list[Run]] = {user: [] for user in self.flags}
        for run in self.runs.values():
            if run.behaviour is not None:
                found[run.user].append(run)
        return found


def second_mails(history: History) -> Findings:
    """Under ``at_most_once``, nobody gets two."""
    for user, runs in history.mailed.items():
        if history.plan.guarantee == "at_most_once" and len(runs) > 1:
            yield f"User {user} got {len(runs)}."


def missing_mails(history: History) -> Findings:
    """Everybody gets one: under ``at_most_once``, those who met neither fault nor kill."""
    at_most_once = history.plan.guarantee == "at_most_once"
    wanted = history.undisturbed if at_most_once else set(history.flags)
    for user, runs in history.mailed.items():
        if not runs and user in wanted:
            yield f"User {user} got none."


def unexplained_doubles(history: History) -> Findings:
    """All but one of a user's e-mails have a cause why they did not count."""
    for user, runs in history.mailed.items():
        good = [run.id for run in runs if history.cause(run) is None]
        if len(good) > 1:
            yield f"User {user} got e-mails of {', '.join(good)}."


def needless_sends(history: History) -> Findings:
    """No run begins to send when another has begun that sends well and lives on."""
    for run in history.runs.values():
        sent_well = run.answered is not None and run.over is not None and run.raised is None
        if not sent_well or run.begun is None:
            continue
        for other in history.runs.values():
            if other.user == run.user and other.begun is not None and other.begun > run.begun:
                yield f"User {run.user}: run {other.id} began to send after {run.id}."


def unset_flags(history: History) -> Findings:
    """In the end each flag is set."""
    for user, flag in sorted(history.flags.items()):
        if not flag:
            yield f"User {user}: not set."


def errors(history: History) -> Findings:
    """A run ends well, or by an error of its send, or is killed."""
    for run in history.runs.values():
        if run.over is None and not history.was_killed(run):
            yield f"Run {run.id} of user {run.user} has no end."
        if run.raised is not None and run.raised != run.error:
            yield f"Run {run.id} of user {run.user}: {run.raised}."


def leftovers(history: History) -> Findings:
    """In the end the broker has no message."""
    for task_id in history.messages:
        yield f"The broker has a message of {task_id}."


def too_little(history: History) -> Findings:
    """Enough has happened for the other checks to mean something."""
    wanted = ["users who met no fault", "runs that found it done", "children killed at random"]
    wanted += [f"posts {behaviour}" for behaviour in Behaviour]
    if history.plan.guarantee == "at_most_once":
        wanted.append("users without an e-mail")
    else:
        wanted += [f"doubles: {cause}" for cause in (KILLED_WAITING, KILLED_LATER, DROPPED)]
    return scarce(count(history), dict.fromkeys(wanted, 1))


def count(history: History) -> dict[str, int]:
    """Count what happened."""
    runs = list(history.runs.values())
    doubles = [some for some in history.mailed.values() if len(some) > 1]
    causes = Counter(history.cause(run) for some in doubles for run in some)
    of_users = [len(some) for some in history.mailed.values()]
    return {
        "users": len(history.flags),
        "users who met no fault": len(history.undisturbed),
        "runs": len(runs),
        "runs that found it done": sum(
            run.begun is None and run.over is not None and run.raised is None for run in runs
        ),
        "runs killed inside": sum(map(history.was_killed, runs)),
        "children killed at random": history.kills["at random"],
        **{f"posts {behaviour}": history.posts[behaviour] for behaviour in Behaviour},
        "e-mails": sum(of_users),
        "users without an e-mail": of_users.count(0),
        "users with one e-mail": of_users.count(1),
        "users with several e-mails": len(doubles),
        **{f"doubles: {cause}": causes[cause] for cause in (KILLED_WAITING, KILLED_LATER, DROPPED)},
    }


ORACLE = Oracle(
    count,
    [
        second_mails,
        missing_mails,
        unexplained_doubles,
        needless_sends,
        unset_flags,
        errors,
        leftovers,
        too_little,
    ],
)
