"""Messages of steps: delivered once, again, late, and while others run the step."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from random import Random
from typing import Any, Final

import pytest
from celery.exceptions import Ignore, Reject
from django.db import DataError, OperationalError, connections
from django.test.utils import CaptureQueriesContext
from pytest_django import Settings

from django_celery_safe import SafeTask, idempotent, stages
from django_celery_safe.databases import Now
from django_celery_safe.delivery.copies import MessageGoesOn
from django_celery_safe.models import (
    DatabaseLock,
    IdempotencyRecord,
    OutboxMessage,
    StageRun,
    StageStep,
)
from django_celery_safe.sending import commit
from django_celery_safe.signals import claim_lost, run_ended, step_failed
from tests.background import elsewhere
from tests.concurrency.mailbox import Mailbox, Message, Outcome
from tests.kinds import more_for_claim
from tests.sending.carrying import lose_commit
from tests.sending.conftest import hearing
from tests.sending.test_carried import BRACKETS
from tests.statements import at_statement, raising

NAME: Final = "tests.staged"
#: The plan of most tests, by the names of its steps.
PLAN: Final = ("ab", "cd", "e")


class Staged:
    """
    Runs in a mailbox, whose steps have names; their messages are delivered by hand.

    Args:
        alias: Where the runs are.
    """

    def __init__(self, mailbox: Mailbox, alias: str) -> None:
        self.mailbox = mailbox
        self.alias = alias
        #: The names of the steps, in the order in which they were called.
        self.calls: list[str] = []
        #: Functions that steps run, by the steps' names; other steps do nothing.
        self.bodies: dict[str, Callable[[Any], Any]] = {}
        #: All that was sent so far.
        self.sent: list[Message] = []
        self.task = self.make_task()

    def make_task(self, base: Any = SafeTask, name: str = NAME, **options: Any) -> Any:
        """Return a task that notes each of its calls."""

        def work(task: Any, params: dict[str, Any], name: str) -> Any:
            self.calls.append(name)
            return self.bodies[name](task) if name in self.bodies else {name: True}

        options.setdefault("acks_late", True)
        return self.mailbox.task(stages.step(work), name=name, base=base, bind=True, **options)

    def start(self, *plan: str, task: Any = None, **labels: Any) -> StageRun:
        """Start a run with a stage for each word, and a step for each of its letters."""
        entries = [
            (task or self.task, -number, {"name": name})
            for number, names in enumerate(plan or PLAN)
            for name in names
        ]
        return stages.start(entries, **labels)

    def begin(self, *plan: str, do: Any = None, task: Any = None) -> tuple[StageRun, Message]:
        """Start a run, of a and then b, whose a does something; return it, and a's message."""
        if do is not None:
            self.bodies["a"] = do
        run = self.start(*(plan or "ab"), task=task)
        return run, self.take_one()

    def take(self) -> list[Message]:
        """Return what was sent since the last time."""
        taken = self.mailbox.take()
        self.sent += taken
        return taken

    def take_one(self) -> Message:
        """Return the only message that was sent since the last time."""
        (message,) = self.take()
        return message

    def deliver(self, message: Message) -> Outcome:
        """Run a message here."""
        return self.mailbox.deliver(message)

    def deliver_elsewhere(self, message: Message) -> Outcome:
        """Run a message as another process does, while this one is inside a step."""
        return self.mailbox.deliver_elsewhere(message)

    def deliver_all(self, order: str = "abcdefgh") -> None:
        """Run what was sent, and what that sends, of what waits in the order of their names."""
        waiting = self.take()
        while waiting:
            waiting.sort(key=lambda message: order.find(message.kwargs.get("name", "")))
            self.deliver(waiting.pop(0))
            waiting += self.take()

    def resume(self, run: StageRun) -> None:
        """Let no step fail from now on, and bring a resumed run to its success."""
        self.bodies.clear()
        run.resume()
        self.deliver_all()
        assert statuses(run) == ("succeeded", "s" * run.steps.count())

    @property
    def runs(self) -> Any:
        """The rows of all runs."""
        return StageRun.objects.using(self.alias)

    @property
    def steps(self) -> Any:
        """The rows of all steps."""
        return StageStep.objects.using(self.alias)

    def step(self, name: str) -> Any:
        """Return the row of the only step with this name."""
        return self.steps.get(arguments_text__contains=f'"name": "{name}"')

    def messages(self, name: str) -> Any:
        """Return the row of the message of the only step with this name, as a queryset."""
        return OutboxMessage.objects.using(self.alias).carried(self.step(name).task_id)

    def end_lease(self, name: str) -> None:
        """Let the lease of a step be over, as if its process had died."""
        running = self.messages(name).running()
        assert running.update(due_at=Now() - timedelta(seconds=1))

    def tables(self) -> list[Any]:
        """Return all that the tables hold."""
        models: list[Any] = [StageRun, StageStep, OutboxMessage, DatabaseLock]
        return [list(one.objects.using(self.alias).order_by("pk").values()) for one in models]


def shown(run: StageRun) -> str:
    """Return the first letter of the status of each step, in order."""
    return "".join(status[0] for status in run.steps.values_list("status", flat=True))


def statuses(run: StageRun) -> tuple[str, str]:
    """Return a run's status and the first letter of that of each of its steps, as of now."""
    run.refresh_from_db()
    return run.status, shown(run)


def test_queries_are_few(
    staged: Staged, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes 5 queries, and the one that ends its stage 11, however many steps there are."""
    # Otherwise a slow commit would claim its rows, or leave them to a relay.
    settings.DJANGO_CELERY_SAFE = {**settings.DJANGO_CELERY_SAFE, "OUTBOX_SEND_TIMEOUT": 30}
    monkeypatch.setattr(commit, "GRACE", 60.0)
    more = more_for_claim(staged.alias)
    run, counts = staged.start("abcdefghijkl", "mn"), []
    waiting = staged.take()
    while waiting:
        with CaptureQueriesContext(connections[staged.alias]) as queries:
            assert staged.deliver(waiting.pop(0)).state == "SUCCESS"
        counts.append(sum(not query["sql"].startswith(BRACKETS) for query in queries))
        waiting += staged.take()
    assert set(counts[1:11]) == {5 + 2 * more}
    # The claim of the message, the step, and the lock of the run.
    assert max(counts) <= 11 + 3 * more
    assert len(counts) == run.steps.count()


# Delivered again.


@pytest.mark.sql
def test_deliveries_in_any_order_do_each_step_once(staged: Staged) -> None:
    """Each step is done once, however often and in whatever order messages come."""
    random = Random(1)
    run = staged.start("abc", "de", "f", "gh")
    staged.take()
    while run.status not in stages.Status.STOPPED:
        staged.deliver(random.choice(staged.sent))
        staged.take()
        run.refresh_from_db()
    before = staged.tables()
    again = random.sample(staged.sent * 2, 2 * len(staged.sent))
    assert {staged.deliver(message).state for message in again} == {"IGNORED"}
    assert (shown(run), sorted(staged.calls)) == ("s" * 8, list("abcdefgh"))
    assert staged.tables() == before
    assert (len(staged.sent), staged.take()) == (8, [])


def test_a_process_that_dies_before_it_begins_the_next_stage(staged: Staged) -> None:
    """The step is done; its message that comes again begins the next stage, once."""
    look = "SELECT id FROM django_celery_safe_stagestep"  # whether the stage is complete
    run, message = staged.begin("a", "bc")
    dies = at_statement(staged.alias, look, raising(KeyboardInterrupt()))
    with dies, pytest.raises(KeyboardInterrupt):
        staged.deliver(message)
    assert (shown(run), staged.take()) == ("sww", [])
    staged.end_lease("a")
    assert [staged.deliver(message).state for _ in range(2)] == ["SUCCESS", "IGNORED"]
    assert len(staged.take()) == 2
    assert staged.calls == ["a"]


def end(task: Any, how: str) -> None:
    """Raise an error, ask for a retry, or do nothing."""
    if how == "with an error":
        raise ValueError("no")
    if how == "by a retry":
        raise task.retry(countdown=0)


@pytest.mark.sql
@pytest.mark.parametrize("ends", ["well", "with an error", "by a retry"])
def test_a_stale_holder_changes_nothing(ends: str, staged: Staged) -> None:
    """Its step was taken by the next delivery: it lost its claim, whatever its own end."""

    def lose(task: Any) -> Any:
        del staged.bodies["a"]
        staged.end_lease("a")
        assert staged.deliver_elsewhere(message) == ("SUCCESS", {"a": True})
        before.extend(staged.tables())
        end(task, ends)
        return {"stale": True}

    before: list[Any] = []
    run, message = staged.begin(do=lose)
    with hearing(claim_lost) as lost, hearing(step_failed) as failed:
        state = staged.deliver(message).state
    assert staged.tables() == before
    assert state == ("RETRY" if ends == "by a retry" else "IGNORED")
    assert [event["key"] for event in lost] == [f"{NAME}[{message.id}]"]
    assert failed == []
    staged.deliver_all()
    assert statuses(run) == ("succeeded", "ss")
    assert (run.params, staged.calls) == ({"a": True, "b": True}, ["a", "a", "b"])


@pytest.mark.parametrize("ends", ["well", "with an error", "by a retry"])
def test_a_stale_holder_ends_nothing_that_another_runs(ends: str, staged: Staged) -> None:
    """While the other that took its step still runs, that one alone may end it."""

    def lose(task: Any) -> None:
        staged.messages("a").update(token="another", due_at=Now() + timedelta(seconds=30))
        before.extend(staged.tables())
        end(task, ends)

    before: list[Any] = []
    _, message = staged.begin(do=lose)
    staged.deliver(message)
    assert staged.tables() == before


def test_a_step_that_lost_a_claim_of_its_work_fails(staged: Staged) -> None:
    """The step is still ours, so its end is recorded: the next sweep has nothing to repair."""

    def lose(task: Any) -> None:
        with idempotent("album:7", using=staged.alias) as claim:
            IdempotencyRecord.objects.using(staged.alias).update(token="another")
            claim.ensure()

    run, message = staged.begin(do=lose)
    assert staged.deliver(message).state == "FAILURE"
    assert (shown(run), staged.step("a").error_type) == ("fa", "ClaimLost")


def test_a_message_of_an_old_attempt_does_nothing(staged: Staged) -> None:
    """After resume a step has another message, and the one before is not its own any more."""
    run, old = staged.begin("a", do=refuse)
    staged.deliver(old)
    run.resume()
    del staged.bodies["a"]
    new = staged.take_one()
    before = staged.tables()
    assert staged.deliver(old).state == "IGNORED"
    assert staged.tables() == before
    assert new.id != old.id
    staged.deliver(new)
    assert (*statuses(run), staged.calls) == ("succeeded", "s", ["a", "a"])


# Retries and other ends.


def test_a_retry_that_is_not_raised_does_it(staged: Staged) -> None:
    """The step waits for the message of ``retry(throw=False)``, and the next stage for the step."""

    def retry_once(task: Any) -> Any:
        if task.request.retries == 0:
            task.retry(countdown=500, throw=False)
            return None
        return {"tries": 2}

    run, message = staged.begin(do=retry_once, task=staged.make_task(name="tests.other"))
    staged.deliver(message)
    assert shown(run) == "ww"
    again = staged.take_one()
    assert (again.kwargs["name"], again.headers["retries"]) == ("a", 1)
    # No relay sends the step again before its retry should arrive.
    (message,) = staged.messages("a").listed()
    assert message.due_in_s > 1000
    assert staged.deliver(again) == ("SUCCESS", {"tries": 2})
    staged.deliver_all()
    assert (*statuses(run), staged.calls) == ("succeeded", "ss", ["a", "a", "b"])
    assert run.params["tries"] == 2


def test_no_answer_loses_a_waiting_step(staged: Staged, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database has committed that the step waits, and the answer got lost."""

    def retry(task: Any) -> None:
        task.retry(countdown=500, throw=False)
        lose_commit(staged.alias, monkeypatch)

    run, message = staged.begin("a", do=retry)
    with hearing(claim_lost) as told:
        assert staged.deliver(message).state == "SUCCESS"
    assert (shown(run), told) == ("w", [])


def test_a_step_whose_message_goes_on_elsewhere_waits(staged: Staged) -> None:
    """What stands above it left the message to another run, so a relay sends it again."""
    run, message = staged.begin(do=raising(MessageGoesOn("another does it")))
    assert staged.deliver(message).state == "IGNORED"
    assert (shown(run), staged.messages("a").get().state) == ("ww", "pending")


def give_up(task: Any) -> None:
    """Retry as often as the task may."""
    raise task.retry(countdown=0, exc=ValueError("no"), max_retries=1)


def refuse(task: Any) -> None:
    """Fail."""
    raise ValueError("no")


#: A step's function, its task's options, how often it is called, and the row's final state.
ENDS: Final[dict[str, tuple[Any, dict[str, Any], int, tuple[str, str]]]] = {
    "error": (refuse, {}, 1, ("ValueError", "no")),
    "False": (lambda task: False, {}, 1, ("ReturnedFalse", "it returned False")),
    "retries exhausted": (give_up, {}, 2, ("ValueError", "no")),
    "autoretry exhausted": (
        refuse,
        {"autoretry_for": (ValueError,), "max_retries": 2, "retry_backoff": False},
        3,
        ("ValueError", "no"),
    ),
    "Reject": (raising(Reject("no", requeue=False)), {}, 1, ("Reject", "no")),
    "Ignore": (raising(Ignore("no")), {}, 1, ("Ignore", "no")),
}  # fmt: skip


@pytest.mark.parametrize("end", ENDS)
def test_a_step_fails_once(end: str, staged: Staged) -> None:
    """After its retries it failed, its run with it, and what was not begun is aborted."""
    body, options, calls, (error_type, error) = ENDS[end]
    staged.bodies["b"] = body
    run = staged.start(
        "ab", "c", task=staged.make_task(name="tests.other", default_retry_delay=0, **options)
    )
    with hearing(step_failed) as failed, hearing(run_ended) as ended:
        staged.deliver_all()
        for message in list(staged.sent):
            staged.deliver(message)
    step = staged.step("b")
    assert statuses(run) == ("failed", "sfa")
    assert (staged.calls.count("b"), staged.calls.count("c")) == (calls, 0)
    assert run.error_step == step
    assert step.error_type == error_type
    assert error in step.error
    assert [event["step"] for event in failed] == [step.pk]
    assert [event["run"] for event in ended] == [run.pk]


# A database in trouble.


def trouble(alias: str, begins: str, model: Any, times: int, kind: Any = OperationalError) -> Any:
    """Let the database refuse so many statements about a table; gives those."""
    refuse = raising(kind("the server closed the connection unexpectedly"))
    return at_statement(alias, begins, refuse, about=model._meta.db_table, times=times)


@pytest.mark.parametrize(("begins", "model"), [("", StageStep), ("UPDATE", StageRun)])
@pytest.mark.parametrize("kind", [OperationalError, DataError])
def test_a_step_begins_later_when_the_database_was_in_trouble(
    begins: str, model: Any, kind: Any, staged: Staged
) -> None:
    """With its message, which comes again: it is not failed."""
    run, message = staged.begin("a")
    with trouble(staged.alias, begins, model, 1, kind) as refused:
        state = staged.deliver(message).state
    assert refused
    assert (state, shown(run) in "wr", staged.calls) == ("IGNORED", True, [])
    (row,) = staged.messages("a").listed()
    assert (row.state, row.due_in_s <= 5) == ("pending", True)
    assert staged.deliver(message).state == "SUCCESS"
    assert (*statuses(run), staged.calls) == ("succeeded", "s", ["a"])


@pytest.mark.parametrize(
    ("begins", "model", "times"),
    [
        ("UPDATE", StageStep, 2),
        ("SELECT", StageStep, 1),
        ("UPDATE", StageRun, 1),
        ("INSERT", OutboxMessage, 2),
    ],
)
def test_an_end_is_noted_again_when_the_database_was_away(
    begins: str, model: Any, times: int, staged: Staged
) -> None:
    """The work is done: its end is asked for again, until it is committed."""
    refused: list[list[str]] = []

    def make_trouble(task: Any) -> None:
        refused.append(stack.enter_context(trouble(staged.alias, begins, model, times)))

    run, message = staged.begin(do=make_trouble)
    with ExitStack() as stack:
        assert staged.deliver(message).state == "SUCCESS"
    assert len(refused[0]) == times
    assert len(staged.take()) == 1
    assert (*statuses(run), run.stage, staged.calls) == ("running", "sw", 2, ["a"])


# Steps that end at the same time.

#: Steps of each stage, messages of a stage that come twice, and stages.
STEPS: Final = 8
TWICE: Final = 2
STAGES: Final = 10


def count_begun(staged: Staged, count: int) -> list[tuple[int, ...]]:
    """
    Run so many stages, each by many at once, whose steps end together; return how often each began.

    For each stage the messages that were sent for each of its steps, as the broker has them;
    after one that was begun more or less than once, or was begun early, it ends.
    """
    #: How often the body of each step was called, by what stands outside the tables.
    calls: list[tuple[int, int]] = []
    ending = threading.Barrier(STEPS, timeout=60)
    places = [(stage, number) for stage in range(count) for number in range(STEPS)]

    def work(params: dict[str, Any], stage: int, number: int) -> None:
        calls.append((stage, number))
        ending.wait()

    def deliver(message: Message) -> str:
        staged.mailbox.app.set_current()
        return staged.deliver(message).state

    task = staged.mailbox.task(stages.step(work), name="tests.crowd", base=SafeTask, acks_late=True)
    begun = []
    run = stages.start([(task, -n, {"stage": n, "number": number}) for n, number in places])
    messages = staged.mailbox.take()
    for stage in range(count):
        sent = [(one.kwargs["stage"], one.kwargs["number"]) for one in messages]
        begun.append(tuple(sent.count((stage, number)) for number in range(STEPS)))
        if begun[-1] != (1,) * STEPS or len(sent) != STEPS:
            return begun
        # Some of them come twice.
        runs = [elsewhere(staged.alias, deliver, one) for one in messages + messages[:TWICE]]
        assert {one.result() for one in runs} <= {"SUCCESS", "IGNORED"}
        # A message that met its own step comes back, and has nothing to do.
        messages = [one for one in staged.mailbox.take() if "copy" not in one.ours]
    assert messages == []
    assert sorted(calls) == places
    assert statuses(run) == ("succeeded", "s" * STEPS * count)
    assert run.progress.percent == 100
    return begun


@pytest.mark.sql
def test_a_stage_is_begun_once(staged: Staged) -> None:
    """One of 8 steps that end at once, two of them delivered twice, begins the next stage."""
    with hearing(run_ended) as ends:
        assert count_begun(staged, STAGES) == [(1,) * STEPS] * STAGES
    assert len(ends) == 1
