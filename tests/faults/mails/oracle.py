"""
Says whether ``do_once`` kept its promise, from what witnesses outside of it noted.

Each check is a function of the history that yields what violates it.
The witnesses are the mail server, the tasks, and who killed them. An e-mail is matched to
the run that sent it by the run's id, which is its body.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from tests.faults.mails.plan import EMAIL_TIMEOUT, Behaviour, Plan, Witness
from tests.faults.oracle import Findings, Oracle, scarce

#: Why an e-mail did not count, and another was sent.
KILLED_WAITING = "killed before the answer"
KILLED_LATER = "killed before the commit"
DROPPED = "answer dropped"
LATE = "answer too late"
UNEXPLAINED = "unexplained"

#: These two together, as figure.
AFTER_A_KILL = "doubles after a kill"

#: Errors of a send whose answer did not come in time.
NO_ANSWER = {"TimeoutError", "SMTPServerDisconnected"}

#: Names of the errors for which an e-mail's task is retried.
EXPECTED = NO_ANSWER | {
    "ConnectionRefusedError",
    "ConnectionResetError",
    "BrokenPipeError",
    "SMTPConnectError",
    "SMTPRecipientsRefused",
}

#: Figures that may be zero: a kill, or an answer, may come in time or not.
BY_CHANCE = {
    f"doubles: {cause}" for cause in (KILLED_WAITING, KILLED_LATER, DROPPED, LATE, UNEXPLAINED)
} | {"users without an e-mail", "users with several e-mails"}


class Mail(NamedTuple):
    """An e-mail that the server took."""

    at: int
    run: str
    behaviour: str


@dataclass
class Run:
    """
    One run of a task, by what it noted; moments are ns, None: it never came so far.

    Attributes:
        begun: When it began to send.
        answered: When the server's answer had come.
        failed: When the send had failed, by ``error``.
        over: When it was out of ``do_once``, by ``raised`` if not well.
    """

    id: str
    user: int
    taken: int
    begun: int | None = None
    answered: int | None = None
    failed: int | None = None
    over: int | None = None
    error: str | None = None
    raised: str | None = None

    @property
    def pid(self) -> int:
        """The process that ran it."""
        return int(self.id.partition("-")[0])


@dataclass
class History:
    """
    The events of a run.

    Attributes:
        flags: Whether the flag of each user is set in the end.
        mails: E-mails that the server took, by the user.
        runs: By their id.
        killed: When each killed process was, ns.
        connections: How often the server did what.
        messages: Ids of messages that the broker has in the end.
    """

    plan: Plan
    flags: dict[int, bool] = field(default_factory=dict)
    mails: dict[int, list[Mail]] = field(default_factory=lambda: defaultdict(list))
    runs: dict[str, Run] = field(default_factory=dict)
    killed: dict[int, int] = field(default_factory=dict)
    kills: Counter[str] = field(default_factory=Counter)
    connections: Counter[str] = field(default_factory=Counter)
    messages: list[str] = field(default_factory=list)

    @classmethod
    def read(
        cls, plan: Plan, witness: Witness, flags: dict[int, bool], messages: list[str]
    ) -> Self:
        """Put together what the witnesses wrote."""
        history = cls(plan, flags, messages=messages)
        for entry in witness.tasks.entries():
            history._add_note(**entry)
        for entry in witness.server.entries("took"):
            user = int(entry["to"].partition("@")[0])
            mail = Mail(entry["at_ns"], entry["run"], entry["behaviour"])
            history.mails[user].append(mail)
        history.connections = witness.server.tally("behaviour", "connection")
        history.kills = witness.kills.tally("what")
        for entry in witness.kills.entries():
            history.killed.setdefault(entry["child"], entry["at_ns"])
        return history

    def _add_note(
        self, effect: str, at_ns: int, pid: int, run: str, user: int, error: str | None = None
    ) -> None:
        if effect == "taken":
            self.runs[run] = Run(run, user, at_ns)
            return
        setattr(self.runs[run], effect, at_ns)
        if error is not None:
            setattr(self.runs[run], "raised" if effect == "over" else "error", error)

    def was_killed(self, run: Run) -> bool:
        """Tell whether a run's process was killed in the middle of it."""
        return run.over is None and self.killed.get(run.pid, 0) > run.taken

    @property
    def faulty(self) -> set[int]:
        """Users of whom a send failed, or a run was killed."""
        return {
            run.user for run in self.runs.values() if run.failed is not None or self.was_killed(run)
        }

    @property
    def undisturbed(self) -> set[int]:
        """Users who met neither."""
        return set(self.flags) - self.faulty

    def cause(self, mail: Mail) -> str | None:
        """Return why a user whom this e-mail had reached may get another; None: for nothing."""
        run = self.runs.get(mail.run)
        if run is None or run.begun is None:
            return None
        if mail.behaviour == Behaviour.DROP_ANSWER and run.answered is None:
            return DROPPED
        if self.was_killed(run):
            return KILLED_WAITING if run.answered is None else KILLED_LATER
        if run.failed is None or run.error not in NO_ANSWER:
            return None
        waited = run.failed - run.begun
        return LATE if waited >= EMAIL_TIMEOUT * 1e9 else None

    def doubles(self) -> Iterator[tuple[int, list[tuple[Mail, str | None]]]]:
        """Yield the users who got more than one e-mail, and these with their causes."""
        for user, mails in sorted(self.mails.items()):
            if len(mails) > 1:
                yield user, [(mail, self.cause(mail)) for mail in mails]


def second_mails(history: History) -> Findings:
    """Under ``at_most_once``, nobody gets two."""
    if history.plan.guarantee != "at_most_once":
        return
    for user, mails in history.doubles():
        yield f"User {user}: {describe(mails)}."


def missing_mails(history: History) -> Findings:
    """Everybody gets one: under ``at_most_once``, those who met neither fault nor kill."""
    at_most_once = history.plan.guarantee == "at_most_once"
    wanted = history.undisturbed if at_most_once else set(history.flags)
    for user in sorted(wanted - set(history.mails)):
        runs = sum(run.user == user for run in history.runs.values())
        met = "a fault" if user in history.faulty else "no fault"
        yield f"User {user}, who met {met}: none, in {runs} runs."


def unexplained_doubles(history: History) -> Findings:
    """All but one of a user's e-mails have a cause why they did not count."""
    for user, mails in history.doubles():
        if sum(cause is None for _, cause in mails) > 1:
            yield f"User {user}: {describe(mails)}."


def describe(mails: list[tuple[Mail, str | None]]) -> str:
    """Say which runs sent e-mails, and why they did not count."""
    return "; ".join(f"run {mail.run} at {mail.at} ns, {cause or 'good'}" for mail, cause in mails)


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
        if run.raised is not None and (run.raised != run.error or run.raised not in EXPECTED):
            yield f"Run {run.id} of user {run.user}: {run.raised}."


def leftovers(history: History) -> Findings:
    """In the end the broker has no message."""
    for task_id in history.messages:
        yield f"The broker has a message of {task_id}."


def too_little(history: History) -> Findings:
    """Enough has happened for the other checks to mean something."""
    figures = Counter(count(history))
    wanted = {name for name in figures if name not in BY_CHANCE}
    wanted |= {f"connections {behaviour}" for behaviour, _ in history.plan.deck}
    if history.plan.guarantee == "at_most_once":
        wanted.add("users without an e-mail")
    else:
        wanted |= {AFTER_A_KILL, f"doubles: {DROPPED}"}
        killed = (KILLED_WAITING, KILLED_LATER)
        figures[AFTER_A_KILL] = sum(figures[f"doubles: {cause}"] for cause in killed)
    return scarce(figures, dict.fromkeys(sorted(wanted), 1))


def count(history: History) -> dict[str, int]:
    """Count what happened."""
    runs = list(history.runs.values())
    failed = Counter(run.error for run in runs if run.failed is not None)
    mails = Counter({user: len(history.mails.get(user, ())) for user in history.flags})
    of_users = list(mails.values())
    causes = count_causes(history)
    return {
        "users": len(history.flags),
        "users who met no fault": len(history.undisturbed),
        "runs": len(runs),
        "runs that found it done": sum(
            run.begun is None and run.over is not None and run.raised is None for run in runs
        ),
        "runs killed inside": sum(map(history.was_killed, runs)),
        "children killed at random": history.kills["at random"],
        "children killed when their e-mail was taken": history.kills["announced"],
        **{f"sends failed: {error}": number for error, number in sorted(failed.items())},
        **{f"connections {name}": number for name, number in sorted(history.connections.items())},
        "e-mails": mails.total(),
        "users without an e-mail": of_users.count(0),
        "users with one e-mail": of_users.count(1),
        "users with several e-mails": sum(number > 1 for number in of_users),
        **{
            f"doubles: {cause}": causes[cause]
            for cause in (KILLED_WAITING, KILLED_LATER, DROPPED, LATE, UNEXPLAINED)
        },
    }


def count_causes(history: History) -> Counter[str]:
    """Count the causes of e-mails beyond each user's first."""
    found: Counter[str] = Counter()
    for _, mails in history.doubles():
        causes = [cause for _, cause in mails if cause is not None]
        causes += [UNEXPLAINED] * len(mails)
        found.update(causes[: len(mails) - 1])
    return found


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
