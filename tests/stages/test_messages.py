"""Messages of steps: delivered once, again, late, and while others run the step."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from functools import cache
from random import Random
from typing import TYPE_CHECKING, Any, Final

import pytest
from celery import Task
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded
from django.db import DataError, OperationalError, connections, transaction
from django.test.utils import CaptureQueriesContext

from django_celery_safe import SafeTask, StepLost, WrongTransaction, stages
from django_celery_safe.databases import Now
from django_celery_safe.delivery import copies
from django_celery_safe.models import DatabaseLock, OutboxMessage, StageRun, StageStep
from django_celery_safe.sending import departure
from django_celery_safe.signals import (
    run_ended,
    run_started,
    stage_started,
    step_failed,
    step_lost,
    step_succeeded,
)
from django_celery_safe.stages.repairs import SETTLING, sweep
from django_celery_safe.stages.step_table import StepTable
from tests.app.models import Person
from tests.concurrency.conftest import mailbox
from tests.concurrency.mailbox import Mailbox, Message, Outcome
from tests.conftest import MakeDatabase
from tests.kinds import KINDS, LATER_MARIADB, more_for_claim, quoted
from tests.routing import runs_in
from tests.sending.conftest import hearing
from tests.stages import broken

if TYPE_CHECKING:
    from pytest_django import Settings

__all__ = ["mailbox", "of_module", "staged", "staged_on_sqlite"]

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

    def start(self, *plan: str, task: Any = None) -> StageRun:
        """Start a run with a stage for each word, and a step for each of its letters."""
        entries = [
            (task or self.task, -number, {"name": name})
            for number, names in enumerate(plan or PLAN)
            for name in names
        ]
        return stages.start(entries)

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
        return self.mailbox.deliver_elsewhere(message, self.alias)

    def deliver_all(self, order: str = "abcdefgh") -> None:
        """Run what was sent, and what that sends, of what waits in the order of their names."""
        waiting = self.take()
        while waiting:
            waiting.sort(key=lambda message: order.index(message.kwargs["name"]))
            self.deliver(waiting.pop(0))
            waiting += self.take()

    @property
    def steps(self) -> Any:
        """The rows of all steps."""
        return StageStep.objects.using(self.alias)

    def step(self, name: str) -> StageStep:
        """Return the row of the only step with this name."""
        step: StageStep = self.steps.get(arguments_text=f'{{"name": "{name}"}}')
        return step

    def end_lease(self, name: str) -> None:
        """Let the lease of a step be over, as if its process had died."""
        self.steps.filter(pk=self.step(name).pk).update(ends_at=Now() - timedelta(seconds=1))

    def tables(self) -> list[Any]:
        """Return all that the tables hold."""
        models: list[Any] = [StageRun, StageStep, OutboxMessage, DatabaseLock]
        return [list(one.objects.using(self.alias).order_by("pk").values()) for one in models]


def shown(run: StageRun) -> str:
    """Return the first letter of the status of each step, in order."""
    return "".join(status[0] for status in run.steps.values_list("status", flat=True))


@pytest.fixture(scope="module")
def of_module(make_module_database: MakeDatabase) -> Callable[[Any], str]:
    """The alias of a module's database of a server, since one for each test takes its time."""
    return cache(make_module_database)


@pytest.fixture(params=KINDS)
def staged(
    request: pytest.FixtureRequest, mailbox: Mailbox, make_database: MakeDatabase
) -> Iterator[Staged]:
    """Runs in one database after the other, which has no others."""
    if request.param in {"postgres", "mariadb"}:
        alias = request.getfixturevalue("of_module")(request.param)
        for model in (StageStep, StageRun, OutboxMessage, DatabaseLock):
            model.objects.using(alias).all()._raw_delete(alias)
    else:
        alias = make_database(request.param)
    with runs_in(alias):
        yield Staged(mailbox, alias)


#: For a test that takes seconds, of which SQLite has the long tier.
postgres_and_later_sqlite = pytest.mark.parametrize(
    "staged",
    ["postgres", pytest.param("sqlite-immediate", marks=pytest.mark.long), LATER_MARIADB],
    indirect=True,
)


@pytest.fixture
def staged_on_sqlite(mailbox: Mailbox, sqlite_immediate_alias: str) -> Iterator[Staged]:
    """Runs in a SQLite file."""
    with runs_in(sqlite_immediate_alias):
        yield Staged(mailbox, sqlite_immediate_alias)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait less for the own step: here its holder never ends meanwhile."""
    monkeypatch.setattr(copies, "OWN_RUN_WAIT", 0.01)


# Delivered again.


@pytest.mark.parametrize("seed", range(3))
def test_deliveries_in_any_order_do_each_step_once(seed: int, staged: Staged) -> None:
    """Each step is done once, however often and in whatever order messages come."""
    random = Random(seed)
    run = staged.start("abc", "de", "f", "gh")
    staged.take()
    while run.status not in stages.Status.STOPPED:
        staged.deliver(random.choice(staged.sent))
        staged.take()
        run.refresh_from_db()
    before = staged.tables()
    again = random.sample(staged.sent * 2, 2 * len(staged.sent))
    assert {staged.deliver(message) for message in again} == {("SUCCESS", None)}
    assert (shown(run), sorted(staged.calls)) == ("s" * 8, list("abcdefgh"))
    assert [step.starts for step in run.steps] == [1] * 8
    assert staged.tables() == before
    assert (len(staged.sent), staged.take()) == (8, [])


@pytest.mark.parametrize("found_by", ["its message", "a sweep"])
def test_a_process_that_dies_before_it_begins_the_next_stage(found_by: str, staged: Staged) -> None:
    """The step is done; its message that comes again begins the next stage, once, or a sweep."""
    run = staged.start("a", "bc")
    message = staged.take_one()
    with raising_at_the_look(staged, Death), pytest.raises(Death):
        staged.deliver(message)
    assert (shown(run), staged.take()) == ("sww", [])
    if found_by == "its message":
        assert [staged.deliver(message) for _ in range(2)] == [("SUCCESS", None)] * 2
    else:
        sweep_later(staged)
    assert len(staged.take()) == 2
    assert staged.calls == ["a"]


def test_a_database_that_goes_away_before_the_next_stage_begins(
    staged: Staged, caplog: pytest.LogCaptureFixture
) -> None:
    """The step has succeeded; a warning names its stage, and a sweep begins the next one."""
    run = staged.start("a", "b")
    with raising_at_the_look(staged, DataError):
        assert staged.deliver(staged.take_one()) == ("SUCCESS", {"a": True})
    assert f"stage 1 of run {run.pk} is complete" in caplog.text
    assert (shown(run), staged.take()) == ("sw", [])
    sweep_later(staged)
    assert len(staged.take()) == 1


class Death(BaseException):
    """The end of a process, as far as one that goes on can have it."""


@contextmanager
def raising_at_the_look(staged: Staged, error: type[BaseException]) -> Iterator[None]:
    """Raise when a step that has succeeded asks whether its stage is complete."""
    look = quoted(staged.alias, 'SELECT "django_celery_safe_stagestep"."id" FROM')

    def refuse(execute: Any, sql: str, *args: Any) -> Any:
        if sql.startswith(look):
            raise error("at the look")
        return execute(sql, *args)

    with connections[staged.alias].execute_wrapper(refuse):
        yield


def sweep_later(staged: Staged) -> None:
    """Sweep, as a relay does after a while: it finds the run once."""
    staged.steps.filter(stage=1).update(ended_at=Now() - 2 * SETTLING)
    assert [len(sweep(StepTable(staged.alias))) for _ in range(2)] == [1, 0]


def test_a_message_of_a_run_that_is_gone_does_nothing(staged: Staged) -> None:
    """Messages of a run that was deleted or pruned begin nothing."""
    run = staged.start("ab")
    first, second = staged.take()
    staged.deliver(first)
    run.delete()
    assert [staged.deliver(message) for message in (first, second)] == [("SUCCESS", None)] * 2
    assert staged.calls == ["a"]
    assert not staged.steps.exists()


@pytest.mark.parametrize("autoretry", [{}, {"autoretry_for": (Exception,)}])
@pytest.mark.parametrize("base", [Task, SafeTask])
def test_a_message_comes_back_while_its_step_runs(
    base: Any, autoretry: dict[str, Any], staged: Staged
) -> None:
    """Under a live lease one copy comes back after it, however often the message is delivered."""
    run = staged.start("a", task=staged.make_task(base, "tests.other", **autoretry))
    message = staged.take_one()
    states: list[str] = []

    def meet(task: Any) -> None:
        states.extend(staged.deliver_elsewhere(message).state for _ in range(3))

    staged.bodies["a"] = meet
    assert staged.deliver(message).state == "SUCCESS"
    assert (states, staged.calls) == (["IGNORED"] * 3, ["a"])
    copy = staged.take_one()
    assert (copy.id, copy.headers["retries"]) == (message.id, 0)
    assert 25 < copy.delay <= 30
    assert staged.deliver(copy) == ("SUCCESS", None)
    run.refresh_from_db()
    assert (run.status, staged.calls, staged.step("a").starts) == ("succeeded", ["a"], 1)


def test_a_copy_runs_the_step_whose_process_died(staged: Staged) -> None:
    """Where the one that was met never ends, its message's copy does the work after the lease."""
    run = staged.start("a", "b")
    message = staged.take_one()
    # The row as a process leaves it that dies in the step.
    ends_at = Now() + timedelta(seconds=30)
    staged.steps.filter(stage=1).update(status="running", token="dead", ends_at=ends_at)
    assert staged.deliver(message).state == "IGNORED"
    copy = staged.take_one()
    staged.end_lease("a")
    assert staged.deliver(copy) == ("SUCCESS", {"a": True})
    assert staged.deliver(message) == ("SUCCESS", None)
    staged.deliver_all()
    run.refresh_from_db()
    assert (run.status, staged.calls) == ("succeeded", ["a", "b"])
    assert not DatabaseLock.objects.using(staged.alias).exists()


@pytest.mark.parametrize("ends", ["well", "with an error", "with False", "by a retry"])
def test_a_stale_holder_changes_nothing(ends: str, staged: Staged) -> None:
    """Its step was taken by the next delivery: it gets StepLost, whatever its own end."""

    def lose(task: Any) -> Any:
        del staged.bodies["a"]
        staged.end_lease("a")
        assert staged.deliver_elsewhere(message) == ("SUCCESS", {"a": True})
        before.extend(staged.tables())
        match ends:
            case "with an error":
                raise ValueError("stale")
            case "by a retry":
                raise task.retry(countdown=0)
        return {"stale": True} if ends == "well" else False

    before: list[Any] = []
    staged.bodies["a"] = lose
    run = staged.start("a", "b")
    message = staged.take_one()
    with hearing(step_lost) as lost, hearing(step_failed) as failed:
        state, error = staged.deliver(message)
    assert staged.tables() == before
    if ends in ("well", "with False"):
        assert (state, type(error)) == ("FAILURE", StepLost)
        assert (error.run, error.step) == (f"run {run.pk}", f"{NAME}[{message.id}]")
        assert [event["step"] for event in lost] == [staged.step("a").pk]
    assert failed == []
    staged.deliver_all()
    run.refresh_from_db()
    assert (run.status, run.params) == ("succeeded", {"a": True, "b": True})
    assert (staged.calls, staged.step("a").starts) == (["a", "a", "b"], 2)


@pytest.mark.parametrize("result", [None, False])
def test_a_stale_holder_ends_nothing_that_another_runs(result: Any, staged: Staged) -> None:
    """While the other that took its step still runs, that one alone may end it."""

    def lose(task: Any) -> Any:
        ends_at = Now() + timedelta(seconds=30)
        staged.steps.filter(stage=1).update(token="another", ends_at=ends_at)
        before.extend(staged.tables())
        return result

    before: list[Any] = []
    staged.bodies["a"] = lose
    staged.start("a", "b")
    state, error = staged.deliver(staged.take_one())
    assert (state, type(error)) == ("FAILURE", StepLost)
    assert staged.tables() == before


def test_a_holder_whose_lease_is_over_may_still_end(staged: Staged) -> None:
    """The work of a late step counts, as long as no other process has begun it."""

    def sleep(task: Any) -> None:
        staged.end_lease("a")

    staged.bodies["a"] = sleep
    run = staged.start("a")
    staged.deliver_all()
    run.refresh_from_db()
    assert (run.status, shown(run)) == ("succeeded", "s")


def test_a_message_of_an_old_attempt_does_nothing(staged: Staged) -> None:
    """After resume a step has another message, and the one before is not its own any more."""

    def fail(task: Any) -> None:
        raise ValueError("no")

    staged.bodies["a"] = fail
    run = staged.start("a")
    old = staged.take_one()
    staged.deliver(old)
    run.refresh_from_db()
    run.resume()
    del staged.bodies["a"]
    new = staged.take_one()
    before = staged.tables()
    assert staged.deliver(old) == ("SUCCESS", None)
    assert staged.tables() == before
    assert new.id != old.id
    staged.deliver(new)
    run.refresh_from_db()
    assert (run.status, staged.calls) == ("succeeded", ["a", "a"])


# Retries and other ends.


@pytest.mark.parametrize("base", [Task, SafeTask])
def test_a_retry_that_is_not_raised_does_it(base: Any, staged: Staged) -> None:
    """The step waits for the message of ``retry(throw=False)``, and the next stage for the step."""

    def retry_once(task: Any) -> Any:
        if task.request.retries == 0:
            task.retry(countdown=3600, throw=False)
            return None
        return {"tries": 2}

    staged.bodies["a"] = retry_once
    run = staged.start("a", "b", task=staged.make_task(base, "tests.other"))
    staged.deliver(staged.take_one())
    assert shown(run) == "ww"
    again = staged.take_one()
    assert (again.kwargs["name"], again.headers["retries"]) == ("a", 1)
    # No sweep sends the step again before its retry should arrive, if it is a SafeTask.
    due_at = staged.step("a").due_at
    assert due_at is not None
    assert base is Task or due_at - datetime.now(UTC) > timedelta(minutes=50)
    assert staged.deliver(again) == ("SUCCESS", {"tries": 2})
    staged.deliver_all()
    run.refresh_from_db()
    assert (run.status, run.params["tries"]) == ("succeeded", 2)
    assert staged.calls == ["a", "a", "b"]


def test_a_step_that_waits_for_its_retry_is_not_lost_with_an_answer(
    staged: Staged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database has committed that the step waits, and the answer got lost."""

    def retry(task: Any) -> None:
        task.retry(countdown=3600, throw=False)
        connection: Any = connections[staged.alias]
        commit = connection._commit

        def lose_answer() -> None:
            commit()
            monkeypatch.undo()
            raise OperationalError("the answer got lost")

        monkeypatch.setattr(connection, "_commit", lose_answer)

    staged.bodies["a"] = retry
    run = staged.start("a")
    with hearing(step_lost) as told:
        assert staged.deliver(staged.take_one()).state == "SUCCESS"
    assert (shown(run), told) == ("w", [])


@pytest.mark.parametrize("left", ["atomic()", "autocommit off"])
@pytest.mark.parametrize("ends", ["well", "with an error"])
def test_a_step_that_leaves_a_transaction_open_fails(
    left: str, ends: str, staged_on_sqlite: Staged
) -> None:
    """It is rolled back, and the run stops: nobody does the step again, as after a death."""
    staged = staged_on_sqlite

    def leave_open(task: Any) -> None:
        if left == "atomic()":
            transaction.atomic(using=staged.alias).__enter__()
        else:
            transaction.set_autocommit(False, using=staged.alias)
        Person.everyone.using(staged.alias).create(pk=1)
        if ends == "with an error":
            raise WrongTransaction("The step's own")

    staged.bodies["a"] = leave_open
    run = staged.start("a", "b")
    state, error = staged.deliver(staged.take_one())
    assert (state, type(error)) == ("FAILURE", WrongTransaction)
    run.refresh_from_db()
    assert (run.status, shown(run)) == ("failed", "fa")
    assert not Person.everyone.using(staged.alias).exists()


def test_a_retry_does_it(staged: Staged) -> None:
    """Between retries the step waits, with its error; the run goes on at the last one."""

    def retry_twice(task: Any) -> None:
        if task.request.retries < 2:
            raise task.retry(countdown=60, exc=ConnectionError("refused"))

    staged.bodies["a"] = retry_twice
    run = staged.start("a", "b")
    message = staged.take_one()
    with hearing(step_failed, stage_started) as heard:
        for retries in (1, 2):
            assert staged.deliver(message).state == "RETRY"
            message = staged.take_one()
            step = staged.step("a")
            assert (step.status, message.headers["retries"]) == ("waiting", retries)
            assert step.due_at is not None
        assert heard == []
    assert staged.deliver(message).state == "SUCCESS"
    staged.deliver_all()
    run.refresh_from_db()
    assert (run.status, staged.calls) == ("succeeded", ["a", "a", "a", "b"])
    assert (staged.step("a").starts, staged.step("a").error) == (3, "")


def give_up(task: Any) -> None:
    """Retry as often as the task may."""
    raise task.retry(countdown=0, exc=ValueError("no"), max_retries=1)


def refuse(task: Any) -> None:
    """Fail."""
    raise ValueError("no")


def reject(task: Any) -> None:
    """Send the message away."""
    raise Reject("no", requeue=False)


def ignore(task: Any) -> None:
    """End without a result."""
    raise Ignore("no")


def take_long(task: Any) -> None:
    """Reach the soft time limit."""
    raise SoftTimeLimitExceeded


class Unspeakable(Exception):
    """An error whose text is an error."""

    def __str__(self) -> str:
        raise RuntimeError


def say_nothing(task: Any) -> None:
    """Raise it."""
    raise Unspeakable


#: A step's function, its task's options, how often it is called, and the row's final state.
ENDS: Final[dict[str, tuple[Any, dict[str, Any], int, tuple[str, str]]]] = {
    "error": (refuse, {}, 1, ("ValueError", "no")),
    "False": (lambda task: False, {}, 1, ("ReturnedFalse", "it returned False")),
    "(False, params)": (
        lambda task: (False, {"a": 1}), {}, 1, ("ReturnedFalse", "it returned False"),
    ),
    "nonsense": (lambda task: 7, {}, 1, ("InvalidResult", "it is 7")),
    "retries exhausted": (give_up, {}, 2, ("ValueError", "no")),
    "autoretry exhausted": (
        refuse,
        {"autoretry_for": (ValueError,), "max_retries": 2, "retry_backoff": False},
        3,
        ("ValueError", "no"),
    ),
    "autoretry for others": (refuse, {"autoretry_for": (KeyError,)}, 1, ("ValueError", "no")),
    "autoretry of False": (
        lambda task: False, {"autoretry_for": (Exception,)}, 1,
        ("ReturnedFalse", "it returned False"),
    ),
    "Reject": (reject, {}, 1, ("Reject", "no")),
    "Ignore": (ignore, {}, 1, ("Ignore", "no")),
    "soft time limit": (take_long, {}, 1, ("SoftTimeLimitExceeded", "")),
    "throws": (refuse, {"throws": (ValueError,)}, 1, ("ValueError", "no")),
    "an error without words": (say_nothing, {}, 1, ("Unspeakable", "")),
}  # fmt: skip


@pytest.mark.parametrize("base", [Task, SafeTask])
@pytest.mark.parametrize("end", ENDS)
def test_a_step_fails_once(end: str, base: Any, staged_on_sqlite: Staged) -> None:
    """After its retries it failed, its run with it, and what was not begun is aborted."""
    staged = staged_on_sqlite
    body, options, calls, (error_type, error) = ENDS[end]
    staged.bodies["b"] = body
    run = staged.start(
        "ab", "c", task=staged.make_task(base, "tests.other", default_retry_delay=0, **options)
    )
    with hearing(step_failed) as failed, hearing(run_ended) as ended:
        staged.deliver_all()
        for message in list(staged.sent):
            staged.deliver(message)
    run.refresh_from_db()
    step = staged.step("b")
    assert (run.status, shown(run)) == ("failed", "sfa")
    assert (staged.calls.count("b"), staged.calls.count("c")) == (calls, 0)
    assert run.error_step == step
    assert step.error_type == error_type
    assert error in step.error
    ((event,), (end_event,)) = failed, ended
    assert (event["run"], event["step"], event["task"]) == (run.pk, step.pk, step.task)
    assert event["task_id"] == step.task_id
    assert error_type in event["error"]
    assert (end_event["run"], end_event["status"]) == (run.pk, "failed")


def test_a_message_that_is_put_back_comes_again(staged_on_sqlite: Staged) -> None:
    """A Reject that requeues is no failure: the broker delivers the message again."""
    staged = staged_on_sqlite

    def put_back(task: Any) -> None:
        del staged.bodies["a"]
        raise Reject("busy", requeue=True)

    staged.bodies["a"] = put_back
    run = staged.start("a")
    message = staged.take_one()
    staged.deliver(message)
    assert staged.step("a").status == "waiting"
    staged.deliver(message)
    run.refresh_from_db()
    assert (run.status, staged.calls) == ("succeeded", ["a", "a"])


# A database in trouble.


class Trouble:
    """
    Lets the database refuse statements.

    Args:
        begins: How those statements begin.
        table: What stands in them.
        times: How many of them.
    """

    def __init__(self, alias: str, begins: str, table: str, times: int) -> None:
        self.alias, self.begins, self.table, self.times = alias, begins, table, times
        #: The statements that were refused.
        self.refused: list[str] = []

    def __enter__(self) -> "Trouble":
        self._wrapper = connections[self.alias].execute_wrapper(self._run)
        self._wrapper.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._wrapper.__exit__(*error)

    def _run(self, run: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.startswith(self.begins) and self.table in sql and len(self.refused) < self.times:
            self.refused.append(sql)
            raise OperationalError("the server closed the connection unexpectedly")
        return run(sql, params, many, context)


@pytest.mark.parametrize(
    ("begins", "model"),
    [("", StageStep), ("", StageRun), ("UPDATE", StageRun)],
)
def test_a_message_comes_back_when_the_database_is_away(
    begins: str, model: Any, staged: Staged
) -> None:
    """At the begin nothing was done yet: the step is not failed, and its message comes again."""
    run = staged.start("a")
    message = staged.take_one()
    with Trouble(staged.alias, begins, model._meta.db_table, 2) as trouble:
        assert staged.deliver(message).state == "RETRY"
    assert (len(trouble.refused), staged.calls) == (2, [])
    again = staged.take_one()
    assert (again.id, again.headers["retries"]) == (message.id, 0)
    assert 0 < again.delay <= 5
    # A claim whose answer got lost is one until its lease is over.
    if staged.step("a").status == "running":
        staged.end_lease("a")
    assert staged.deliver(again) == ("SUCCESS", {"a": True})
    run.refresh_from_db()
    assert (run.status, staged.calls) == ("succeeded", ["a"])


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize(
    ("begins", "model"),
    [("UPDATE", StageStep), ("SELECT", StageStep), ("UPDATE", StageRun), ("INSERT", OutboxMessage)],
)
def test_an_end_is_noted_again_when_the_database_was_away(
    begins: str, model: Any, times: int, staged: Staged
) -> None:
    """The work is done: its end is asked for again, and told once, when it is committed."""
    troubles: list[Trouble] = []

    def make_trouble(task: Any) -> None:
        troubles.append(Trouble(staged.alias, begins, model._meta.db_table, times).__enter__())

    staged.bodies["a"] = make_trouble
    run = staged.start("a", "b")
    message = staged.take_one()
    with hearing(step_succeeded, stage_started, step_failed, run_ended) as heard:
        assert staged.deliver(message).state == "SUCCESS"
        troubles[0].__exit__(None, None, None)
        assert len(troubles[0].refused) == times
        assert [event["signal"] for event in heard] == [step_succeeded, stage_started]
    assert len(staged.take()) == 1
    run.refresh_from_db()
    assert (run.stage, shown(run), staged.calls) == (2, "sw", ["a"])


# Signals.


def test_each_event_is_told_once(staged: Staged) -> None:
    """A run tells of its start, its stages, its steps and its end, once each, in order."""
    with hearing(run_started, stage_started, step_succeeded, step_failed, run_ended) as heard:
        run = staged.start("ab", "c")
        staged.deliver_all()
        for message in list(staged.sent):
            staged.deliver(message)
    assert [event["signal"] for event in heard] == [
        run_started, stage_started, step_succeeded, step_succeeded, stage_started,
        step_succeeded, run_ended,
    ]  # fmt: skip
    assert {event["run"] for event in heard} == {run.pk}
    assert heard[0]["stages"] == 2
    begun = [event for event in heard if event["signal"] is stage_started]
    assert [(event["stage"], event["steps"]) for event in begun] == [(1, 2), (2, 1)]
    ended = [event for event in heard if event["signal"] is step_succeeded]
    assert [event["step"] for event in ended] == [staged.step(name).pk for name in "abc"]
    assert [event["task_id"] for event in ended] == [message.id for message in staged.sent]
    assert heard[-1]["status"] == "succeeded"


@pytest.mark.parametrize("signal", [step_succeeded, stage_started, step_failed, run_ended])
def test_a_receiver_that_raises_harms_nothing(signal: Any, staged_on_sqlite: Staged) -> None:
    """Its error is logged; the run goes on."""
    staged = staged_on_sqlite

    def explode(**event: Any) -> None:
        raise RuntimeError("a receiver")

    staged.bodies["b"] = refuse
    signal.connect(explode)
    try:
        run = staged.start("a", "b")
        staged.deliver_all()
    finally:
        signal.disconnect(explode)
    run.refresh_from_db()
    assert (run.status, shown(run)) == ("failed", "sf")


# Queries.

#: Most queries of a step, whatever its run. It takes 9 to end a stage and begin the next:
#: claim the step; mark it; look at the stage; lock the run, read the next steps, change the
#: run, write their messages (100 by one INSERT); look whether those were committed; and, when
#: they are sent, delete them.
MOST_QUERIES: Final = 9
#: Statements that open and close transactions.
BRACKETS: Final = ("BEGIN", "COMMIT", "SAVEPOINT", "RELEASE")


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param((2, 2), id="2x2"),
        pytest.param((8, 8, 8, 8, 8), id="5x8"),
        pytest.param((100, 100), id="2x100", marks=pytest.mark.long),
    ],
)
def test_queries_are_few(
    plan: tuple[int, ...],
    staged: Staged,
    settings: "Settings",
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step takes at most 9 queries, the one that ends its stage included, whatever the size."""
    # Otherwise a slow commit would claim its rows, or leave them to a relay.
    settings.DJANGO_CELERY_SAFE = {**settings.DJANGO_CELERY_SAFE, "OUTBOX_SEND_TIMEOUT": 30}
    monkeypatch.setattr(departure, "GRACE", 60.0)
    counts = count_queries(staged, plan)
    assert len(counts) == sum(plan)
    # The claim of the step, and the lock of the run.
    assert max(counts) <= MOST_QUERIES + 2 * more_for_claim(staged.alias)
    assert min(counts) == 3 + more_for_claim(staged.alias)
    # The steps between the first of a stage and its last have the lowest count.
    assert len(set(counts[1 : plan[0] - 1])) <= 1


def test_queries_of_a_stage_of_one_are_few(staged: Staged) -> None:
    """The step that begins its run and ends a stage, both, takes one more."""
    most = MOST_QUERIES + 1 + 2 * more_for_claim(staged.alias)
    assert max(count_queries(staged, (1, 1))) <= most


def count_queries(staged: Staged, plan: tuple[int, ...]) -> list[int]:
    """Run a plan with so many steps in each stage; return how many queries each step took."""
    entries = [
        (staged.task, -stage, {"name": f"{stage}.{number}"})
        for stage, size in enumerate(plan)
        for number in range(size)
    ]
    run = stages.start(entries)
    counts = []
    waiting = staged.take()
    while waiting:
        with CaptureQueriesContext(connections[staged.alias]) as queries:
            assert staged.deliver(waiting.pop(0)).state == "SUCCESS"
        counts.append(sum(not query["sql"].startswith(BRACKETS) for query in queries))
        waiting += staged.take()
    run.refresh_from_db()
    assert run.status == "succeeded"
    return counts


# Steps that end at the same time.

#: Steps of each stage, messages of a stage that come twice, and stages.
STEPS: Final = 8
TWICE: Final = 2
STAGES: Final = 50


class Crowd:
    """
    Runs the messages of a stage at the same time, so that its steps end together.

    Args:
        staged: Where the runs are.
    """

    def __init__(self, staged: Staged) -> None:
        self.staged = staged
        self.size = STEPS + TWICE
        #: How often the body of each step was called, by what stands outside the tables.
        self.calls: list[tuple[int, int]] = []
        self.ending = threading.Barrier(STEPS, timeout=60)
        self.all_there = threading.Barrier(self.size, timeout=60)
        self.pool = ThreadPoolExecutor(self.size, initializer=staged.mailbox.app.set_current)

        def work(params: dict[str, Any], stage: int, number: int) -> None:
            self.calls.append((stage, number))
            self.ending.wait()

        self.task = staged.mailbox.task(
            stages.step(work), name="tests.crowd", base=SafeTask, acks_late=True
        )

    def start(self, count: int) -> StageRun:
        """Start a run of so many stages."""
        return stages.start(
            [
                (self.task, -stage, {"stage": stage, "number": number})
                for stage in range(count)
                for number in range(STEPS)
            ]
        )

    def run_stage(self, messages: list[Message]) -> list[Message]:
        """Run the messages of a stage, some of them twice; return what that began."""
        both = messages + messages[:TWICE]
        for outcome in self.pool.map(self.staged.deliver, both):
            assert outcome.state in ("SUCCESS", "IGNORED")
        # A message that met its own step comes back, and has nothing to do.
        return [one for one in self.staged.mailbox.take() if "claim_copy" not in one.ours]

    def close(self) -> None:
        """End the threads and their connections."""

        def close() -> None:
            self.all_there.wait()
            connections[self.staged.alias].close()

        for closed in [self.pool.submit(close) for _ in range(self.size)]:
            closed.result()
        self.pool.shutdown()


def count_begun(staged: Staged, count: int) -> list[tuple[int, ...]]:
    """
    Run so many stages, each by many at once; return how often each was begun.

    For each stage the messages that were sent for each of its steps, as the broker has them;
    after one that was begun more or less than once, or was begun early, it ends.
    """
    begun = []
    with closing(Crowd(staged)) as crowd:
        run = crowd.start(count)
        messages = staged.mailbox.take()
        for stage in range(count):
            sent = [(one.kwargs["stage"], one.kwargs["number"]) for one in messages]
            begun.append(tuple(sent.count((stage, number)) for number in range(STEPS)))
            if begun[-1] != (1,) * STEPS or len(sent) != STEPS:
                return begun
            messages = crowd.run_stage(messages)
        assert messages == []
        assert sorted(crowd.calls) == [(n, m) for n in range(count) for m in range(STEPS)]
    run.refresh_from_db()
    assert (run.status, run.progress.percent) == ("succeeded", 100)
    return begun


@postgres_and_later_sqlite
def test_a_stage_is_begun_once(staged: Staged) -> None:
    """One of 8 steps that end at once, two of them delivered twice, begins the next stage."""
    with hearing(stage_started, run_ended) as heard:
        assert count_begun(staged, STAGES) == [(1,) * STEPS] * STAGES
    assert [event.get("stage") for event in heard] == [*range(1, STAGES + 1), None]


@postgres_and_later_sqlite
@pytest.mark.parametrize("engine", broken.ENGINES)
def test_a_broken_engine_is_noticed(engine: str, staged: Staged) -> None:
    """A counter, and a count after the mark, begin a stage twice or never, which the check sees."""
    with broken.ENGINES[engine]():
        # As many as it may take; the first that is wrong ends it.
        begun = count_begun(staged, 4 * STAGES)
    assert begun[-1] != (1,) * STEPS
