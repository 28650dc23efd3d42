"""Options of one entry of a plan, beside its arguments."""

from datetime import timedelta
from typing import Any, Final

import pytest
from celery import Task
from celery.exceptions import MaxRetriesExceededError

from django_celery_safe import InvalidPlan, SafeTask, stages
from django_celery_safe.databases import Now
from django_celery_safe.models import StageRun
from django_celery_safe.stages.repairs import UNSTARTED_AFTER, sweep
from django_celery_safe.stages.step_table import StepTable
from tests.concurrency.conftest import mailbox
from tests.stages.tasks import note, plain, reconnect
from tests.stages.test_messages import (
    Staged,
    impatient,
    of_module,
    refuse,
    shown,
    staged,
    staged_on_sqlite,
)

__all__ = ["impatient", "mailbox", "of_module", "staged", "staged_on_sqlite"]

#: A countdown that no test outlasts, s.
LONG: Final = 3600


def start(staged: Staged, *entries: dict[str, Any], task: Any = None) -> StageRun:
    """Start a run of a stage for each entry, with steps a, b and so on."""
    names = "abcdef"
    return stages.start(
        [
            (task or staged.task, -number, {"name": names[number], **entry})
            for number, entry in enumerate(entries)
        ]
    )


def test_an_option_is_no_argument(staged_on_sqlite: Staged) -> None:
    """A function gets its arguments alone, also one that is called as an option is."""
    given = {}

    @stages.step
    def work(params: dict[str, Any], queue: str, **others: Any) -> None:
        given.update(others, queue=queue)

    task = staged_on_sqlite.mailbox.task(work, name="tests.queue", base=SafeTask)
    slow = staged_on_sqlite.mailbox.add_queue()
    run = stages.start([(task, 1, {"queue": "of people", "size": 7, "@queue": slow})])
    message = staged_on_sqlite.take_one()
    assert message.kwargs == {"queue": "of people", "size": 7}
    assert message.delivery_info["routing_key"] == slow
    staged_on_sqlite.deliver(message)
    assert given == {"queue": "of people", "size": 7}
    (step,) = run.steps
    assert (step.arguments, step.options) == ({"queue": "of people", "size": 7}, {"queue": slow})
    assert step.status == "succeeded"


def test_each_message_has_the_options_of_its_entry(staged: Staged) -> None:
    """Queue and priority hold for each message of a step, also one that a sweep sends again."""
    slow = staged.mailbox.add_queue()
    run = start(staged, {"@queue": slow, "@priority": 3}, {"@priority": 9}, {})
    seen = []
    for sent_again in (False, True):
        if sent_again:
            staged.steps.filter(stage=1).update(due_at=Now() - 2 * UNSTARTED_AFTER)
            assert len(sweep(StepTable(staged.alias))) == 1
        message = staged.take_one()
        assert message.delivery_info["routing_key"] == slow
        assert message.delivery_info["priority"] == 3
    while run.status != "succeeded":
        seen.append(message.delivery_info["priority"] or 0)
        staged.deliver(message)
        (message,) = staged.take() or [message]
        run.refresh_from_db()
    assert seen == [3, 9, 0]


def test_a_plain_task_has_options_too(staged_on_sqlite: Staged) -> None:
    """A task without @stages.step, which is given (data, name)."""
    task = staged_on_sqlite.mailbox.task(lambda_of_document, name="tests.document", base=SafeTask)
    slow = staged_on_sqlite.mailbox.add_queue()
    run = stages.start([(task, 1, {"@queue": slow})])
    message = staged_on_sqlite.take_one()
    assert message.delivery_info["routing_key"] == slow
    staged_on_sqlite.deliver(message)
    run.refresh_from_db()
    assert run.status == "succeeded"


def lambda_of_document(data: dict[str, Any], name: str) -> dict[str, Any]:
    """Do it the first way of the document that stages are from."""
    return {"id": data["task_id"], "name": name, "result": True}


def test_a_countdown(staged: Staged) -> None:
    """It counts from the moment at which the stage begins, and once: a sweep waits as long."""
    run = start(staged, {}, {"@countdown": timedelta(seconds=LONG)}, {"@countdown": 0})
    assert [step.options.get("countdown") for step in run.steps] == [None, LONG, 0]
    staged.deliver(staged.take_one())
    message = staged.take_one()
    assert LONG - 600 < message.delay <= LONG
    rows = staged.steps.filter(stage=2)
    moments = rows.annotate(asked_at=Now()).values_list("due_at", "asked_at").get()
    assert moments[0] - moments[1] > timedelta(seconds=LONG - 600)
    assert sweep(StepTable(staged.alias)) == []
    # So long that its message must have got lost.
    rows.update(due_at=Now() - 2 * UNSTARTED_AFTER)
    assert len(sweep(StepTable(staged.alias))) == 1
    again = staged.take_one()
    assert again.headers["eta"] is None
    staged.deliver(again)
    staged.take()
    run.abort()
    rows.update(status="failed", ended_at=Now())
    StageRun.objects.using(staged.alias).update(stage=2)
    run.resume()
    assert staged.take_one().delay > LONG - 600


def test_a_plan_without_options_has_no_more_queries(staged: Staged) -> None:
    """Steps without a countdown leave their moment to the run's stage."""
    run = start(staged, {"@queue": "slow"})
    assert run.steps.get().due_at is None


@pytest.mark.parametrize("base", [Task, SafeTask])
def test_retries(base: Any, staged: Staged) -> None:
    """A step is retried after an error so often, each time after the task's default delay."""
    task = staged.make_task(base, "tests.retried", default_retry_delay=LONG)
    staged.bodies["a"] = refuse
    slow = staged.mailbox.add_queue()
    run = start(staged, {"@retries": 2, "@queue": slow, "@priority": 4}, {}, task=task)
    message = staged.take_one()
    for retries in (1, 2):
        assert staged.deliver(message).state == "RETRY"
        assert shown(run) == "ww"
        step = staged.steps.get(stage=1)
        assert (step.error_type, step.options) == (
            "Retry",
            {"retries": 2, "queue": slow, "priority": 4},
        )
        message = staged.take_one()
        assert message.headers["retries"] == retries
        assert message.delay > LONG - 600
        info = message.delivery_info
        assert (info["routing_key"], info["priority"]) == (slow, 4)
    state, error = staged.deliver(message)
    assert (state, str(error)) == ("FAILURE", "no")
    run.refresh_from_db()
    assert (run.status, shown(run), staged.calls) == ("failed", "fa", ["a"] * 3)
    assert run.error_step is not None
    assert run.error_step.error_type == "ValueError"
    assert 'raise ValueError("no")' in run.error_step.traceback
    staged.bodies.clear()
    run.resume()
    staged.deliver_all()
    run.refresh_from_db()
    assert run.status == "succeeded"
    assert {step.traceback for step in run.steps} == {""}


def test_retries_that_succeed(staged_on_sqlite: Staged) -> None:
    """The last one may end well; False is no error and is not retried."""
    staged = staged_on_sqlite
    staged.bodies["a"] = lambda task: refuse(task) if len(staged.calls) < 3 else None
    staged.bodies["b"] = lambda task: False
    run = start(staged, {"@retries": 2, "@countdown": 0}, {"@retries": 2}, {})
    staged.deliver_all()
    run.refresh_from_db()
    assert (run.status, shown(run)) == ("failed", "sfa")
    assert staged.calls == ["a", "a", "a", "b"]


def test_retries_of_the_function_itself(staged_on_sqlite: Staged) -> None:
    """self.retry() keeps to the task's own number; an error after that counts as one more."""
    staged = staged_on_sqlite

    def retry(task: Any) -> None:
        raise task.retry(countdown=0)

    task = staged.make_task(name="tests.retrying", max_retries=1)
    staged.bodies["a"] = retry
    run = start(staged, {"@retries": 1}, task=task)
    staged.deliver_all()
    run.refresh_from_db()
    assert (run.status, staged.calls) == ("failed", ["a", "a"])
    assert run.error_step is not None
    assert run.error_step.error_type == MaxRetriesExceededError.__name__


#: Options, and what the error says of them.
INVALID: Final[list[tuple[dict[str, Any], str]]] = [
    ({"@que": "slow"}, 'the option "@que", which is not known. Did you mean "@queue"?'),
    ({"@": 1}, 'the option "@", which is not known. There are @queue, @countdown, @priority, @ret'),
    ({"@expires": 1}, 'the option "@expires", which is not known.'),
    ({"@queue": ""}, "the option \"@queue\": ''. Give the name of a queue."),
    ({"@queue": None}, 'the option "@queue": None'),
    ({"@countdown": -1}, 'the option "@countdown": -1. Give a number of seconds or a timedelta'),
    ({"@countdown": 1e12}, 'the option "@countdown": 1000000000000.0. Give a number of seconds or'),
    ({"@countdown": None}, 'the option "@countdown": None'),
    ({"@countdown": "5m"}, "the option \"@countdown\": '5m'"),
    ({"@countdown": float("nan")}, 'the option "@countdown": nan'),
    ({"@priority": 256}, 'the option "@priority": 256. Give a whole number from 0 to 255.'),
    ({"@priority": 1.5}, 'the option "@priority": 1.5'),
    ({"@priority": True}, 'the option "@priority": True'),
    ({"@retries": -1}, 'the option "@retries": -1. Give a whole number, 0 or more.'),
    ({"@retries": None}, 'the option "@retries": None'),
    ({"queue": "slow"}, "does not take (params) and queue (note() got an unexpected keyword"),
    ({"queue": "slow"}, 'Options have an @: "@queue".'),
]


@pytest.mark.parametrize(("options", "says"), INVALID)
def test_invalid_options_are_refused(options: dict[str, Any], says: str) -> None:
    """The error names the entry, the option and its value, and says what to write."""
    with pytest.raises(InvalidPlan) as caught:
        stages.make_plan([(note, 2), (note, 1, options)])
    assert str(caught.value).startswith("The plan can't be run: entry 2, ")
    assert says in str(caught.value)


def test_retries_of_a_task_that_celery_retries() -> None:
    """A task with autoretry_for has its own number, so that two would contradict each other."""
    with pytest.raises(InvalidPlan, match="whose autoretry_for has its own number"):
        stages.make_plan([(reconnect, 1, {"@retries": 1})])
    assert stages.make_plan([(reconnect, 1, {"@queue": "slow"})])


def test_a_queue_that_the_app_does_not_have(staged_on_sqlite: Staged) -> None:
    """It is refused at the start where the app creates no queues by itself."""
    app = staged_on_sqlite.mailbox.app
    app.conf.task_create_missing_queues = False
    with pytest.raises(InvalidPlan, match="Give a queue of the app: "):
        start(staged_on_sqlite, {"@queue": "slow"})
    assert start(staged_on_sqlite, {"@queue": staged_on_sqlite.mailbox.queue}).pk


def test_options_travel_in_json() -> None:
    """The dictionary form takes them too, and a plan shows them as they were written."""
    entry = [plain.name, 1, {"@priority": 9, "@countdown": 1.5}]
    plan = stages.make_plan({"sub_tasks": [entry]})
    assert plan.describe().endswith(plain.name + ' {"@priority": 9, "@countdown": 1.5}')
