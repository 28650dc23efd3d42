"""What a crash leaves behind is continued by relays, and what has ended is deleted by them."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections
from pytest_django import Settings

from django_celery_safe import current_claim
from django_celery_safe.databases import Now
from django_celery_safe.models import OutboxMessage, StageRun
from django_celery_safe.sending.followed import Fault
from django_celery_safe.sending.housekeeping import prune_some
from django_celery_safe.sending.relay import Relay
from django_celery_safe.signals import message_failed, run_ended
from django_celery_safe.stages import Status
from django_celery_safe.stages.engine import StepFollower
from tests.background import elsewhere
from tests.concurrency.mailbox import Message
from tests.sending.carrying import revoke
from tests.sending.conftest import hearing
from tests.servers.databases import until_somebody_waits
from tests.stages.test_edges import begin_and_die
from tests.stages.test_messages import Staged, refuse, shown, statuses
from tests.statements import at_statement


def relay(staged: Staged) -> list[Message]:
    """Send all messages again, as a relay does when it is time for that; return them."""
    OutboxMessage.objects.using(staged.alias).filter(due_at__isnull=False).update(due_at=Now())
    Relay(staged.alias).relay_batch()
    return staged.take()


# After a crash.


@pytest.mark.sql
def test_a_step_whose_process_died_is_sent_again(staged: Staged) -> None:
    """It comes under its id, and says how often its process died."""
    run, message = staged.begin("a")
    begin_and_die(staged, message, "dead")
    (step,) = run.steps.listed()
    assert (step.status, step.remaining_s, step.starts) == ("running", 0.0, 1)
    (again,) = relay(staged)
    assert (again.id, staged.messages("a").get().deaths) == (message.id, 1)
    (step,) = run.steps.listed()
    assert (step.deaths, step.remaining_s) == (1, 0.0)
    staged.deliver(again)
    assert statuses(run) == ("succeeded", "s")


@pytest.mark.sql
def test_a_step_that_nobody_began_is_sent_again(staged: Staged) -> None:
    """A message that got lost is sent anew under its id, and counts as overdue from then on."""
    run, message = staged.begin()
    assert not run.steps.overdue().exists()
    (again,) = relay(staged)
    assert again.id == message.id
    (step,) = run.steps.overdue().listed()
    assert (step.resent, step.waits_s >= 0) == (1, True)
    staged.deliver(again)
    assert (*statuses(run), run.steps.overdue().exists()) == ("running", "sw", False)


@pytest.mark.sql
@pytest.mark.parametrize("last", [False, True])
def test_a_complete_stage_goes_on(staged: Staged, last: bool) -> None:
    """
    A step's process died when it had recorded it: its message comes again, and goes on.

    However many processes may die in the task.
    """
    task = staged.make_task(name="tests.deadly", max_deaths=1)
    run = staged.start(*(["a"] if last else ["a", "bc"]), task=task)
    begin_and_die(staged, staged.take_one(), "dead")
    run.steps.filter(stage=1).update(status=Status.SUCCEEDED, ended_at=Now())
    with hearing(run_ended) as ends:
        (again,) = relay(staged)
        assert staged.deliver(again) == ("SUCCESS", None)
    assert statuses(run) == (("succeeded", "s") if last else ("running", "sww"))
    assert (len(ends), len(staged.take()), staged.calls) == (last, 0 if last else 2, [])


def test_a_step_that_is_killed_after_its_success_has_succeeded(staged: Staged) -> None:
    """The main process of a worker fails the message, and the run goes on with the next stage."""
    run = staged.start("a", "b")
    begin_and_die(staged, staged.take_one(), "dead")
    run.steps.filter(stage=1).update(status=Status.SUCCEEDED, ended_at=Now())
    step = staged.step("a")
    fault = Fault("TimeLimitExceeded", "killed")
    assert StepFollower(step.pk, staged.alias).fail(step.task_id, lambda: True, fault)
    assert (*statuses(run), len(staged.take())) == ("running", "sw", 1)


def test_a_step_that_expires_fails(staged: Staged) -> None:
    """A relay does not send it again, and the failure is that of the step alone."""
    run = staged.start("a", "b", task=staged.make_task(name="tests.expiring", expires=1e-6))
    staged.take()
    with hearing(message_failed) as failed:
        assert relay(staged) == []
    assert (*statuses(run), failed) == ("failed", "fa", [])
    assert staged.step("a").error == "The task expired before it was begun."
    assert not OutboxMessage.objects.using(staged.alias).exists()


@pytest.mark.sql
@pytest.mark.parametrize("stop", ["abort", "fail"])
def test_the_messages_of_a_stopped_run_are_gone(stop: str, staged: Staged) -> None:
    """A relay sends no step again that was aborted; a resumed run has messages of its own."""
    staged.bodies["a"] = refuse
    run = staged.start("abc", "d")
    messages = staged.take()
    if stop == "fail":
        staged.deliver(messages[0])
    else:
        run.abort()
    assert not OutboxMessage.objects.using(staged.alias).exists()
    assert {staged.deliver(message).state for message in messages} == {"IGNORED"}
    staged.resume(run)


# Pruning.


def prune(staged: Staged) -> int:
    """Delete the runs whose retention has expired, as a relay does; return how many."""
    before = staged.runs.count()
    for rows in StageRun.objects.using(staged.alias).prunable():
        prune_some(rows, 100, 1)
    return before - staged.runs.count()


def ended(staged: Staged, age: timedelta, status: Status = Status.SUCCEEDED) -> StageRun:
    """Return a run of one step that ended so long ago."""
    if status == Status.FAILED:
        staged.bodies["a"] = refuse
    run = staged.start("a")
    if status == Status.ABORTED:
        run.abort()
    staged.deliver_all()
    staged.bodies.clear()
    staged.runs.filter(pk=run.pk).update(ended_at=Now() - age)
    assert statuses(run)[0] == status
    return run


def ids(staged: Staged) -> set[int]:
    """Return the ids of all runs; steps of others are an error."""
    found = set(staged.runs.values_list("pk", flat=True))
    assert set(staged.steps.values_list("run", flat=True)) == found
    return found


@pytest.mark.sql
def test_what_is_pruned(staged: Staged, settings: Settings) -> None:
    """Runs that ended, well or not, go when their retention is over, seven days if not said."""
    old = [ended(staged, timedelta(days=8), status) for status in sorted(Status.STOPPED)]
    young, goes_on = ended(staged, timedelta(days=6)), staged.start("a")
    staged.runs.filter(pk=goes_on.pk).update(created_at=Now() - timedelta(days=30))
    assert ids(staged) > {run.pk for run in old}
    assert prune(staged) == 3
    assert prune(staged) == 0
    assert ids(staged) == {young.pk, goes_on.pk}
    before = settings.DJANGO_CELERY_SAFE
    settings.DJANGO_CELERY_SAFE = {**before, "RETENTION": {"runs": timedelta(days=5)}}
    assert prune(staged) == 1
    settings.DJANGO_CELERY_SAFE = {**before, "RETENTION": {"runs": 0}}
    assert prune(staged) == 0
    assert ids(staged) == {goes_on.pk}


def test_what_still_runs_is_not_pruned(staged: Staged) -> None:
    """A run that was stopped stays while one of its steps is at work, and goes after that."""

    def stop(task: Any) -> None:
        run.abort()
        staged.runs.update(ended_at=Now() - timedelta(days=8))
        assert prune(staged) == 0

    run, message = staged.begin("a", do=stop)
    staged.deliver(message)
    assert prune(staged) == 1
    assert ids(staged) == set()


def test_a_run_that_is_resumed_meanwhile_is_not_pruned(staged: Staged) -> None:
    """Pruning asks again under the run's lock, so what somebody resumes before that stays."""
    run = ended(staged, timedelta(days=8), Status.ABORTED)

    def resume() -> None:
        staged.runs.filter(pk=run.pk).update(status=Status.RUNNING)

    (chosen,) = StageRun.objects.using(staged.alias).prunable()
    with at_statement(staged.alias, "SELECT", resume, after=True, times=1) as met:
        prune_some(chosen, 1, 1)
    assert met
    assert ids(staged) == {run.pk}


# Deletion beside a step that ends.


def start_slowly(staged: Staged) -> tuple[StageRun, Message, threading.Event, threading.Event]:
    """Start a run whose b stands still; return it, b's message, and when b begins and may end."""
    begun, go_on = threading.Event(), threading.Event()

    def work(task: Any) -> None:
        begun.set()
        assert go_on.wait(30)

    staged.bodies["b"] = work
    run = staged.start("ab", "c")
    first, message = staged.take()
    staged.deliver(first)
    return run, message, begun, go_on


@pytest.mark.parametrize("db_kind", ["postgres"], indirect=True)
@pytest.mark.parametrize("prunes", [True, False])
def test_a_step_that_ends_waits_for_a_deletion(prunes: bool, staged: Staged) -> None:
    """While a run is being deleted, who ends its stage waits for that, and begins nothing then."""
    run, message, begun, go_on = start_slowly(staged)

    def let_it_end() -> None:
        go_on.set()
        until_somebody_waits(staged.alias)

    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(staged.deliver_elsewhere, message)
        assert begun.wait(30)
        delete = 'DELETE FROM "django_celery_safe_stagestep"'
        with at_statement(staged.alias, delete, let_it_end, times=1):
            rows = staged.runs.filter(pk=run.pk)
            assert rows.erase() if prunes else rows.delete()
        assert ending.result(30).state == "SUCCESS"
    assert (ids(staged), staged.take()) == (set(), [])


@pytest.mark.parametrize("db_kind", ["postgres"], indirect=True)
def test_a_deletion_waits_for_a_stage_that_begins(staged: Staged) -> None:
    """While a step begins the next stage, a deletion waits for the run, and holds no step."""
    run, is_ending = staged.start("a", "b"), threading.Event()
    message = staged.take_one()

    def end_and_wait() -> None:
        is_ending.set()
        until_somebody_waits(staged.alias)

    def end() -> None:
        staged.mailbox.app.set_current()
        with at_statement(staged.alias, "INSERT INTO", end_and_wait, times=1):
            staged.deliver(message)

    ending = elsewhere(staged.alias, end)
    assert is_ending.wait(30)
    run.delete()
    ending.result(30)
    assert ids(staged) == set()


def test_a_message_of_a_deleted_run_ends(staged: Staged) -> None:
    """It finds no step, and a relay does not send it again."""
    run = staged.start("a")
    staged.take()
    run.delete()
    (message,) = relay(staged)
    assert staged.deliver(message) == ("SUCCESS", None)
    assert (staged.calls, shown(run)) == ([], "")
    assert not OutboxMessage.objects.using(staged.alias).exists()


# Finished work, and steps that begin while their run stops.


@pytest.mark.parametrize("comes_again", [False, True])
@pytest.mark.parametrize("stop", ["abort", "fail"])
def test_finished_work_is_not_done_again_after_a_resume(
    stop: str, comes_again: bool, staged: Staged
) -> None:
    """Its process ended after the commit of finish(), and then the run stopped."""
    done: list[Any] = []

    def work(task: Any) -> None:
        done.append(current_claim().finish({"b": 1}))
        raise KeyboardInterrupt

    staged.bodies |= {"a": refuse, "b": work}
    run = staged.start("ab", "c")
    of_a, of_b = staged.take()
    with pytest.raises(KeyboardInterrupt):
        staged.deliver(of_b)
    run.abort() if stop == "abort" else staged.deliver(of_a)
    if comes_again:
        staged.deliver(of_b)
    del staged.bodies["a"]
    run.resume()
    staged.deliver_all()
    assert (*statuses(run), len(done), run.params["b"]) == ("succeeded", "sss", 1, 1)


@pytest.mark.parametrize("end", ["terminated", "expired"])
def test_a_finished_step_stays_done(end: str, staged: Staged) -> None:
    """Its process is killed for good after finish(), or its message expires before it comes."""

    def work(task: Any) -> None:
        current_claim().finish({"a": 1})
        if end == "terminated":
            revoke(staged.task, message, terminated=True)
        raise KeyboardInterrupt

    run, message = staged.begin(do=work)
    with pytest.raises(KeyboardInterrupt):
        staged.deliver(message)
    if end == "expired":
        revoke(staged.task, message, expired=True)
    assert statuses(run)[1][0] == "s"


@pytest.mark.parametrize("db_kind", ["postgres", "mariadb"], indirect=True)
def test_a_step_that_begins_while_its_run_stops_ends_as_it_will(staged: Staged) -> None:
    """Its worker had claimed the message: its success counts, and until then it is alive."""
    (run, message, begun, go_on), ending = start_slowly(staged), list[Any]()
    with ThreadPoolExecutor(1) as pool:

        def begin() -> None:
            ending.append(pool.submit(staged.deliver_elsewhere, message))
            assert begun.wait(30)

        # After the look which steps wait, and before these are aborted.
        quote = '"' if connections[staged.alias].vendor == "postgresql" else "`"
        message_id = ".".join(
            f"{quote}{name}{quote}" for name in ("django_celery_safe_outboxmessage", "id")
        )
        with at_statement(staged.alias, f"SELECT {message_id}", begin, times=1):
            run.abort()
        alive = run.steps.alive().count()
        go_on.set()
        assert (alive, ending[0].result(30).state) == (1, "SUCCESS")
    assert statuses(run) == ("aborted", "ssa")
