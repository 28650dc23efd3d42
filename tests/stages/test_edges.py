"""Rare ends of steps and runs: duplicates, deaths, forks, old code, replicas, eager mode."""

import os
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
from celery import Task
from celery.signals import task_unknown
from django.db import connections, router, transaction

from django_celery_safe import SafeTask, WrongTransaction, queries, stages
from django_celery_safe.models import StageRun
from django_celery_safe.signals import task_poisoned
from django_celery_safe.stages.engine import StepFollower
from tests.background import before_its_update, settle
from tests.concurrency.mailbox import Message
from tests.conftest import MakeDatabase
from tests.routing import AllIn, routed_by
from tests.sending.carrying import revoke
from tests.sending.conftest import hearing
from tests.stages.tasks import note
from tests.stages.test_messages import Staged, shown, statuses

# Other deliveries of a message that is being run.


def of_unknown_task(message: Any) -> None:
    """Tell what a worker tells that does not know the task of a message."""
    name = message.headers["task"]
    task_unknown.send(sender=None, message=message, name=name, id=message.id, exc=KeyError(name))


def test_a_worker_that_drops_a_message(staged: Staged) -> None:
    """Its step waits with an error that says why, until it succeeds."""
    run, message = staged.begin("a")
    of_unknown_task(message)
    settle()
    step = run.steps.get()
    assert (step.status, step.error_type) == ("waiting", "NotRegistered")
    assert "does not know the task tests.staged" in step.error
    staged.deliver(message)
    assert statuses(run) == ("succeeded", "s")
    assert run.steps.get().error == ""
    of_unknown_task(message)
    settle()
    assert run.steps.get().error == ""


def test_a_duplicate_that_expires_fails_nothing_that_runs(staged: Staged) -> None:
    """While one delivery runs the step, another may expire."""

    def meet(task: Any) -> None:
        revoke(staged.task, message, expired=True)

    run, message = staged.begin(do=meet)
    assert staged.deliver(message) == ("SUCCESS", None)
    assert statuses(run) == ("running", "sw")


@pytest.mark.parametrize(("expired", "says"), [(True, "expired before"), (False, "was revoked")])
def test_a_message_that_is_refused_fails_the_step_that_waits(
    expired: bool, says: str, staged: Staged
) -> None:
    """No other process runs it, so the run would wait for ever."""
    run = staged.start("a", "b")
    revoke(staged.task, staged.take_one(), expired=expired)
    assert statuses(run) == ("failed", "fa")
    assert says in staged.step("a").error


@pytest.mark.parametrize("gives_back", [False, True])
def test_a_run_that_is_terminated_fails_its_step(gives_back: bool, staged: Staged) -> None:
    """The process that runs it is killed, so that the step fails, even as it is given back."""

    def give_back() -> None:
        (row,) = staged.messages("a")
        assert staged.messages("a").put_back(row.token, timedelta(), "SystemExit: -241")

    def meet(task: Any) -> None:
        with before_its_update(give_back) if gives_back else nullcontext():
            revoke(staged.task, message, terminated=True)

    run, message = staged.begin(do=meet)
    assert staged.deliver(message).state == "IGNORED"  # it lost its claim
    assert statuses(run) == ("failed", "fa")
    assert staged.step("a").error == "The task was revoked."


def test_a_duplicate_that_fails_before_its_claim_fails_nothing_that_runs(staged: Staged) -> None:
    """An error of a delivery that never had the step is none of the one that has it."""
    fails: list[bool] = []

    def before_start(*args: Any) -> None:
        if fails:
            raise OSError("before the function")

    def meet(task: Any) -> None:
        fails.append(True)
        assert staged.deliver_elsewhere(message).state == "IGNORED"

    fussy = staged.make_task(name="tests.fussy", before_start=before_start)
    run, message = staged.begin(do=meet, task=fussy)
    assert staged.deliver(message) == ("SUCCESS", None)
    assert statuses(run) == ("running", "sw")
    # The only delivery of a step that waits fails it.
    assert staged.deliver(staged.take_one()).state == "FAILURE"
    assert statuses(run) == ("failed", "sf")
    assert staged.step("b").error == "before the function"


# Processes that died.


@pytest.mark.parametrize(
    ("deaths", "options", "status"),
    [
        (2, {}, "succeeded"),
        (3, {}, "failed"),
        (1, {"max_deaths": 1, "autoretry_for": (Exception,)}, "failed"),
    ],
)
def test_a_step_that_kills_its_process_fails(
    deaths: int, options: dict[str, Any], status: str, staged: Staged
) -> None:
    """Each delivery that takes it from a dead process counts; after max_deaths it is not run."""
    run, message = staged.begin("a", task=staged.make_task(name="tests.deadly", **options))
    for number in range(deaths):
        begin_and_die(staged, message, f"dead{number}")
    with hearing(task_poisoned) as heard:
        staged.deliver(message)
    assert statuses(run) == (status, status[0])
    step = staged.step("a")
    is_run = status == "succeeded"
    assert (staged.calls, step.error_type) == ((["a"], "") if is_run else ([], "TaskPoisoned"))
    assert [one["task_id"] for one in heard] == ([] if is_run else [message.id])


@pytest.mark.parametrize("db_kind", ["postgres"], indirect=True)
@pytest.mark.parametrize("end", ["well", "with an error"])
def test_a_forked_child_does_not_end_its_parent_s_step(staged: Staged, end: str) -> None:
    """It leaves the function as the parent does, and the step is the parent's alone."""

    def fork(task: Any) -> dict[str, str]:
        child = os.fork()
        if not child:
            if end == "with an error":
                raise ValueError("child")
            return {"a": "child"}
        os.waitpid(child, 0)
        return {"a": str(staged.step("a").status)}

    run, message = staged.begin("a", do=fork)
    before = os.getpid()
    outcome = staged.deliver(message)
    if os.getpid() != before:
        os._exit(0)
    assert outcome == ("SUCCESS", {"a": "running"})
    assert (*statuses(run), run.params) == ("succeeded", "s", {"a": "running"})


def test_a_dead_step_of_an_aborted_run_is_not_run(staged: Staged) -> None:
    """Its message is delivered again after the abort: the step is aborted, too."""
    run, message = staged.begin()
    begin_and_die(staged, message, "dead")
    run.abort()
    assert statuses(run) == ("aborted", "ra")
    assert staged.deliver(message) == ("SUCCESS", None)
    assert (*statuses(run), staged.calls) == ("aborted", "aa", [])
    staged.resume(run)
    assert staged.calls == ["a", "b"]


def begin_and_die(staged: Staged, message: Message, token: str) -> None:
    """Begin a step as a process that dies in it, and whose lease is over."""
    claim = {"attempt": message.ours["attempt"], "token": token, "lease": -1.0, "holder": ""}
    assert queries.fetch(staged.alias, "claim_message", **claim)
    assert StepFollower(message.ours["step"], staged.alias).begin(message.id) == ""


# Code that has changed, or is not loaded.


def test_a_stage_that_can_not_be_begun_fails_the_run(staged: Staged) -> None:
    """Its task takes an argument no more: the run says so, and the step before has succeeded."""
    app = staged.mailbox.app

    def wide(params: dict[str, Any], width: int) -> None:
        """Do nothing."""

    def narrow(params: dict[str, Any]) -> None:
        """Do nothing, of a newer release."""

    name = "tests.later"
    later = staged.mailbox.task(stages.step(wide), name=name, base=SafeTask)
    run = stages.start([(staged.task, 2, {"name": "a"}), (later, 1, {"width": 3})])
    app.tasks.unregister(name)
    staged.mailbox.task(stages.step(narrow), name=name, base=SafeTask)
    assert staged.deliver(staged.take_one()) == ("SUCCESS", {"a": True})
    assert statuses(run) == ("failed", "sa")
    assert run.error.startswith("Stage 2 can't be begun: TypeError")
    assert (run.error_step, staged.step("a").error, staged.take()) == (None, "", [])


def test_a_worker_whose_task_is_no_safe_task_fails_the_step(staged: Staged) -> None:
    """Nothing would end its message: the step fails, and its error says what to write."""
    app = staged.mailbox.app
    name = "tests.unsafe"
    run = staged.start("a", "b", task=staged.make_task(name=name))
    app.tasks.unregister(name)
    staged.make_task(Task, name)
    assert staged.deliver(staged.take_one()).state == "FAILURE"
    assert statuses(run) == ("failed", "fa")
    assert "is no SafeTask on this worker" in staged.step("a").error
    assert not staged.tables()[2]


def test_a_step_that_replaces_itself_fails(staged: Staged) -> None:
    """The other task is not sent: the run would not know its end."""
    run, message = staged.begin(do=lambda task: task.replace(note.si({})))
    staged.deliver(message)
    assert (*statuses(run), staged.take()) == ("failed", "fa", [])


def test_a_step_whose_function_is_not_called_fails(staged: Staged) -> None:
    """What stands above @stages.step swallows the call, which would count as done."""

    class Absent(SafeTask):
        """Calls nothing."""

        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> None:
            """Do nothing."""

    run = staged.start("a", "b", task=staged.make_task(Absent, "tests.absent"))
    staged.deliver(staged.take_one())
    assert (*statuses(run), staged.calls) == ("failed", "fa", [])
    assert "Its function was not called" in staged.step("a").error


class Atomic(SafeTask):
    """Runs in a transaction."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run in a transaction."""
        with transaction.atomic(using=router.db_for_write(StageRun)):
            return super().__call__(*args, **kwargs)


def test_a_step_of_a_class_that_opens_a_transaction(staged: Staged) -> None:
    """Its claim stands outside of that, so that others see it, and it ends after the commit."""
    staged.bodies["a"] = lambda task: {"b": str(staged.deliver_elsewhere(message).state)}
    run, message = staged.begin(task=staged.make_task(Atomic, "tests.atomic"))
    if connections[staged.alias].vendor != "sqlite":
        assert staged.deliver(message) == ("SUCCESS", {"b": "IGNORED"})
    else:
        del staged.bodies["a"]
        assert staged.deliver(message).state == "SUCCESS"
    staged.deliver_all()
    assert statuses(run) == ("succeeded", "ss")


# Several databases.


def test_a_run_does_not_begin_before_a_commit_elsewhere(
    staged: Staged, make_database: MakeDatabase
) -> None:
    """Inside atomic() of another database it is refused, and nothing is written or sent."""
    staged, other = staged, make_database("sqlite-immediate")
    with transaction.atomic(using=other), pytest.raises(WrongTransaction, match=other):
        staged.start()
    assert (staged.tables(), staged.take()) == ([[], [], [], []], [])


def test_a_run_that_was_read_from_a_replica_is_changed_where_runs_are(
    staged: Staged, make_database: MakeDatabase
) -> None:
    """It is up to date after that, and deleted there with its steps."""
    replica = make_database("sqlite-immediate")
    run = staged.start("a", "b")
    with routed_by(AllIn(staged.alias, replica)):
        run._state.db = replica
        assert run.abort() is run
        assert (run.status, shown(run)) == ("aborted", "aa")
        run._state.db = replica
        run.delete()
    assert not staged.steps.exists()
    assert not staged.runs.exists()


# Eagerly.


def test_an_eager_step_does_not_wait_for_a_run(eager: Staged) -> None:
    """The steps of a run that it starts are run after it, so that waiting would never end."""
    inner: list[StageRun] = []

    def start_another(task: Any) -> None:
        inner.append(eager.start("b", "c"))
        with pytest.raises(RuntimeError, match="is waited for inside the task"):
            inner[0].wait(5)

    eager.bodies["a"] = start_another
    run = eager.start("a", "d")
    assert (statuses(run), statuses(inner[0])) == (("succeeded", "ss"),) * 2
    assert sorted(eager.calls) == list("abcd")
    assert run.wait(0).status == "succeeded"
