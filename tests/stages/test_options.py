"""Options of one entry of a plan, beside its arguments, and labels of a run."""

from collections.abc import Callable
from datetime import timedelta
from threading import Barrier
from typing import Any, Final

import pytest
from django.db import transaction

from django_celery_safe import ConfigurationError, SafeTask, stages
from django_celery_safe.databases import Now
from django_celery_safe.exceptions import AlreadyStarted, IllegalTransition
from django_celery_safe.models import StageRun
from django_celery_safe.sending.relay import Relay
from tests.background import elsewhere
from tests.sending.conftest import rolled_back
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


# Keys, names and addresses.


KEY: Final = "album:7"


def let_fail(staged: Staged, run: StageRun) -> None:
    """Let a run's step fail."""
    staged.bodies["a"] = refuse
    staged.deliver_all()
    staged.bodies.clear()


ENDS: Final[dict[str, Callable[[Staged, StageRun], object]]] = {
    "succeeds": lambda staged, run: staged.deliver_all(),
    "fails": let_fail,
    "is aborted": lambda staged, run: run.abort(),
    "is deleted": lambda staged, run: run.delete(),
}


@pytest.mark.sql
@pytest.mark.parametrize("end", ENDS)
def test_a_key_has_one_run_until_that_ends(end: str, staged: Staged) -> None:
    """A second start raises an error that holds the first run; after its end it is possible."""
    run = staged.start("a", key=KEY)
    for _ in range(2):
        with pytest.raises(AlreadyStarted) as caught:
            staged.start("a", key=KEY)
        assert (caught.value.key, caught.value.run) == (KEY, run)
        assert f"Run {run.pk} (album:7), which is waiting, has the key" in str(caught.value)
        assert staged.runs.count() == 1
    ENDS[end](staged, run)
    again = staged.start("a", key=KEY)
    assert again.pk != run.pk
    assert staged.runs.filter(key=KEY).latest("pk") == again


@pytest.mark.sql
def test_other_keys_and_runs_without_one_start(staged: Staged) -> None:
    """Keys are compared whole and with their case; runs without a key have nothing in common."""
    for key in (KEY, "album:71", "ALBUM:7", "", ""):
        staged.start("a", key=key)
    assert staged.runs.active().count() == 5


@pytest.mark.sql
def test_starts_at_the_same_time(staged: Staged) -> None:
    """Only one of several starts at once begins its run, and the others get that run."""
    count = 6
    barrier = Barrier(count)
    plan = stages.make_plan([(staged.task, 1, {"name": "a"})])

    def start_too() -> tuple[bool, int]:
        try:
            barrier.wait(30)
            return True, stages.start(plan, key=KEY).pk
        except AlreadyStarted as error:
            return False, error.run.pk

    starts = [elsewhere(staged.alias, start_too) for _ in range(count)]
    found = [one.result() for one in starts]
    assert sorted(won for won, _ in found) == [False] * (count - 1) + [True]
    assert len({pk for _, pk in found}) == 1


def test_a_start_that_is_rolled_back_leaves_the_key(staged: Staged) -> None:
    """Inside atomic() a key is taken with the commit, and a refused start harms nothing else."""
    with rolled_back(staged.alias):
        staged.start("a", key=KEY)
    with transaction.atomic(using=staged.alias):
        run = staged.start("a", key=KEY)
        with pytest.raises(AlreadyStarted):
            staged.start("a", key=KEY)
        assert staged.start("a", key="album:8").pk
    assert len(staged.take()) == 2
    assert staged.runs.first() == run


def test_a_run_whose_key_is_taken_can_not_be_resumed(staged: Staged) -> None:
    """A failed run waits with its resume until the next run of its key has ended."""
    failed = staged.start("a", key=KEY)
    let_fail(staged, failed)
    second = staged.start("a", key=KEY)
    before = staged.tables()
    with pytest.raises(IllegalTransition, match="another run has its key 'album:7'"):
        failed.resume()
    assert staged.tables() == before
    second.abort()
    staged.take()
    failed.resume()
    with pytest.raises(AlreadyStarted):
        staged.start("a", key=KEY)
    staged.deliver_all()
    assert statuses(failed) == ("succeeded", "s")


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        ({"key": 7}, "its key is 7"),
        ({"key": "k" * 256}, "its key is 'kkk"),
        ({"key": "a\0"}, "its key is 'a\\x00'. Give a text that can be seen"),
        ({"url": "javascript:alert(1)"}, "its url is 'javascript:alert(1)', which is not an"),
    ],
)
def test_texts_that_can_not_be_kept(labels: dict[str, Any], says: str, staged: Staged) -> None:
    """They are refused at the start, and nothing is written."""
    with pytest.raises(ConfigurationError) as caught:
        staged.start("a", **labels)
    assert says in str(caught.value)
    assert staged.tables() == [[]] * 4
