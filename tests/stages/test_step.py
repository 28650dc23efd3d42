"""``@stages.step`` and ``stages.start`` as a project's own code sees them."""

from typing import Any, Final

import pytest
from celery import current_task
from django.db import transaction

from django_celery_safe import InvalidResult, SafeTask, WrongTransaction, single_instance, stages
from django_celery_safe.models import OutboxMessage, StageRun
from django_celery_safe.signals import run_started
from tests.concurrency.mailbox import Mailbox
from tests.sending.conftest import hearing, rolled_back
from tests.stages.tasks import crash, note, plain
from tests.stages.test_messages import Staged, refuse, shown, statuses


def do(staged: Staged, *plan: Any, params: Any = None) -> StageRun:
    """Run a plan to its end."""
    run = stages.start(plan, params)
    staged.deliver_all()
    run.refresh_from_db()
    return run


# Results of steps.


@pytest.mark.parametrize(
    ("result", "params"),
    [(None, {}), (True, {}), ({"width": 640}, {"width": 640}), ((True, {"a": 1}), {"a": 1})],
)
def test_what_says_that_it_succeeded(result: Any, params: dict[str, Any], staged: Staged) -> None:
    """A dict, None, True, or True and a dict; the task's own result is what was returned."""
    run, message = staged.begin("a", do=lambda task: result)
    assert staged.deliver(message) == ("SUCCESS", result)
    assert (*statuses(run), run.params) == ("succeeded", "s", params)


#: Results with which a step fails: what its task raises, and what the run says.
FAILURES: Final[list[tuple[Any, type[Exception] | None, str]]] = [
    (False, None, "it returned False"),
    ((False, {"width": 640}), None, "it returned False"),
    (1, InvalidResult, "it is 1"),
    ((True, [1]), InvalidResult, "[1] is not a dict"),
    ({1: 2}, InvalidResult, "{1: 2} is not a dict"),
    ((True, {"ratio": float("inf")}), InvalidResult, "JSON can't take it"),
]


@pytest.mark.parametrize(("result", "error", "says"), FAILURES)
def test_what_says_that_it_failed(
    result: Any, error: type[Exception] | None, says: str, staged: Staged
) -> None:
    """False fails the step alone; anything else the task, too, and says what could be returned."""
    run, message = staged.begin(do=lambda task: result)
    state, value = staged.deliver(message)
    assert (state, type(value)) == (("FAILURE", error) if error else ("SUCCESS", type(result)))
    assert (*statuses(run), run.params) == ("failed", "fa", {})
    assert run.error_step.error_type == (error.__name__ if error else "ReturnedFalse")
    assert says in run.error_step.error


# Arguments of steps.


@pytest.mark.parametrize("bind", [False, True])
def test_run_and_step_are_given_by_name(bind: bool, staged: Staged) -> None:
    """A step that names them gets the current rows; other steps don't."""
    seen: list[Any] = []

    def unbound(params: dict[str, Any], run: Any, step: Any, size: int = 1) -> None:
        seen.append((params, run, step, size, run.is_aborted(), run.progress.done))

    def bound(self: Any, params: dict[str, Any], *, step: Any, run: Any, size: int = 1) -> None:
        assert self.request.id == current_task.request.id == step.task_id
        unbound(params, run, step, size)

    task = staged.mailbox.task(
        stages.step(bound if bind else unbound), bind=bind, name="tests.rows", base=SafeTask
    )
    run = do(staged, (note, 2), (task, 1, {"size": 640}), params={"album": 7})
    ((params, its_run, its_step, size, aborted, done),) = seen
    assert (its_run, its_step) == (run, run.steps.last())
    assert (its_run.status, its_step.status) == ("running", "running")
    assert (params, size) == ({"album": 7, "note": True}, 640)
    assert (aborted, done) == (False, 1)


# Called by hand.


def test_called_by_hand_it_is_the_function(mailbox: Mailbox) -> None:
    """It returns what the function does, and run and step are None; no query is made."""

    def work(params: dict[str, Any], run: Any, step: Any, size: int = 1) -> Any:
        return [params, run, step, size]

    task = mailbox.task(stages.step(work), name="tests.hand", base=SafeTask)
    assert task({"album": 7}, size=640) == [{"album": 7}, None, None, 640]
    assert task.apply(({"album": 7},)).get() == [{"album": 7}, None, None, 1]
    with pytest.raises(TypeError):
        task()


def test_a_call_inside_a_step_is_the_function(staged: Staged) -> None:
    """A step that calls another step's task, or its own, does not begin that."""
    inside: list[Any] = []

    def work(params: dict[str, Any], step: Any, again: bool = True) -> None:
        inside.append((step is None, again))
        if again:
            task({}, again=False)
            inside.append(note({}, name="called"))

    task = staged.mailbox.task(stages.step(work), name="tests.inside", base=SafeTask)
    run = do(staged, (task, 1))
    assert inside == [(False, True), (True, False), {"called": True}]
    assert (run.status, run.params) == ("succeeded", {})


def test_below_single_instance_it_is_a_step(staged: Staged, locks_in_memory: None) -> None:
    """Under a lock it gets its params as ever."""

    def work(params: dict[str, Any]) -> Any:
        return {"alone": True}

    alone = single_instance(key=lambda *args, **kwargs: "all", on_conflict="raise")
    task = staged.mailbox.task(alone(stages.step(work)), name="tests.alone", base=SafeTask)
    assert do(staged, (task, 2), (task, 1)).params == {"alone": True}


# The other way of the document.


def test_a_plain_task_gets_data_and_its_name(staged: Staged) -> None:
    """A SafeTask without the decorator takes (data, name) and returns the dictionary."""
    seen: list[Any] = []

    def work(data: dict[str, Any], name: str, size: int = 1) -> Any:
        seen.append((data, name, size))
        return {"id": data["task_id"], "name": name, "result": True, "params": {"size": size}}

    task = staged.mailbox.task(work, name="tests.document", base=SafeTask)
    run = do(staged, (task, 2, {"size": 640}), (plain, 1), params={"album": 7})
    assert seen == [({"task_id": run.pk, "params": {"album": 7}}, "tests.document", 640)]
    assert run.params == {"album": 7, "size": 640, "plain": "tests.stages.tasks.plain"}


@pytest.mark.parametrize(
    ("result", "error_type", "error"),
    [
        ({"result": False, "error_info": "ValueError:no"}, "ReturnedFalse", "ValueError:no"),
        ({"result": 1}, "InvalidResult", "A task without @stages.step returns"),
        (None, "InvalidResult", "it is None. A task"),
    ],
)
def test_a_plain_task_that_fails(result: Any, error_type: str, error: str, staged: Staged) -> None:
    """A result that is False, or says nothing, fails the step and is shown."""

    def work(data: dict[str, Any], name: str) -> Any:
        return result

    task = staged.mailbox.task(work, name="tests.document", base=SafeTask)
    run = do(staged, (task, 2), (note, 1))
    assert (run.status, shown(run)) == ("failed", "fa")
    assert run.error_step.error_type == error_type
    assert error in run.error_step.error


class Sizing(SafeTask):
    """A class-based step."""

    name = "tests.sizing.run"

    @stages.step
    def run(self, params: dict[str, Any], step: Any, size: int = 1) -> Any:
        """Say what it got."""
        return {"size": size, "mine": step.task == self.name}


def test_a_class_based_step_runs(staged: Staged) -> None:
    """With the decorator above its run it is a step."""
    task = staged.mailbox.app.register_task(Sizing())
    assert do(staged, (task, 1, {"size": 640})).params == {"size": 640, "mine": True}


# Params on their way.


def test_params_reach_the_next_stage(staged: Staged) -> None:
    """Each stage finds what was given and what all before it returned, and not its own."""
    seen: list[Any] = []

    def work(params: dict[str, Any], name: str) -> Any:
        seen.append((name, params))
        return {name: len(seen)}

    task = staged.mailbox.task(stages.step(work), name="tests.params", base=SafeTask)
    plan = [
        (task, priority, {"name": name})
        for name, priority in zip("abcd", [3, 3, 2, 1], strict=True)
    ]
    run = do(staged, *plan, params={"album": 7})
    assert seen == [
        ("a", {"album": 7}),
        ("b", {"album": 7}),
        ("c", {"album": 7, "a": 1, "b": 2}),
        ("d", {"album": 7, "a": 1, "b": 2, "c": 3}),
    ]
    assert run.params == {"album": 7, "a": 1, "b": 2, "c": 3, "d": 4}


def test_the_later_in_the_plan_wins(staged: Staged) -> None:
    """If two steps set one key, the later one in the plan wins, whichever ends last."""
    run = stages.start(
        [(note, 1, {"name": "size", "value": value}) for value in (1, 2, 3)], {"size": 0}
    )
    messages = staged.take()
    for message in messages[1:] + messages[:1]:
        staged.deliver(message)
    run.refresh_from_db()
    assert run.params == {"size": 3}


# Starting.


@pytest.mark.sql
def test_what_is_rolled_back_never_was(staged: Staged) -> None:
    """Inside atomic(): rolled back, no row, message or signal; committed, it begins."""
    with hearing(run_started) as heard:
        with rolled_back(staged.alias):
            staged.start("ab", "c")
        assert (staged.take(), heard) == ([], [])
        assert not any(staged.tables())
        with transaction.atomic(using=staged.alias):
            with rolled_back(staged.alias):
                staged.start("d")
            run = staged.start("ab", "c")
            assert run.status == "waiting"
            assert (staged.take(), heard) == ([], [])
        assert len(staged.take()) == 2
        assert [event["run"] for event in heard] == [run.pk]
    assert OutboxMessage.objects.using(staged.alias).count() == 2


def test_a_run_is_not_waited_for_where_it_can_not_end(staged: Staged) -> None:
    """Inside atomic() waiting would never end; elsewhere it ends with the time."""
    run = staged.start("a")
    with rolled_back(staged.alias), pytest.raises(WrongTransaction, match="Wait after the block"):
        run.wait(1)
    with pytest.raises(TimeoutError, match="0 of 1 steps are done, and stage 1 of 1 is waiting"):
        run.wait(0)
    staged.deliver(staged.take_one())
    assert run.wait(0) is run
    assert run.status == "succeeded"


def test_waiting_until_nothing_runs(staged: Staged) -> None:
    """With idle=True it is waited until no step of a stopped run is at work; not for a dead one."""

    def outlive(task: Any) -> None:
        staged.deliver_elsewhere(second)
        assert run.wait(0).status == "failed"
        with pytest.raises(TimeoutError, match="still has running steps after 0: 0 of 2"):
            run.wait(0, idle=True)

    staged.bodies |= {"a": outlive, "b": refuse}
    run = staged.start("ab")
    first, second = staged.take()
    staged.deliver(first)
    assert run.wait(0, idle=True).status == "failed"
    run.steps.update(status="running")  # its message is gone
    assert run.wait(0, idle=True).status == "failed"


# Eagerly.


def test_eagerly_all_is_done_at_once(eager: Staged) -> None:
    """In eager mode the run has ended when start returns."""
    run = eager.start()
    assert (*statuses(run), eager.calls) == ("succeeded", "sssss", list("abcde"))
    assert run.params == dict.fromkeys("abcde", True)
    assert (eager.take(), OutboxMessage.objects.using(eager.alias).count()) == ([], 0)
    # Nested, so many stages would be more than Python's stack can take.
    run = eager.start(*["a"] * 100)
    assert (*statuses(run), len(eager.calls)) == ("succeeded", "s" * 100, 5 + 100)


def test_eagerly_an_error_may_propagate(eager: Staged) -> None:
    """With task_eager_propagates the caller gets the step's error; the run has failed."""
    eager.mailbox.app.conf.task_eager_propagates = True
    with pytest.raises(ValueError, match="does not work"):
        stages.start([(crash, 2), (note, 1)])
    assert statuses(eager.runs.get()) == ("failed", "fa")
