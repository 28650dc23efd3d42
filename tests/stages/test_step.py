"""``@stages.step`` and ``stages.start`` as a project's own code sees them."""

import inspect
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from celery import Task, current_task
from django.db import connections, transaction
from django.test import TestCase

from django_celery_safe import (
    ConfigurationError,
    IllegalTransition,
    InvalidResult,
    SafeTask,
    WrongTransaction,
    single_instance,
    stages,
)
from django_celery_safe.databases import Now
from django_celery_safe.models import OutboxMessage, StageRun, StageStep
from django_celery_safe.signals import run_started, stage_started
from tests.concurrency.conftest import mailbox
from tests.concurrency.mailbox import Mailbox
from tests.routing import runs_in
from tests.sending.conftest import hearing
from tests.stages.tasks import add, crash, note, plain
from tests.stages.test_messages import (
    Staged,
    of_module,
    refuse,
    shown,
    staged,
    staged_on_sqlite,
)
from tests.testcases import run_testcase

__all__ = ["mailbox", "of_module", "staged", "staged_on_sqlite"]


@pytest.fixture
def stage(staged_on_sqlite: Staged) -> Staged:
    """Runs in a SQLite file."""
    return staged_on_sqlite


def do(stage: Staged, *plan: Any, params: Any = None) -> StageRun:
    """Run a plan to its end."""
    run = stages.start(plan, params)
    waiting = stage.take()
    while waiting:
        stage.deliver(waiting.pop(0))
        waiting += stage.take()
    run.refresh_from_db()
    return run


# Results of steps.


@pytest.mark.parametrize(
    ("result", "params"),
    [
        (None, {}),
        (True, {}),
        ({}, {}),
        ({"width": 640}, {"width": 640}),
        ((True, None), {}),
        ((True, {"width": 640}), {"width": 640}),
        ((True, {}), {}),
    ],
)
@pytest.mark.parametrize("base", [Task, SafeTask])
def test_what_says_that_it_succeeded(
    result: Any, params: dict[str, Any], base: Any, stage: Staged
) -> None:
    """A dict, None, True, or True and a dict; the task's own result is what was returned."""
    task = stage.mailbox.task(stages.step(lambda_returning(result)), name="tests.ok", base=base)
    run = stages.start([(task, 1)])
    assert stage.deliver(stage.take_one()) == ("SUCCESS", result)
    run.refresh_from_db()
    assert (run.status, run.params) == ("succeeded", params)


@pytest.mark.parametrize("result", [False, (False, None), (False, {"width": 640})])
def test_what_says_that_it_failed(result: Any, stage: Staged) -> None:
    """False, also with a dict, which nobody gets; the task itself has succeeded."""
    task = stage.mailbox.task(stages.step(lambda_returning(result)), name="tests.no")
    run = stages.start([(task, 2), (note, 1)])
    assert stage.deliver(stage.take_one()) == ("SUCCESS", result)
    run.refresh_from_db()
    assert (run.status, shown(run), run.params) == ("failed", "fa", {})
    assert run.error_step is not None
    assert (run.error_step.error_type, run.error_step.error) == (
        "ReturnedFalse",
        "it returned False",
    )


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (7, "it is 7"),
        (0, "it is 0"),
        (1, "it is 1"),
        ("", "it is ''"),
        ([], "it is []"),
        ((), "it is ()"),
        ((True,), "it is (True,)"),
        ((1, {}), "it is (1, {})"),
        (({}, True), "it is ({}, True)"),
        ((True, [1]), "its params are [1]"),
        ((False, 7), "its params are 7"),
        ({1: 2}, "its params are {1: 2}"),
        ({"file": object()}, "JSON can't take it"),
        ({"ratio": float("nan")}, "JSON can't take it"),
        ((True, {"ratio": float("inf")}), "JSON can't take it"),
        ({"text": "x" * 65536}, "it is 65,548 characters of JSON, of 65,536 at most"),
    ],
)
def test_what_says_nothing(result: Any, says: str, stage: Staged) -> None:
    """Anything else fails the step, and the error says what could be returned."""
    task = stage.mailbox.task(stages.step(lambda_returning(result)), name="tests.what")
    run = stages.start([(task, 1)])
    state, error = stage.deliver(stage.take_one())
    assert (state, type(error)) == ("FAILURE", InvalidResult)
    assert error.task == "tests.what"
    assert says in str(error)
    run.refresh_from_db()
    assert run.error_step is not None
    assert run.error_step.error_type == "InvalidResult"
    assert says in run.error_step.error


def lambda_returning(result: Any) -> Any:
    """Return a function for a step that returns this."""

    def work(params: dict[str, Any]) -> Any:
        return result

    return work


# Arguments of steps.


@pytest.mark.parametrize("bind", [False, True])
def test_run_and_step_are_given_by_name(bind: bool, stage: Staged) -> None:
    """A step that names them gets the current rows; other steps don't."""
    seen: list[Any] = []

    def unbound(params: dict[str, Any], run: Any, step: Any, size: int = 1) -> None:
        seen.append((params, run, step, size, run.is_aborted(), run.progress.done))

    def bound(self: Any, params: dict[str, Any], *, step: Any, run: Any, size: int = 1) -> None:
        assert self.request.id == current_task.request.id == step.task_id
        unbound(params, run, step, size)

    task = stage.mailbox.task(stages.step(bound if bind else unbound), bind=bind, name="tests.rows")
    run = do(stage, (note, 2), (task, 1, {"size": 640}), params={"album": 7})
    ((params, its_run, its_step, size, aborted, done),) = seen
    assert (its_run, its_step) == (run, run.steps.last())
    assert (its_run.status, its_step.status, its_step.starts) == ("running", "running", 1)
    assert (params, size) == ({"album": 7, "note": True}, 640)
    assert (aborted, done) == (False, 1)


@pytest.mark.parametrize("asks", ["run", "step"])
def test_one_of_them_is_enough(asks: str, stage: Staged) -> None:
    """Asked for one, the other is not given."""
    seen: list[Any] = []

    def of_run(params: dict[str, Any], run: Any) -> None:
        seen.append(run)

    def of_step(params: dict[str, Any], step: Any) -> None:
        seen.append(step)

    task = stage.mailbox.task(stages.step(of_run if asks == "run" else of_step), name="tests.one")
    run = do(stage, (task, 1))
    assert seen == [run if asks == "run" else run.steps.get()]


def test_each_step_has_params_of_its_own(stage: Staged) -> None:
    """A step's changes to its params stay with it; only its return value goes on."""
    seen: list[Any] = []

    def change(params: dict[str, Any]) -> None:
        seen.append(dict(params, ids=list(params["ids"])))
        params["ids"].append(2)
        params["more"] = True

    task = stage.mailbox.task(stages.step(change), name="tests.change")
    run = do(stage, (task, 2), (task, 2), (task, 1), params={"ids": [1]})
    assert seen == [{"ids": [1]}] * 3
    assert run.params == {"ids": [1]}


def test_the_signature_says_what_is_given() -> None:
    """Celery's check of arguments, and readers, see the function without run and step."""

    @stages.step
    def work(params: dict[str, Any], run: Any, size: int = 1, *, step: Any) -> None:
        """Do it."""

    assert list(inspect.signature(work).parameters) == ["params", "size"]
    assert (work.__name__, work.__doc__) == ("work", "Do it.")


# Called by hand.


def call(task: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the task."""
    return task(*args, **kwargs)


def run_it(task: Any, *args: Any, **kwargs: Any) -> Any:
    """Call what the task runs."""
    return task.run(*args, **kwargs)


def apply(task: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the task here."""
    return task.apply(args, kwargs).get()


@pytest.mark.parametrize("way", [call, run_it, apply])
@pytest.mark.parametrize("base", [Task, SafeTask])
def test_called_by_hand_it_is_the_function(
    way: Callable[..., Any], base: Any, mailbox: Mailbox
) -> None:
    """It returns what the function does, and run and step are None; no query is made."""

    def work(params: dict[str, Any], run: Any, step: Any, size: int = 1) -> Any:
        return [params, run, step, size]

    task = mailbox.task(stages.step(work), name="tests.hand", base=base)
    assert way(task, {"album": 7}, size=640) == [{"album": 7}, None, None, 640]
    with pytest.raises(TypeError):
        way(task)


def test_a_message_of_no_run_is_the_function(mailbox: Mailbox) -> None:
    """Sent as any task is, it gets what it was sent with."""

    def work(params: dict[str, Any], step: Any) -> Any:
        return [params, step]

    task = mailbox.task(stages.step(work), name="tests.sent", base=SafeTask)
    task.delay({"album": 7})
    assert mailbox.deliver(mailbox.take_one()) == ("SUCCESS", [{"album": 7}, None])
    with pytest.raises(TypeError):
        task.delay()


def test_a_call_inside_a_step_is_the_function(stage: Staged) -> None:
    """A step that calls another step's task, or its own, does not begin that."""
    inside: list[Any] = []

    def work(params: dict[str, Any], step: Any, again: bool = True) -> None:
        inside.append((step is None, again))
        if again:
            task({}, again=False)
            inside.append(note({}, name="called"))

    task = stage.mailbox.task(stages.step(work), name="tests.inside")
    run = do(stage, (task, 1))
    assert inside == [(False, True), (True, False), {"called": True}]
    assert (run.status, run.params) == ("succeeded", {})


def test_below_single_instance_it_is_a_step(stage: Staged, locks_in_memory: None) -> None:
    """Under a lock it gets its params as ever."""
    task = stage.mailbox.task(
        single_instance(key=lambda *args, **kwargs: "all", on_conflict="raise")(
            stages.step(lambda_returning({"alone": True}))
        ),
        name="tests.alone",
        base=SafeTask,
    )
    assert do(stage, (task, 2), (task, 1)).params == {"alone": True}


# The other way of the document.


def test_a_plain_task_gets_data_and_its_name(stage: Staged) -> None:
    """A SafeTask without the decorator takes (data, name) and returns the dictionary."""
    seen: list[Any] = []

    def work(data: dict[str, Any], name: str, size: int = 1) -> Any:
        seen.append((data, name, size))
        return {"id": data["task_id"], "name": name, "result": True, "params": {"size": size}}

    task = stage.mailbox.task(work, name="tests.document", base=SafeTask)
    run = do(stage, (task, 2, {"size": 640}), (plain, 1), params={"album": 7})
    assert seen == [({"task_id": run.pk, "params": {"album": 7}}, "tests.document", 640)]
    assert run.params == {"album": 7, "size": 640, "plain": "tests.stages.tasks.plain"}


@pytest.mark.parametrize("result", [{"result": True}, {"result": True, "params": None}])
def test_a_plain_task_need_not_return_params(result: Any, stage: Staged) -> None:
    """The result says that it succeeded; an id and a name are not asked for."""
    task = stage.mailbox.task(lambda_of_document(result), name="tests.document", base=SafeTask)
    assert do(stage, (task, 1)).status == "succeeded"


@pytest.mark.parametrize(
    ("result", "error_type", "error"),
    [
        ({"result": False}, "ReturnedFalse", 'its "result" is False'),
        ({"result": False, "error_info": "ValueError:no"}, "ReturnedFalse", "ValueError:no"),
        ({"result": 1}, "InvalidResult", "a task without @stages.step returns"),
        ({}, "InvalidResult", "it is {}, and a task without @stages.step returns"),
        (None, "InvalidResult", "it is None, and"),
        (True, "InvalidResult", "it is True, and"),
        ({"result": True, "params": [1]}, "InvalidResult", "its params are [1]"),
    ],
)
def test_a_plain_task_that_fails(result: Any, error_type: str, error: str, stage: Staged) -> None:
    """A result that is False, or says nothing, fails the step and is shown."""
    task = stage.mailbox.task(lambda_of_document(result), name="tests.document", base=SafeTask)
    run = do(stage, (task, 2), (note, 1))
    assert (run.status, shown(run)) == ("failed", "fa")
    assert run.error_step is not None
    assert run.error_step.error_type == error_type
    assert error in run.error_step.error


def test_a_plain_task_called_by_hand_is_the_function(mailbox: Mailbox) -> None:
    """Without a run it is a task like any other."""
    assert plain({"task_id": 1}, "one")["params"] == {"plain": "one"}
    plain.delay({"task_id": 1}, "one")
    assert mailbox.deliver(mailbox.take_one()).value["id"] == 1


def lambda_of_document(result: Any) -> Any:
    """Return a function in the document's form that returns this."""

    def work(data: dict[str, Any], name: str) -> Any:
        return result

    return work


class Sizing(SafeTask):
    """A class-based step."""

    name = "tests.sizing.run"

    @stages.step
    def run(self, params: dict[str, Any], step: Any, size: int = 1) -> Any:
        """Say what it got."""
        return {"size": size, "mine": step.task == self.name}


def test_a_class_based_step_runs(stage: Staged) -> None:
    """With the decorator above its run it is a step."""
    task = stage.mailbox.app.register_task(Sizing())
    assert do(stage, (task, 1, {"size": 640})).params == {"size": 640, "mine": True}


# Params on their way.


def test_params_reach_the_next_stage(stage: Staged) -> None:
    """Each stage finds what was given and what all before it returned, and not its own."""
    seen: list[Any] = []

    def work(params: dict[str, Any], name: str) -> Any:
        seen.append((name, params))
        return {name: len(seen)}

    task = stage.mailbox.task(stages.step(work), name="tests.params")
    plan = [
        (task, priority, {"name": name})
        for name, priority in zip("abcd", [3, 3, 2, 1], strict=True)
    ]
    run = do(stage, *plan, params={"album": 7})
    assert seen == [
        ("a", {"album": 7}),
        ("b", {"album": 7}),
        ("c", {"album": 7, "a": 1, "b": 2}),
        ("d", {"album": 7, "a": 1, "b": 2, "c": 3}),
    ]
    assert run.params == {"album": 7, "a": 1, "b": 2, "c": 3, "d": 4}


@pytest.mark.parametrize("first", [0, 1, 2])
def test_the_later_in_the_plan_wins(
    first: int, stage: Staged, caplog: pytest.LogCaptureFixture
) -> None:
    """If two steps set one key, the later one in the plan wins, and a warning says so."""
    run = stages.start(
        [(note, 1, {"name": "size", "value": value}) for value in (1, 2, 3)], {"size": 0}
    )
    messages = stage.take()
    with caplog.at_level(logging.WARNING, "django_celery_safe"):
        for message in messages[first:] + messages[:first]:
            stage.deliver(message)
    run.refresh_from_db()
    assert run.params == {"size": 3}
    one, two, three = run.steps
    assert warnings_of_ours(caplog) == [
        f"Two steps of {run} returned 'size', and that of the later one in the plan is kept: "
        f"{earlier} and {later}."
        for earlier, later in [(one, two), (two, three)]
    ]


def test_no_warning_where_nothing_is_lost(stage: Staged, caplog: pytest.LogCaptureFixture) -> None:
    """Equal values, and those of another stage, are changed without a word."""
    with caplog.at_level(logging.WARNING, "django_celery_safe"):
        run = do(
            stage,
            *[(note, 2, {"name": "size", "value": 1})] * 2,
            (note, 1, {"name": "size", "value": 2}),
            params={"size": 0},
        )
    assert run.params == {"size": 2}
    assert warnings_of_ours(caplog) == []


def warnings_of_ours(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the texts of what the package logged."""
    ours = [record for record in caplog.records if record.name.startswith("django_celery_safe")]
    return [record.getMessage() for record in ours]


def test_params_count_up_through_the_stages(stage: Staged) -> None:
    """The next stage gets the params as the stage before has changed them."""
    run = do(stage, *[(add, priority, {"number": priority}) for priority in range(1, 5)])
    assert run.params == {"sum": 10}


# Starting.


def test_what_is_rolled_back_never_was(staged: Staged) -> None:
    """Inside atomic(): rolled back, no row, message or signal; committed, it begins."""
    with hearing(run_started, stage_started) as heard:
        with transaction.atomic(using=staged.alias):
            staged.start("ab", "c")
            transaction.set_rollback(True, using=staged.alias)
        assert (staged.take(), heard) == ([], [])
        assert not any(staged.tables())
        with transaction.atomic(using=staged.alias):
            run = staged.start("ab", "c")
            assert run.status == "waiting"
            assert (staged.take(), heard) == ([], [])
        assert len(staged.take()) == 2
        assert [event["run"] for event in heard] == [run.pk] * 2
    assert not OutboxMessage.objects.using(staged.alias).exists()


def test_a_savepoint_that_is_rolled_back_never_was(staged: Staged) -> None:
    """Only what commits begins, also of two runs in one transaction."""
    with transaction.atomic(using=staged.alias):
        with transaction.atomic(using=staged.alias):
            staged.start("ab")
            transaction.set_rollback(True, using=staged.alias)
        run = staged.start("c")
    assert [message.kwargs for message in staged.take()] == [{"name": "c"}]
    assert list(StageRun.objects.using(staged.alias)) == [run]


def test_a_run_that_starts_is_shown(staged: Staged) -> None:
    """The run that start returns can be read at once."""
    run = staged.start("ab", "c")
    assert (run.status, run.stage, run.stages, run.params) == ("waiting", 1, 2, {})
    assert (run.progress, run.progress.percent) == ((0, 3, 1, 2), 0)
    assert shown(run) == "www"
    assert run.error_step is None
    assert not run.is_aborted()
    staged.deliver(staged.take()[0])
    run.refresh_from_db()
    assert (run.status, run.progress.percent) == ("running", 33)
    assert run.created_at <= run.stage_at


def test_without_tables_it_says_what_to_do(mailbox: Mailbox, sqlite_immediate_alias: str) -> None:
    """A database that was not migrated is told, with the command."""
    with runs_in(sqlite_immediate_alias):
        with connections[sqlite_immediate_alias].cursor() as cursor:
            cursor.execute(f"DROP TABLE {StageStep._meta.db_table}")
        with pytest.raises(ConfigurationError, match=rf"--database={sqlite_immediate_alias}"):
            stages.start([(note, 1)])
    assert mailbox.take() == []


def test_a_step_does_not_begin_in_a_transaction(staged: Staged) -> None:
    """Inside atomic() others would not see that it runs: it is refused, and fails."""
    run = staged.start("a", "b")
    message = staged.take_one()
    with transaction.atomic(using=staged.alias):
        state, error = staged.deliver(message)
    assert (state, type(error)) == ("FAILURE", WrongTransaction)
    assert "Put atomic() inside the function." in str(error)
    run.refresh_from_db()
    assert (staged.calls, run.status, shown(run)) == ([], "failed", "fa")


def test_a_run_is_not_waited_for_where_it_can_not_end(staged: Staged) -> None:
    """Inside atomic() waiting would never end; elsewhere it ends with the time."""
    run = staged.start("a")
    with (
        transaction.atomic(using=staged.alias),
        pytest.raises(WrongTransaction, match="Wait after the block"),
    ):
        run.wait(1)
    with pytest.raises(TimeoutError, match="0 of 1 steps are done, and stage 1 of 1 is waiting"):
        run.wait(0)
    staged.deliver(staged.take_one())
    assert run.wait(0) is run
    assert run.status == "succeeded"


def test_waiting_until_nothing_runs(staged: Staged) -> None:
    """With idle=True it is waited until no step of a stopped run is at work, and resume works."""
    begun, may_end = threading.Event(), threading.Event()

    def outlive(task: Any) -> None:
        begun.set()
        assert may_end.wait(60)

    staged.bodies |= {"a": outlive, "b": refuse}
    run = staged.start("ab")
    first, second = staged.take()
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(staged.deliver_elsewhere, first)
        try:
            assert begun.wait(60)
            staged.deliver(second)
            assert run.wait(0).status == "failed"
            with pytest.raises(TimeoutError, match="still has running steps after 0: 0 of 2"):
                run.wait(0, idle=True)
            with pytest.raises(IllegalTransition, match="still runs"):
                run.resume()
        finally:
            may_end.set()
        assert run.wait(60, idle=True).status == "failed"
        done.result()
    assert run.resume().status == "running"
    # A process that died is not waited for.
    run.steps.update(status="running", ends_at=Now() - timedelta(seconds=1))
    StageRun.objects.using(staged.alias).update(status="failed")
    assert run.wait(0, idle=True).status == "failed"


# Eagerly.


@pytest.fixture
def eager(stage: Staged) -> Staged:
    """Tasks run at once, in this process."""
    stage.mailbox.app.conf.task_always_eager = True
    return stage


def test_eagerly_all_is_done_at_once(eager: Staged) -> None:
    """In eager mode the run has ended when start returns."""
    run = eager.start()
    run.refresh_from_db()
    assert (run.status, shown(run), eager.calls) == ("succeeded", "sssss", list("abcde"))
    assert run.params == dict.fromkeys("abcde", True)
    assert (eager.take(), OutboxMessage.objects.using(eager.alias).count()) == ([], 0)


def test_eagerly_a_plan_of_many_stages_is_done(eager: Staged) -> None:
    """The stages run inside each other, as deep as the stack allows."""
    run = stages.start([(add, priority) for priority in range(12)])
    run.refresh_from_db()
    assert (run.status, run.params) == ("succeeded", {"sum": 12})


def test_eagerly_a_run_waits_for_the_commit(eager: Staged) -> None:
    """Inside atomic() nothing is run before the commit; rolled back, never."""
    with transaction.atomic(using=eager.alias):
        eager.start()
        transaction.set_rollback(True, using=eager.alias)
    with transaction.atomic(using=eager.alias):
        run = eager.start()
        assert eager.calls == []
    run.refresh_from_db()
    assert (run.status, eager.calls) == ("succeeded", list("abcde"))


@pytest.mark.parametrize("way", ["error", "False"])
def test_eagerly_a_failure_stops_the_run(way: str, eager: Staged) -> None:
    """A failed run shows its error, and can be resumed at once."""

    def fail(task: Any) -> bool:
        if way == "error":
            raise ValueError("no")
        return False

    eager.bodies["c"] = fail
    run = eager.start()
    run.refresh_from_db()
    assert run.status == "failed"
    assert run.error_step == eager.step("c")
    assert eager.step("e").status == "aborted"
    assert "e" not in eager.calls
    eager.bodies.clear()
    run.resume()
    run.refresh_from_db()
    assert (run.status, shown(run)) == ("succeeded", "sssss")
    assert eager.calls.count("a") == 1


def test_eagerly_a_retry_is_done(eager: Staged) -> None:
    """A retry runs at once, too."""

    def retry_twice(task: Any) -> None:
        if task.request.retries < 2:
            raise task.retry(countdown=0)

    eager.bodies["a"] = retry_twice
    run = eager.start("a", "b")
    run.refresh_from_db()
    assert (run.status, eager.calls) == ("succeeded", ["a", "a", "a", "b"])


def test_eagerly_an_error_may_propagate(eager: Staged) -> None:
    """With task_eager_propagates the caller gets the step's error; the run has failed."""
    eager.mailbox.app.conf.task_eager_propagates = True
    with pytest.raises(ValueError, match="does not work"):
        stages.start([(crash, 2), (note, 1)])
    run = StageRun.objects.using(eager.alias).get()
    assert (run.status, shown(run)) == ("failed", "fa")


# In a project's own tests.


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("is_eager", [True, False])
def test_it_works_in_a_testcase(is_eager: bool, mailbox: Mailbox) -> None:
    """A run begins when the commit's callbacks are run, as the TestCase has them run."""
    mailbox.app.conf.task_always_eager = is_eager

    class Albums(TestCase):
        def test_it(self) -> None:
            with self.captureOnCommitCallbacks(execute=True):
                run = stages.start([(add, 2), (note, 1)], {"sum": 1})
                assert run.status == "waiting"
            for _ in range(2):
                for message in mailbox.take():
                    with self.captureOnCommitCallbacks(execute=True):
                        mailbox.deliver(message)
            run.refresh_from_db()
            assert (run.status, run.params) == ("succeeded", {"sum": 2, "note": True})

        def test_without_callbacks_nothing_begins(self) -> None:
            run = stages.start([(add, 2), (note, 1)])
            run.refresh_from_db()
            assert (run.status, mailbox.take()) == ("waiting", [])
            run.abort()
            assert run.status == "aborted"

    run_testcase(Albums)
