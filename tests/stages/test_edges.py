"""Rare ends of steps and runs: duplicates, old code, replicas, eager mode, odd plans."""

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from shutil import copyfile
from typing import Any, Final

import pytest
from celery import Celery
from celery.app.task import Context
from celery.exceptions import Retry, TimeLimitExceeded
from celery.signals import (
    before_task_publish,
    import_modules,
    task_failure,
    task_rejected,
    task_revoked,
    task_unknown,
)
from django.db import connections, router, transaction
from django.test.utils import CaptureQueriesContext
from kombu.exceptions import ContentDisallowed
from pytest_django import Settings

from django_celery_safe import (
    InvalidPlan,
    SafeTask,
    StepLost,
    TaskPoisoned,
    WrongTransaction,
    stages,
)
from django_celery_safe.databases import Now
from django_celery_safe.delivery import worker
from django_celery_safe.models import StageRun, StageStep
from django_celery_safe.signals import task_poisoned
from django_celery_safe.stages.repairs import sweep
from django_celery_safe.stages.status import Status
from django_celery_safe.stages.step_table import StepTable
from tests.background import before_its_update, settle
from tests.concurrency.conftest import mailbox
from tests.concurrency.mailbox import Message
from tests.conftest import MakeDatabase
from tests.routing import ToRuns, routed_by
from tests.sending.conftest import hearing
from tests.servers.databases import registered, sqlite_settings
from tests.stages.test_messages import (
    Staged,
    impatient,
    of_module,
    shown,
    staged,
    staged_on_sqlite,
)

__all__ = ["impatient", "mailbox", "of_module", "staged", "staged_on_sqlite"]

HOUR: Final = timedelta(hours=1)
#: Most queries of a sweep that sends again 300 steps of one run. It took 14.
MOST_QUERIES: Final = 40


def statuses(run: StageRun) -> tuple[str, str]:
    """Return a run's status and the first letter of that of each of its steps, as of now."""
    run.refresh_from_db()
    return run.status, shown(run)


# Other deliveries of a message that is being run.


def of_unknown_task(message: Any) -> None:
    """Tell what a worker tells that does not know the task of a message."""
    name = message.headers["task"]
    task_unknown.send(sender=None, message=message, name=name, id=message.id, exc=None)


def refuse(message: Any) -> None:
    """Tell what a worker tells that may not read the body of a message."""
    task_rejected.send(sender=None, message=message, exc=ContentDisallowed("no pickle here"))


@pytest.mark.parametrize("staged", ["sqlite-immediate"], indirect=True)
@pytest.mark.parametrize(
    ("drop", "error_type", "text"),
    [
        (of_unknown_task, "NotRegistered", "does not know the task: it runs another release"),
        (refuse, "ContentDisallowed", "dropped the message, which it refused: no pickle here."),
    ],
)
def test_a_worker_that_drops_a_message(
    drop: Callable[[Any], None], error_type: str, text: str, staged: Staged
) -> None:
    """Its step waits with an error that says why, until it succeeds."""
    run = staged.start("a")
    message = staged.take_one()
    drop(message)
    settle()
    step = run.steps.get()
    assert (step.status, step.error_type) == ("waiting", error_type)
    assert text in step.error
    staged.deliver(message)
    assert statuses(run) == ("succeeded", "s")
    assert run.steps.get().error == ""
    drop(message)
    settle()
    assert run.steps.get().error == ""


def revoke(
    staged: Staged,
    message: Message,
    *,
    terminated: bool,
    expired: bool,
    received: Callable[[Context], Any] | None = None,
) -> None:
    """Say what the main process of a worker says of a message that is revoked or expired."""
    request = Context(message.headers, headers=message.headers)
    delivery = None if received is None else received(request)
    if delivery is not None:
        worker._received.add(delivery)
    task_revoked.send(
        sender=staged.task, request=request, terminated=terminated, signum=None, expired=expired
    )
    settle()


class PutBack:
    """A request that the pool's main process accepted and ended: no child had read it."""

    def __init__(self, context: Context) -> None:
        self._context, self.id, self.worker_pid = context, context.id, os.getpid()


@pytest.mark.parametrize("how", ["expired", "revoked", "put back and revoked"])
def test_a_duplicate_that_is_refused_fails_nothing_that_runs(
    how: str, staged_on_sqlite: Staged
) -> None:
    """While one delivery runs the step, another may expire or be revoked."""
    staged = staged_on_sqlite

    def meet(task: Any) -> None:
        is_put_back = how.startswith("put back")
        revoke(
            staged,
            message,
            terminated=is_put_back,
            expired=how == "expired",
            received=PutBack if is_put_back else None,
        )

    staged.bodies["a"] = meet
    run = staged.start("a", "b")
    message = staged.take_one()
    assert staged.deliver(message) == ("SUCCESS", None)
    assert statuses(run) == ("running", "sw")


@pytest.mark.parametrize(("expired", "says"), [(True, "expired before"), (False, "was revoked")])
def test_a_message_that_is_refused_fails_the_step_that_waits(
    expired: bool, says: str, staged_on_sqlite: Staged
) -> None:
    """No other process runs it, so the run would wait for ever."""
    staged = staged_on_sqlite
    run = staged.start("a", "b")
    revoke(staged, staged.take_one(), terminated=False, expired=expired)
    assert statuses(run) == ("failed", "fa")
    assert says in staged.step("a").error


def test_a_run_that_is_terminated_fails_its_step(staged_on_sqlite: Staged) -> None:
    """The process that runs it is killed, so that the running step fails."""
    staged = staged_on_sqlite

    def meet(task: Any) -> None:
        revoke(staged, message, terminated=True, expired=False)

    staged.bodies["a"] = meet
    run = staged.start("a", "b")
    message = staged.take_one()
    assert type(staged.deliver(message).value) is StepLost
    assert statuses(run) == ("failed", "fa")


def test_a_run_that_gives_its_step_back_when_it_is_terminated(staged_on_sqlite: Staged) -> None:
    """It does so while the main process fails the step, and the step fails."""
    staged = staged_on_sqlite

    def give_back() -> None:
        (step,) = store.steps().filter(status=Status.RUNNING)
        assert store.at(str(step.pk)).put_back(step.token, Status.WAITING, "SystemExit", "-241")

    def meet(task: Any) -> None:
        with before_its_update(give_back):
            revoke(staged, message, terminated=True, expired=False)

    store = StepTable(staged.alias)
    staged.bodies["a"] = meet
    run = staged.start("a", "b")
    message = staged.take_one()
    assert type(staged.deliver(message).value) is StepLost
    assert statuses(run) == ("failed", "fa")
    assert staged.step("a").error == "The task was revoked."


class Fussy(SafeTask):
    """Fails before its function when it is told to."""

    abstract = True
    fails = False

    def before_start(self, *args: Any) -> None:
        """Fail, if it is to."""
        if self.fails:
            raise OSError("before the function")


def test_a_duplicate_that_fails_before_its_claim_fails_nothing_that_runs(
    staged_on_sqlite: Staged,
) -> None:
    """An error of a delivery that never had the step is none of the one that has it."""
    staged = staged_on_sqlite
    fussy = staged.make_task(Fussy, "tests.fussy")

    def meet(task: Any) -> None:
        task.fails = True
        assert staged.deliver_elsewhere(message).state == "FAILURE"

    staged.bodies["a"] = meet
    run = staged.start("a", "b", task=fussy)
    message = staged.take_one()
    assert staged.deliver(message) == ("SUCCESS", None)
    assert statuses(run) == ("running", "sw")
    # The only delivery of a step that waits fails it.
    assert staged.deliver(staged.take_one()).state == "FAILURE"
    assert statuses(run) == ("failed", "sf")
    assert staged.step("b").error == "before the function"


def test_a_time_limit_without_tables_is_no_error(
    staged_on_sqlite: Staged, caplog: pytest.LogCaptureFixture
) -> None:
    """A project that has no stages and no tables of them hears nothing of them."""
    with connections[staged_on_sqlite.alias].schema_editor() as editor:
        editor.delete_model(StageStep)
    error = TimeLimitExceeded(3)
    with caplog.at_level(logging.DEBUG):
        task_failure.send(sender=staged_on_sqlite.task, task_id="any", exception=error)
        settle()
    assert [one for one in caplog.records if one.levelno >= logging.ERROR] == []


# Processes that died.


@pytest.mark.parametrize(
    ("deaths", "options", "status"),
    [
        (2, {}, "succeeded"),
        (3, {}, "failed"),
        (1, {"max_deaths": 1, "autoretry_for": (Exception,)}, "failed"),
        (5, {"max_deaths": None}, "succeeded"),
    ],
)
def test_a_step_that_kills_its_process_fails(
    deaths: int, options: dict[str, Any], status: str, staged: Staged
) -> None:
    """Each delivery that takes it from a dead process counts; after max_deaths it is not run."""
    run = staged.start("a", task=staged.make_task(name="tests.deadly", **options))
    message = staged.take_one()
    for number in range(deaths):
        begin_and_die(staged, message, f"dead{number}")
    is_run = status == "succeeded"
    with hearing(task_poisoned) as heard:
        state, value = staged.deliver(message)
    assert statuses(run) == (status, status[0])
    step = staged.step("a")
    assert (staged.calls, step.deaths) == (["a"] if is_run else [], deaths)
    assert (state, step.error_type) == (
        ("SUCCESS", "") if is_run else ("FAILURE", TaskPoisoned.__name__)
    )
    assert step.error == ("" if is_run else str(value))
    assert [one["task_id"] for one in heard] == ([] if is_run else [message.id])


def test_a_step_that_ends_its_process_dies(staged: Staged) -> None:
    """sys.exit() counts as a death, so that it is not run for ever."""

    def leave(task: Any) -> None:
        sys.exit(1)

    run = staged.start("a", task=staged.make_task(name="tests.leaving", max_deaths=1))
    staged.bodies["a"] = leave
    message = staged.take_one()
    with pytest.raises(SystemExit):
        staged.deliver(message)
    step = staged.step("a")
    assert (step.status, step.deaths, step.last_death) == ("waiting", 1, step.holder)
    assert staged.deliver(message).state == "FAILURE"
    assert statuses(run) == ("failed", "f")
    assert f"process {os.getpid()} on " in staged.step("a").error


@pytest.mark.parametrize("staged", ["postgres"], indirect=True)
@pytest.mark.parametrize("end", ["well", "with an error", "by a retry"])
def test_a_forked_child_does_not_end_its_parent_s_step(staged: Staged, end: str) -> None:
    """It leaves the function as the parent does, and the step is the parent's alone."""

    def fork(task: Any) -> dict[str, str]:
        child = os.fork()
        if not child:
            if end == "with an error":
                raise ValueError("child")
            if end == "by a retry":
                raise Retry("child", when=60)
            return {"a": "child"}
        os.waitpid(child, 0)
        return {"a": str(staged.step("a").status)}

    staged.bodies["a"] = fork
    run = staged.start("a")
    before = os.getpid()
    outcome = staged.deliver(staged.take_one())
    if os.getpid() != before:
        os._exit(0)
    assert outcome == ("SUCCESS", {"a": "running"})
    run.refresh_from_db()
    assert (*statuses(run), run.params) == ("succeeded", "s", {"a": "running"})


def test_a_step_that_was_cancelled_has_failed(staged: Staged) -> None:
    """asyncio's CancelledError ends no process, so that the step would be run again for ever."""

    async def cancel() -> None:
        raise asyncio.CancelledError

    staged.bodies["a"] = lambda task: asyncio.run(cancel())
    run = staged.start("a", "b")
    with pytest.raises(asyncio.CancelledError):
        staged.deliver(staged.take_one())
    assert statuses(run) == ("failed", "fa")
    assert staged.step("a").error_type == "CancelledError"


def test_a_dead_step_of_an_aborted_run_is_not_run(staged: Staged) -> None:
    """Its message is delivered again after the abort: the step is aborted, too."""
    run = staged.start("a", "b")
    message = staged.take_one()
    begin_and_die(staged, message, "dead")
    run.refresh_from_db()
    run.abort()
    assert statuses(run) == ("aborted", "ra")
    assert staged.deliver(message) == ("SUCCESS", None)
    assert (*statuses(run), staged.calls) == ("aborted", "aa", [])
    run.resume()
    staged.deliver_all()
    assert (*statuses(run), staged.calls) == ("succeeded", "ss", ["a", "b"])


def begin_and_die(staged: Staged, message: Message, token: str) -> None:
    """Begin a step as a process that dies in it, and whose lease is over."""
    store = StepTable(staged.alias)
    assert store.claim_step(message.ours["step"], message.id, token, -1.0, "") is not None


# Retries.


@pytest.mark.parametrize("is_aware", [True, False])
def test_a_retry_at_a_moment_is_due_then(is_aware: bool, staged: Staged) -> None:
    """A step that retries with ``eta`` is not overdue before that, with a time zone or in UTC."""
    eta = datetime.now(UTC) + HOUR

    def retry(task: Any) -> None:
        raise task.retry(eta=eta if is_aware else eta.replace(tzinfo=None))

    staged.bodies["a"] = retry
    run = staged.start("a")
    assert staged.deliver(staged.take_one()).state == "RETRY"
    due_at = staged.step("a").due_at
    assert due_at is not None
    assert abs(due_at - eta) < timedelta(minutes=1)
    assert statuses(run) == ("running", "w")


# Code that has changed, or is not loaded.


@contextmanager
def loading(app: Celery, load: Callable[[], Any]) -> Iterator[None]:
    """Let the app's task modules be loaded by this, as ``autodiscover_tasks`` does."""

    def receive(**kwargs: Any) -> None:
        load()

    import_modules.connect(receive, sender=app, weak=False)
    try:
        yield
    finally:
        import_modules.disconnect(receive, sender=app)


@pytest.mark.filterwarnings("ignore::celery.exceptions.CDeprecationWarning")  # of the queue
def test_a_task_that_is_not_loaded_keeps_its_queue(staged_on_sqlite: Staged) -> None:
    """A command that resumes a run without the task's module loads the module for its queue."""
    staged, app = staged_on_sqlite, staged_on_sqlite.mailbox.app
    name = "tests.slow"

    def load() -> Any:
        return staged.make_task(name=name, queue="slow")

    run = staged.start("a", task=load())
    run.abort()
    app.tasks.unregister(name)
    with loading(app, load), hearing(before_task_publish) as published:
        run.resume()
    assert [(one["sender"], one["routing_key"]) for one in published] == [(name, "slow")]


def test_a_stage_that_can_not_be_begun_fails_the_run(staged_on_sqlite: Staged) -> None:
    """Its task takes an argument no more: the run says so, and the step before has succeeded."""
    staged, app = staged_on_sqlite, staged_on_sqlite.mailbox.app

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


# Plans that can't be run.


def test_pydantic_is_refused(mailbox: Any) -> None:
    """Celery would read a model out of the step's message, in which its params are not."""

    def resize(params: dict[str, Any]) -> None:
        """Do nothing."""

    task = mailbox.task(stages.step(resize), name="tests.model", base=SafeTask, pydantic=True)
    with pytest.raises(InvalidPlan, match=r"pydantic=True.*Leave that out"):
        stages.make_plan([(task, 1)])


def test_a_task_of_another_app_is_refused(mailbox: Any) -> None:
    """Its messages would go to the current app's broker, whose workers do not know it."""
    other: Any = Celery("other", broker="memory://", set_as_current=False)

    def resize(params: dict[str, Any]) -> None:
        """Do nothing."""

    task = other.task(stages.step(resize), name="tests.theirs", base=SafeTask, shared=False)
    with pytest.raises(InvalidPlan, match=r"'tests\.theirs', which this process does not know"):
        stages.make_plan([(task, 1)])
    other.close()


@pytest.mark.parametrize("priority", [10**400, -(10**400), 2**53 + 1])
def test_a_priority_that_is_no_float_is_refused(priority: int, staged_on_sqlite: Staged) -> None:
    """It would be that of another entry, or none at all; those that floats have are taken."""
    task = staged_on_sqlite.task
    with pytest.raises(InvalidPlan, match="so large that others would equal it"):
        stages.make_plan([(task, priority, {"name": "a"})])
    plan = stages.make_plan([(task, number, {"name": "a"}) for number in (2**53, 2**53 + 2)])
    assert len(plan.stages) == 2


# Several databases.


def test_a_run_does_not_begin_before_a_commit_elsewhere(
    staged_on_sqlite: Staged, make_database: MakeDatabase
) -> None:
    """Inside atomic() of another database it is refused, and nothing is written or sent."""
    staged, other = staged_on_sqlite, make_database("sqlite-immediate")
    with transaction.atomic(using=other), pytest.raises(WrongTransaction, match=other):
        staged.start()
    assert (staged.tables(), staged.take()) == ([[], [], [], []], [])


class WithReplica(ToRuns):
    """A database router: runs are read from a replica, and written to ``alias``."""

    def db_for_read(self, model: Any, **hints: Any) -> str:
        """Return the replica."""
        return "replica"


@pytest.fixture(params=["sqlite", "postgres"])
def run_of_replica(
    request: pytest.FixtureRequest, mailbox: Any, make_database: MakeDatabase, tmp_path: Path
) -> Iterator[StageRun]:
    """A run, read from a replica that can't be written; that of SQLite is behind ever after."""
    alias = make_database(request.param)
    with routed_by(WithReplica(alias)):
        run = Staged(mailbox, alias).start("a", "b")
        settings = connections[alias].settings_dict
        if request.param == "postgres":
            replica = {name: settings[name] for name in ("ENGINE", "NAME", "USER", "HOST", "PORT")}
            replica["OPTIONS"] = {"options": "-c default_transaction_read_only=on"}
        else:
            copied = tmp_path / "replica.sqlite3"
            copyfile(settings["NAME"], copied)
            replica = {**sqlite_settings(copied, "sqlite"), "NAME": f"file:{copied}?mode=ro"}
        with registered("replica", replica):
            read = StageRun.objects.get()
            assert (read, read._state.db) == (run, "replica")
            yield read


def test_a_run_that_was_read_from_a_replica_is_changed(run_of_replica: StageRun) -> None:
    """It is aborted and resumed where runs are written, and is up to date after that."""
    assert run_of_replica.abort() is run_of_replica
    assert (run_of_replica.status, shown(run_of_replica)) == ("aborted", "aa")
    again = StageRun.objects.get()
    assert again._state.db == "replica"
    assert again.resume() is again
    assert (again.status, shown(again)) == ("running", "ww")


@pytest.mark.parametrize("delete", ["of the run", "of a queryset", "by pruning"])
def test_a_run_that_was_read_from_a_replica_is_deleted(
    delete: str, run_of_replica: StageRun
) -> None:
    """It and its steps are deleted where runs are written."""
    runs = StageRun.objects.filter(pk=run_of_replica.pk)
    match delete:
        case "of the run":
            run_of_replica.delete()
        case "of a queryset":
            runs.delete()
        case _:
            assert runs.prune() == 1
    alias = router.db_for_write(StageRun)
    assert alias != "replica"
    for model in (StageRun, StageStep):
        assert not model._default_manager.using(alias).exists()


# Eagerly.


@pytest.fixture
def eager(staged_on_sqlite: Staged) -> Staged:
    """Tasks run at once, in this process."""
    staged_on_sqlite.mailbox.app.conf.task_always_eager = True
    return staged_on_sqlite


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


def test_eager_stages_are_not_nested(eager: Staged) -> None:
    """So many of them would be more than Python's stack can take."""
    run = eager.start(*["a"] * 200)
    assert statuses(run) == ("succeeded", "s" * 200)
    assert len(eager.calls) == 200


# Queries.


def test_sending_many_again_takes_few_queries(staged_on_sqlite: Staged, settings: Settings) -> None:
    """Overdue steps of a run are noted and sent together, whatever their number."""
    settings.DJANGO_CELERY_SAFE = {**settings.DJANGO_CELERY_SAFE, "OUTBOX_SEND_TIMEOUT": 30}
    staged = staged_on_sqlite
    run = stages.start([(staged.task, 1, {"name": f"{number}"}) for number in range(300)])
    first = {message.id for message in staged.take()}
    StageRun.objects.using(staged.alias).update(stage_at=Now() - HOUR)
    with CaptureQueriesContext(connections[staged.alias]) as queries:
        repairs = sweep(StepTable(staged.alias))
    assert len(queries) < MOST_QUERIES
    assert (len(repairs), {repair.run for repair in repairs}) == (300, {run.pk})
    assert {message.id for message in staged.take()} == first
    assert set(staged.steps.values_list("note", "resent")) == {(repairs[0].reason, 1)}
