"""Runs with a key, a name and an address."""

import pickle
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event
from typing import Any, Final

import pytest
from django.db import connections, transaction
from django.utils.translation import gettext_lazy

from django_celery_safe import AlreadyStarted, IllegalTransition, InvalidPlan, stages
from django_celery_safe.databases import Now
from django_celery_safe.models import StageRun
from django_celery_safe.signals import run_ended, run_resumed, run_started
from django_celery_safe.stages import engine
from django_celery_safe.stages.repairs import SETTLING, sweep
from django_celery_safe.stages.step_table import StepTable
from tests.concurrency.conftest import mailbox
from tests.idempotency.test_flags_race import isolate
from tests.sending.conftest import hearing
from tests.stages.test_messages import (
    Staged,
    impatient,
    of_module,
    refuse,
    staged,
    staged_on_sqlite,
)

__all__ = ["impatient", "mailbox", "of_module", "staged", "staged_on_sqlite"]

KEY: Final = "album:7"
#: Starts of one key at once.
STARTS: Final = 6


def start(staged: Staged, **labels: Any) -> StageRun:
    """Start a run of one step with the key."""
    return stages.start([(staged.task, 1, {"name": "a"})], **{"key": KEY, **labels})


def succeed(staged: Staged, run: StageRun) -> None:
    """Let a run succeed."""
    staged.deliver_all()


def let_fail(staged: Staged, run: StageRun) -> None:
    """Let a run's step fail."""
    staged.bodies["a"] = refuse
    staged.deliver_all()
    staged.bodies.clear()


def end_in_a_sweep(staged: Staged, run: StageRun) -> None:
    """Let a sweep end a run, because the process that ended its last step died after that."""
    run.steps.update(status="succeeded", ended_at=Now() - 2 * SETTLING)
    assert len(sweep(StepTable(staged.alias))) == 1


ENDS: Final[dict[str, Callable[[Staged, StageRun], object]]] = {
    "succeeds": succeed,
    "fails": let_fail,
    "is aborted": lambda staged, run: run.abort(),
    "is deleted": lambda staged, run: run.delete(),
    "is swept": end_in_a_sweep,
}


@pytest.mark.parametrize("end", ENDS)
def test_a_key_has_one_run_until_that_ends(end: str, staged: Staged) -> None:
    """A second start raises an error that holds the first run; after its end it is possible."""
    run = start(staged)
    rows = StageRun.objects.using(staged.alias)
    for _ in range(2):
        with pytest.raises(AlreadyStarted) as caught:
            start(staged)
        assert (caught.value.key, caught.value.run) == (KEY, run)
        assert f"Run {run.pk} (album:7), which is waiting, has the key" in str(caught.value)
        assert rows.count() == 1
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    ENDS[end](staged, run)
    again = start(staged)
    assert again.pk != run.pk
    assert rows.filter(key=KEY).latest("pk") == again


def test_other_keys_and_runs_without_one_start(staged: Staged) -> None:
    """Keys are compared whole and with their case; runs without a key have nothing in common."""
    for key in (KEY, "album:71", "ALBUM:7", "", ""):
        start(staged, key=key)
    assert StageRun.objects.using(staged.alias).active().count() == 5


def test_starts_at_the_same_time(staged: Staged) -> None:
    """Only one of several starts at once begins its run, and the others get that run."""
    barrier = Barrier(STARTS)
    plan = stages.make_plan([(staged.task, 1, {"name": "a"})])

    def start_too(_: int) -> tuple[bool, int]:
        try:
            barrier.wait(30)
            return True, stages.start(plan, key=KEY).pk
        except AlreadyStarted as error:
            return False, error.run.pk
        finally:
            connections[staged.alias].close()

    with ThreadPoolExecutor(STARTS) as pool:
        found = list(pool.map(start_too, range(STARTS)))
    assert sorted(won for won, _ in found) == [False] * (STARTS - 1) + [True]
    assert len({pk for _, pk in found}) == 1


@pytest.mark.quarantine("2026-11-26", "a time stands for waiting")
def test_others_wait_for_a_start_that_is_rolled_back(staged: Staged) -> None:
    """One of those that wait for its key begins its run then, and the others hear of that run."""
    plan = stages.make_plan([(staged.task, 1, {"name": "a"})])
    barrier, has_begun = Barrier(STARTS), Event()

    def start_and_roll_back() -> None:
        with transaction.atomic(using=staged.alias):
            stages.start(plan, key=KEY)
            has_begun.set()
            time.sleep(1)  # the others wait by then, or come too late to matter
            transaction.set_rollback(True, using=staged.alias)
        connections[staged.alias].close()

    def start_too(_: int) -> bool:
        has_begun.wait(30)
        barrier.wait(30)
        try:
            stages.start(plan, key=KEY)
        except AlreadyStarted:
            return False
        finally:
            connections[staged.alias].close()
        return True

    with ThreadPoolExecutor(STARTS + 1) as pool:
        first = pool.submit(start_and_roll_back)
        found = list(pool.map(start_too, range(STARTS)))
        first.result()
    assert sorted(found) == [False] * (STARTS - 1) + [True]
    assert StageRun.objects.using(staged.alias).count() == 1


def test_a_start_that_is_rolled_back_leaves_the_key(staged: Staged) -> None:
    """Inside atomic() a key is taken with the commit, and a refused start harms nothing else."""
    with transaction.atomic(using=staged.alias):
        start(staged)
        transaction.set_rollback(True, using=staged.alias)
    with transaction.atomic(using=staged.alias):
        run = start(staged)
        with pytest.raises(AlreadyStarted):
            start(staged)
        assert start(staged, key="album:8").pk
    assert len(staged.take()) == 2
    assert StageRun.objects.using(staged.alias).first() == run


def test_a_run_that_this_transaction_can_not_see(postgres_alias: str, mailbox: Any) -> None:
    """Under REPEATABLE READ the error has no run if that was started after the transaction was."""
    isolate(postgres_alias, "REPEATABLE_READ")
    labels = engine.make_labels(KEY, "", "")
    plan = stages.make_plan([(Staged(mailbox, postgres_alias).task, 1, {"name": "a"})])
    store = StepTable(postgres_alias)

    def start_elsewhere() -> None:
        try:
            engine._write_once(store, plan, labels)
        finally:
            connections[postgres_alias].close()

    with transaction.atomic(using=postgres_alias), ThreadPoolExecutor(1) as pool:
        assert not store.runs().exists()
        pool.submit(start_elsewhere).result()
        with pytest.raises(AlreadyStarted, match="Another run has the key 'album:7'") as caught:
            engine._write_once(store, plan, labels)
    assert caught.value.run is None


def test_a_run_whose_key_is_taken_can_not_be_resumed(staged: Staged) -> None:
    """A failed run waits with its resume until the next run of its key has ended."""
    failed = start(staged)
    let_fail(staged, failed)
    failed.refresh_from_db()
    second = start(staged)
    before = staged.tables()
    with pytest.raises(IllegalTransition, match="another run has its key 'album:7'"):
        failed.resume()
    assert staged.tables() == before
    second.abort()
    staged.take()
    failed.resume()
    with pytest.raises(AlreadyStarted):
        start(staged)
    staged.deliver_all()
    failed.refresh_from_db()
    assert failed.status == "succeeded"


def test_texts_that_can_be_kept(staged_on_sqlite: Staged) -> None:
    """A name may be lazy, long and of any characters; an address may be an object's."""

    class Album:
        def get_absolute_url(self) -> str:
            return "/albums/7/"

    run = start(staged_on_sqlite, name=gettext_lazy("Save"), url=Album())
    assert (run.name, run.url) == ("Save", "/albums/7/")
    assert (str(run), run.title) == (f"run {run.pk} (Save)", f"Run {run.pk} (Save)")
    long = start(staged_on_sqlite, key="", name="相" * 300 + "\0", url="https://example.com/?a=1")
    assert (len(long.name), long.name[-2:]) == (255, "相…")
    assert start(staged_on_sqlite, key="", name="a\nb\0").name == "a b "
    assert start(staged_on_sqlite, key="k" * 255).title.endswith("kkk)")
    plain = start(staged_on_sqlite, key="")
    assert (plain.key, plain.active_key, plain.name, plain.url) == ("", None, "", "")
    assert str(plain) == f"run {plain.pk}"


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        ({"key": 7}, "its key is 7"),
        ({"key": None}, "its key is None"),
        ({"name": None}, "its name is None"),
        ({"key": "k" * 256}, "its key has 256 characters"),
        ({"key": "a\0"}, "its key is 'a\\x00', with characters that can't be seen"),
        ({"url": "javascript:alert(1)"}, "its url is 'javascript:alert(1)', which is not an"),
        ({"url": "/" + "a" * 2000}, "its url has 2001 characters"),
        ({"url": 7}, "its url is '7'"),
    ],
)
def test_texts_that_can_not_be_kept(
    labels: dict[str, Any], says: str, staged_on_sqlite: Staged
) -> None:
    """They are refused at the start, and nothing is written."""
    with pytest.raises(InvalidPlan) as caught:
        start(staged_on_sqlite, **labels)
    assert says in str(caught.value)
    assert staged_on_sqlite.tables() == [[]] * 4


def test_events_have_the_name(staged_on_sqlite: Staged, caplog: pytest.LogCaptureFixture) -> None:
    """Signals and log name a run by its key and its name, or its key if it has none."""
    with hearing(run_started, run_ended, run_resumed) as heard:
        run = start(staged_on_sqlite, name="make album 7")
        let_fail(staged_on_sqlite, run)
        run.refresh_from_db()
        run.resume()
    assert {(one["run"], one["key"], one["name"]) for one in heard} == {
        (run.pk, KEY, "make album 7")
    }
    assert len(heard) == 3
    assert f"Run {run.pk} (make album 7) ended: failed" in caplog.text
    with hearing(run_started) as heard:
        start(staged_on_sqlite, key="album:8")
    assert heard[0]["name"] == "album:8"


def test_a_step_has_the_key_of_its_run(staged_on_sqlite: Staged) -> None:
    """A function that asks for its run can use the key, for what it is to do once."""
    keys = []

    @stages.step
    def work(params: dict[str, Any], run: StageRun) -> None:
        keys.append(run.key)

    task = staged_on_sqlite.mailbox.task(work, name="tests.key")
    stages.start([(task, 1)], key=KEY)
    staged_on_sqlite.deliver(staged_on_sqlite.take_one())
    assert keys == [KEY]


def test_search(staged: Staged) -> None:
    """Runs are found by a part of their key or name, and by the task of a step."""
    run = start(staged, name="Make Ann's album")
    start(staged, key="feed:1")
    rows = StageRun.objects.using(staged.alias)
    for text in ("ann", "ALBUM:7", "bum"):
        assert list(rows.search(text)) == [run]
    assert not rows.search("bob").exists()
    assert rows.get(key__istartswith="ALBUM") == run
    assert not rows.filter(key=KEY.upper()).exists()
    assert rows.having(staged.task.name).count() == 2
    assert not rows.having("tests.other").exists()
