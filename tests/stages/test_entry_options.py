"""Options of one entry of a plan, beside its arguments."""

from datetime import timedelta
from typing import Any, Final

import pytest

from django_celery_safe import ConfigurationError, SafeTask, stages
from django_celery_safe.databases import Now
from django_celery_safe.models import StageRun
from django_celery_safe.sending.relay import Relay
from tests.stages.tasks import note, reconnect
from tests.stages.test_messages import Staged, refuse, shown, statuses

#: A countdown that no test outlasts, s.
LONG: Final = 500


def start(staged: Staged, *entries: dict[str, Any], task: Any = None) -> StageRun:
    """Start a run of a stage for each entry, with steps a, b and so on."""
    task = task or staged.task
    plan = [(task, -n, {"name": "abc"[n], **entry}) for n, entry in enumerate(entries)]
    return stages.start(plan)


def test_an_option_is_no_argument(staged: Staged) -> None:
    """A function gets its arguments alone, also one that is called as an option is."""
    given = {}

    @stages.step
    def work(params: dict[str, Any], queue: str, **others: Any) -> None:
        given.update(others, queue=queue)

    task = staged.mailbox.task(work, name="tests.queue", base=SafeTask)
    slow = staged.mailbox.add_queue()
    run = stages.start([(task, 1, {"queue": "of people", "size": 7, "@queue": slow})])
    message = staged.take_one()
    assert message.kwargs == {"queue": "of people", "size": 7}
    assert message.delivery_info["routing_key"] == slow
    staged.deliver(message)
    assert given == {"queue": "of people", "size": 7}
    (step,) = run.steps
    assert (step.arguments, step.options) == ({"queue": "of people", "size": 7}, {"queue": slow})
    assert step.status == "succeeded"


def test_each_message_has_the_options_of_its_entry(staged: Staged) -> None:
    """Queue and priority hold for each message of a step, also one that a relay sends again."""
    slow = staged.mailbox.add_queue()
    start(staged, {"@queue": slow, "@priority": 3}, {"@priority": 9})
    for sent_again in (False, True):
        if sent_again:
            staged.messages("a").update(due_at=Now())
            assert Relay(staged.alias).relay_batch() == 1
        message = staged.take_one()
        assert message.delivery_info["routing_key"] == slow
        assert message.delivery_info["priority"] == 3
    staged.deliver(message)
    assert staged.take_one().delivery_info["priority"] == 9


def test_a_countdown(staged: Staged) -> None:
    """It counts from the moment at which the stage begins, and a relay waits as long."""
    run = start(staged, {}, {"@countdown": timedelta(seconds=LONG)}, {"@countdown": 0})
    assert [step.options.get("countdown") for step in run.steps] == [None, LONG, 0]
    staged.deliver(staged.take_one())
    message = staged.take_one()
    assert LONG - 100 < message.delay <= LONG
    (row,) = staged.messages("b").listed()
    assert row.due_in_s > LONG


def test_retries(staged: Staged) -> None:
    """A step is retried after an error so often, each time after the task's default delay."""
    task = staged.make_task(name="tests.retried", default_retry_delay=LONG)
    staged.bodies["a"] = refuse
    slow = staged.mailbox.add_queue()
    run = start(staged, {"@retries": 2, "@queue": slow}, {}, task=task)
    message = staged.take_one()
    for retries in (1, 2):
        assert staged.deliver(message).state == "RETRY"
        assert shown(run) == "ww"
        assert staged.steps.get(stage=1).error_type == "Retry"
        message = staged.take_one()
        assert message.headers["retries"] == retries
        assert message.delay > LONG - 100
        assert message.delivery_info["routing_key"] == slow
    assert staged.deliver(message).state == "FAILURE"
    assert (*statuses(run), staged.calls) == ("failed", "fa", ["a"] * 3)
    assert run.error_step.error_type == "ValueError"
    assert 'raise ValueError("no")' in run.error_step.traceback


#: Options, and what the error says of them.
INVALID: Final[list[tuple[dict[str, Any], str]]] = [
    ({"@que": "slow"}, "the option '@que', which is not known. Did you mean '@queue'?"),
    ({"@queue": ""}, "the option \"@queue\": ''. Give the name of a queue."),
    ({"@countdown": -1}, 'the option "@countdown": -1. Give a number of seconds or a timedelta'),
    ({"@priority": 256}, 'the option "@priority": 256. Give a whole number from 0 to 255.'),
    ({"@retries": -1}, 'the option "@retries": -1. Give a whole number, 0 or more'),
    ({"queue": "slow"}, 'Options have an @: "@queue".'),
]


@pytest.mark.parametrize(("options", "says"), INVALID)
def test_invalid_options_are_refused(options: dict[str, Any], says: str) -> None:
    """The error names the entry, the option and its value, and says what to write."""
    with pytest.raises(ConfigurationError) as caught:
        stages.make_plan([(note, 2), (note, 1, options)])
    assert str(caught.value).startswith("The plan can't be run: entry 2, ")
    assert says in str(caught.value)


def test_retries_of_a_task_that_celery_retries() -> None:
    """A task with autoretry_for has its own number, so that two would contradict each other."""
    with pytest.raises(ConfigurationError, match="with autoretry_for set max_retries on the task"):
        stages.make_plan([(reconnect, 1, {"@retries": 1})])
    assert stages.make_plan([(reconnect, 1, {"@queue": "slow"})])
