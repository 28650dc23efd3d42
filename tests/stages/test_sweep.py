"""Sweeping repairs a run once after a crash, and pruning deletes only runs that ended."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import Any, Final

import pytest
from celery import Celery, current_app, shared_task
from django.db import connections, router, transaction
from django.db.models import F
from pytest_django import Settings

from django_celery_safe import SafeTask, TaskPoisoned, stages
from django_celery_safe.conf import DEFAULTS
from django_celery_safe.databases import Now
from django_celery_safe.delivery.header import Header, with_header
from django_celery_safe.events import RUN_REPAIRED
from django_celery_safe.leases.holder import Holder, encode_holder
from django_celery_safe.models import OutboxMessage, StageRun, StageStep
from django_celery_safe.pruning import prune_some
from django_celery_safe.sending.outbox import MOST_DOUBLINGS
from django_celery_safe.signals import run_ended
from django_celery_safe.stages import Status
from django_celery_safe.stages.repairs import SETTLING, UNSTARTED_AFTER, Repair, get_prunable
from django_celery_safe.tasks import relay_outbox
from tests.conftest import MakeDatabase
from tests.processes import wait_for
from tests.routing import runs_in
from tests.sending.conftest import hearing
from tests.servers import PostgresServer, RedisServer
from tests.servers.databases import DatabaseKind, waits_for_a_lock
from tests.stages.chores import prune, sweep
from tests.stages.tasks import note
from tests.test_outbox_command import sent_to

#: After so many deaths a step fails.
MOST_DEATHS: Final[int] = DEFAULTS["MAX_DEATHS"]
#: A lease that no test outlasts, s.
LEASE: Final = 600
#: One that is over, s.
OVER: Final = -1
#: A little more than the patience with a step that nobody begins.
LONG: Final = UNSTARTED_AFTER + timedelta(seconds=30)
#: How many sweep at once.
SWEEPERS: Final = 5

Queue = Callable[[], list[str]]


@pytest.fixture
def shop(make_database: MakeDatabase, db_kind: DatabaseKind) -> Iterator[str]:
    """The database with the runs."""
    alias = make_database(db_kind, "shop")
    with runs_in(alias):
        yield alias


@pytest.fixture
def queue(redis_server: RedisServer, broker: Celery) -> Queue:
    """Tell the task ids of what waits at the broker, which is empty before the test."""
    return lambda: sent_to(redis_server)


# After a crash


def begin(*stage_sizes: int) -> StageRun:
    """Start a run of so many stages, with so many steps each; their messages are sent."""
    last = len(stage_sizes)
    plan = [(note, last - number) for number, size in enumerate(stage_sizes) for _ in range(size)]
    return stages.start(plan)


def at(step: StageStep) -> Any:
    """Return a step, one or none, as a queryset."""
    return StageStep.objects.using(step._state.db).filter(pk=step.pk)


def claim(step: StageStep, lease: float = LEASE, *, pid: int = 42, host: str = "web1") -> str:
    """Let a worker have begun a step; with a lease below 0 it died since. Return its token."""
    token = os.urandom(16).hex()
    holder = Holder(host, pid, task=step.task, task_id=step.task_id)
    assert (
        at(step)
        .exclude(status__in=Status.STOPPED)
        .update(
            status=Status.RUNNING,
            token=token,
            ends_at=Now() + timedelta(seconds=lease),
            holder=encode_holder(str(step), holder),
            started_at=Now(),
            starts=F("starts") + 1,
        )
    )
    runs = StageRun.objects.using(step._state.db)
    runs.filter(pk=step.run_id, status=Status.WAITING).update(status=Status.RUNNING)
    return token


def deliver(step: StageStep) -> Any:
    """Run a step as its message does, in this process."""
    options = with_header({}, Header(task=step.task, step=step.pk))
    task = current_app.tasks[step.task]
    place = {"run": step.run_id, "step": step.pk}
    return task.apply([place], task_id=step.task_id, throw=True, **options).get()


def poison(step: StageStep) -> None:
    """Let a step fail because so many processes died in it."""
    at(step).update(deaths=MOST_DEATHS)
    with pytest.raises(TaskPoisoned):
        deliver(step)


def wait_since(run: StageRun, age: timedelta) -> None:
    """Let what was sent last of a run have been sent so long ago."""
    rows = StageRun.objects.using(run._state.db).filter(pk=run.pk)
    rows.update(stage_at=Now() - age)
    run.steps.exclude(due_at=None).update(due_at=Now() - age)


def leave_silent(run: StageRun) -> StageStep:
    """Let a process have died in the first step of a run."""
    step = run.steps[0]
    claim(step, OVER)
    return step


def leave_unbegun(run: StageRun) -> StageStep:
    """Let the message of the first step of a run have got lost long ago."""
    wait_since(run, LONG)
    return run.steps[0]


def leave_stuck(run: StageRun) -> StageStep:
    """Let the first stage of a run, of one step, be complete, and the run not go on."""
    step = run.steps[0]
    claim(step)
    at(step).update(status=Status.SUCCEEDED, ended_at=Now() - 2 * SETTLING)
    return step


def swept(alias: str) -> list[Repair]:
    """Sweep, and check that each repair was told of once."""
    with hearing(RUN_REPAIRED) as heard:
        done = sweep(alias)
    assert [(one["run"], one["reason"]) for one in heard] == [(one.run, one.reason) for one in done]
    return done


# Findings and repairs


@pytest.mark.sql
def test_what_is_left_alone(shop: str, queue: Queue) -> None:
    """A step that waits for a short time or for its retry, or that runs for long, is no case."""
    run = begin(3, 1)
    running, retried, _, _ = run.steps
    claim(running)
    at(running).update(started_at=Now() - 10 * LONG)
    at(retried).update(due_at=Now() + timedelta(hours=1))
    before = list(run.steps.values())
    assert swept(shop) == []
    assert list(run.steps.values()) == before
    wait_since(run, 10 * LONG)
    at(retried).update(due_at=Now() + timedelta(hours=1))
    assert [repair.step for repair in swept(shop)] == [str(run.steps[2])]
    at(retried).update(due_at=Now() - LONG)
    assert [repair.step for repair in swept(shop)] == [str(retried)]
    assert len(queue()) == 3 + 2


def test_a_step_whose_process_died_is_sent_again(shop: str, queue: Queue) -> None:
    """It waits under its id, its message is sent anew, and its row says why."""
    run = begin(2)
    step = leave_silent(run)
    others = run.steps[1]
    (repair,) = swept(shop)
    assert (repair.run, repair.step) == (run.pk, str(step))
    assert repair.reason == "its process died (process 42 on web1), and it was sent again"
    row = at(step).get()
    assert (row.status, row.deaths, row.note) == (Status.WAITING, 1, repair.reason)
    assert queue() == [step.task_id, others.task_id, step.task_id]
    assert swept(shop) == []
    deliver(step)
    deliver(others)
    assert run.wait(1).status == Status.SUCCEEDED


@pytest.mark.sql
def test_a_step_that_nobody_began_is_sent_again(shop: str, queue: Queue) -> None:
    """A message that got lost is sent anew under its id, and its row says why."""
    run = begin(1, 1)
    step = leave_unbegun(run)
    (repair,) = swept(shop)
    assert repair == (run.pk, str(step), at(step).get().note)
    assert repair.reason == "no worker began it for long, so it was sent again"
    assert at(step).get().resent == 1
    assert queue() == [step.task_id] * 2
    assert swept(shop) == []


def test_the_patience_doubles(shop: str, queue: Queue) -> None:
    """Sent again after 5 minutes, 10, 20 and so on, up to about ten hours."""
    run = begin(1)
    for resent in range(MOST_DOUBLINGS + 3):
        patience = UNSTARTED_AFTER * 2 ** min(resent, MOST_DOUBLINGS)
        wait_since(run, patience - timedelta(seconds=30))
        assert swept(shop) == []
        wait_since(run, patience + timedelta(seconds=1))
        assert len(swept(shop)) == 1
        assert run.steps[0].resent == resent + 1
    assert len(queue()) == 1 + MOST_DOUBLINGS + 3


def start_and_die() -> StageRun:
    """Start a run of one step in a process that dies right after its commit."""
    alias = router.db_for_write(StageRun)
    with transaction.atomic(using=alias):
        run = begin(1)
        connections[alias].run_on_commit.clear()
    OutboxMessage.objects.using(alias).update(due_at=Now())
    return run


def test_a_message_in_the_outbox_is_left_to_the_relay(shop: str, queue: Queue) -> None:
    """A step whose message waits in the outbox is not sent again, unless the relay gave it up."""
    step = leave_unbegun(start_and_die())
    assert OutboxMessage.objects.using(shop).pending().count() == 1
    assert swept(shop) == []
    assert OutboxMessage.objects.using(shop).get().fail("refused", attempts=1)
    assert len(swept(shop)) == 1
    assert queue() == [step.task_id]


def test_a_dead_step_of_a_stopped_run_is_aborted(shop: str, queue: Queue) -> None:
    """Where the run has stopped meanwhile, a step whose process died is not sent again."""
    run = begin(2, 1)
    step = run.steps[0]
    claim(step)
    run.abort()
    assert swept(shop) == []
    at(step).update(ends_at=Now() - timedelta(seconds=1))
    (repair,) = swept(shop)
    assert repair.reason == "its process died (process 42 on web1), and it was aborted"
    assert (repair.step, at(step).get().note) == (str(step), repair.reason)
    assert at(step).get().status == Status.ABORTED
    assert len(queue()) == 2


@pytest.mark.parametrize("last", [False, True])
def test_a_complete_stage_goes_on(shop: str, queue: Queue, last: bool) -> None:
    """A run whose stage is complete and that stands begins the next stage, or ends."""
    run = begin(1) if last else begin(1, 2)
    leave_stuck(run)
    with hearing(run_ended) as ends:
        (repair,) = swept(shop)
    assert repair == (run.pk, "", "its stage was complete, and it did not go on; now it did")
    run.refresh_from_db()
    assert run.note == repair.reason
    assert (run.status, run.stage) == ((Status.SUCCEEDED, 1) if last else (Status.RUNNING, 2))
    assert len(ends) == last
    assert len(queue()) == (1 if last else 3)
    assert swept(shop) == []


def test_the_task_sweeps(shop: str, queue: Queue) -> None:
    """relay_outbox repairs runs, too."""
    leave_silent(begin(1))
    leave_unbegun(begin(1))
    leave_stuck(begin(1, 1))
    relay_outbox()
    assert len(queue()) == 3 + 3


def test_a_run_that_can_not_be_repaired(
    shop: str, queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    """A step whose task takes other arguments now is logged, stays, and holds up no other."""
    broken, others = begin(1), [begin(1), begin(1)]
    for run in (broken, *others):
        leave_silent(run)
    broken.steps.update(arguments_text='{"unknown": 1}')
    row = broken.steps.values().get()
    assert [repair.run for repair in swept(shop)] == [run.pk for run in others]
    assert broken.steps.values().get() == row
    (said,) = [text for text in caplog.messages if "can't be repaired" in text]
    assert said.startswith(f"Run {broken.pk} can't be repaired: TypeError: ")


# Several at once


@pytest.mark.sql
@pytest.mark.parametrize("leave", [leave_silent, leave_unbegun, leave_stuck])
def test_each_is_repaired_exactly_once(
    shop: str,
    queue: Queue,
    broker: Celery,
    leave: Callable[[StageRun], StageStep],
) -> None:
    """One of several sweeps at once repairs the run, with events; the others find nothing."""
    runs = [begin(1, 1) for _ in range(4)]
    for run in runs:
        leave(run)
    barrier = threading.Barrier(SWEEPERS)

    def one() -> list[Repair]:
        broker.set_current()
        try:
            barrier.wait(20)
            return sweep(shop)
        finally:
            connections[shop].close()

    with hearing(RUN_REPAIRED) as heard, ThreadPoolExecutor(SWEEPERS) as pool:
        done = [repair for found in pool.map(lambda _: one(), range(SWEEPERS)) for repair in found]
    assert sorted(repair.run for repair in done) == [run.pk for run in runs]
    assert sorted(one["run"] for one in heard) == [run.pk for run in runs]
    assert len(queue()) == 2 * len(runs)


@pytest.mark.sql
def test_one_that_is_begun_meanwhile_is_not_repaired(shop: str, queue: Queue) -> None:
    """A dead step that a delivery takes between the look and the lock keeps its new claim."""
    run = begin(1)
    step = leave_silent(run)
    token = ""

    def take(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        nonlocal token
        if not token and connections[shop].in_atomic_block:
            token = "taken"
            token = claim(step)
        return execute(sql, params, many, context)

    with connections[shop].execute_wrapper(take):
        assert swept(shop) == []
    row = at(step).get()
    assert (row.status, row.token, row.deaths, row.note) == (Status.RUNNING, token, 0, "")
    assert len(queue()) == 1


# prune


def ended(age: timedelta, status: Status = Status.SUCCEEDED, *, alias: str) -> StageRun:
    """Return a run of one step that ended so long ago."""
    run = begin(1)
    if status == Status.ABORTED:
        run.abort()
    elif status == Status.SUCCEEDED:
        deliver(run.steps[0])
    else:
        poison(run.steps[0])
    rows = StageRun.objects.using(alias).filter(pk=run.pk)
    rows.update(ended_at=Now() - age)
    run.refresh_from_db()
    assert run.status == status
    return run


def ids(alias: str) -> set[int]:
    """Return the ids of all runs; steps of others are an error."""
    found = set(StageRun.objects.using(alias).values_list("pk", flat=True))
    assert set(StageStep.objects.using(alias).values_list("run", flat=True)) == found
    return found


@pytest.mark.sql
def test_what_is_pruned(shop: str, queue: Queue, settings: Settings) -> None:
    """Runs that ended, well or not, go when their retention is over, seven days if not said."""
    old = [ended(timedelta(days=8), status, alias=shop) for status in sorted(Status.STOPPED)]
    young = ended(timedelta(days=6), alias=shop)
    goes_on = begin(1)
    wait_since(goes_on, timedelta(days=30))
    StageRun.objects.using(shop).filter(pk=goes_on.pk).update(created_at=Now() - 30 * LONG * 100)
    assert ids(shop) > {run.pk for run in old}
    assert prune(shop) == 3
    assert prune(shop) == 0
    assert ids(shop) == {young.pk, goes_on.pk}
    settings.DJANGO_CELERY_SAFE = {"RETENTION": {"runs": timedelta(days=5)}}
    assert prune(shop) == 1
    settings.DJANGO_CELERY_SAFE = {"RETENTION": {"runs": 0}}
    assert prune(shop) == 0
    assert ids(shop) == {goes_on.pk}


def test_what_still_runs_is_not_pruned(shop: str, queue: Queue) -> None:
    """A run that was stopped stays while one of its steps is at work, and goes after that."""
    run = begin(2)
    claim(run.steps[0])
    run.abort()
    StageRun.objects.using(shop).update(ended_at=Now() - timedelta(days=8))
    assert prune(shop) == 0
    assert ids(shop) == {run.pk}
    at(run.steps[0]).update(ends_at=Now() - timedelta(seconds=1))
    assert prune(shop) == 1
    assert ids(shop) == set()


def test_a_run_that_is_resumed_meanwhile_is_not_pruned(shop: str, queue: Queue) -> None:
    """Pruning asks again under the run's lock, so what somebody resumes before that stays."""
    run = ended(timedelta(days=8), Status.ABORTED, alias=shop)
    asked: list[str] = []

    def resume(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        result = execute(sql, params, many, context)
        if sql.startswith("SELECT") and not asked:
            asked.append(sql)
            StageRun.objects.using(shop).filter(pk=run.pk).update(status=Status.RUNNING)
        return result

    (chosen,) = get_prunable(shop)
    with connections[shop].execute_wrapper(resume):
        prune_some(chosen, 1, 1)
    assert asked
    assert ids(shop) == {run.pk}


# Deletion beside a step that ends


go_on = threading.Event()


@shared_task(base=SafeTask, name="tests.stages.wait_to_go_on")
@stages.step
def wait_to_go_on(params: dict[str, Any]) -> None:
    """Work until the test lets it end."""
    assert go_on.wait(30)


@contextmanager
def before(alias: str, begin_of_sql: str, do: Callable[[], object]) -> Iterator[None]:
    """Do something once, in this thread, before its first such statement in a transaction."""
    left = [do]

    def run_first(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if left and sql.startswith(begin_of_sql) and connections[alias].in_atomic_block:
            left.pop()()
        return execute(sql, params, many, context)

    with connections[alias].execute_wrapper(run_first):
        yield


@pytest.mark.parametrize("db_kind", ["postgres"], indirect=True)
@pytest.mark.parametrize("prunes", [True, False])
def test_a_step_that_ends_waits_for_a_deletion(
    prunes: bool, shop: str, queue: Queue, broker: Celery, postgres_server: PostgresServer
) -> None:
    """While a run is being deleted, who ends its stage waits for that, and begins nothing then."""
    run = stages.start([(wait_to_go_on, 2), (note, 1)])
    go_on.clear()

    def end() -> None:
        broker.set_current()
        try:
            deliver(run.steps[0])
        finally:
            connections[shop].close()

    def let_it_end() -> None:
        go_on.set()
        wait_for(lambda: waits_for_a_lock(postgres_server, shop), 30)

    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(end)
        # Its process notes that in the run's row, too, right after it has claimed the step.
        begun = StageRun.objects.using(shop).filter(pk=run.pk, status=Status.RUNNING)
        wait_for(begun.exists, 30)
        with before(shop, 'DELETE FROM "django_celery_safe_stagestep"', let_it_end):
            rows = StageRun.objects.using(shop).filter(pk=run.pk)
            assert rows.erase() if prunes else rows.delete()
        ending.result(30)
    assert ids(shop) == set()
    assert len(queue()) == 1


@pytest.mark.parametrize("db_kind", ["postgres"], indirect=True)
def test_a_deletion_waits_for_a_stage_that_begins(
    shop: str, queue: Queue, broker: Celery, postgres_server: PostgresServer
) -> None:
    """While a step begins the next stage, a deletion waits for the run, and holds no step."""
    run, is_ending = begin(1, 1), threading.Event()

    def until_somebody_waits() -> None:
        is_ending.set()
        wait_for(lambda: waits_for_a_lock(postgres_server, shop), 30)

    def end() -> None:
        broker.set_current()
        with closing(connections[shop]), before(shop, "INSERT INTO", until_somebody_waits):
            deliver(run.steps[0])

    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(end)
        assert is_ending.wait(30)
        run.delete()
        ending.result(30)
    assert ids(shop) == set()


# Beside the outbox


def test_a_sweep_that_fails_stops_no_relay(
    shop: str, queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    """An error of the sweep is logged, and the outbox is relayed all the same."""
    start_and_die()
    with connections[shop].schema_editor() as editor:
        editor.remove_field(StageStep, StageStep._meta.get_field("resent"))
    assert relay_outbox() == 1
    assert len(queue()) == 1
    (said,) = [text for text in caplog.messages if "could not be swept" in text]
    assert said.startswith("The runs of stages in 'shop' could not be swept: ")
