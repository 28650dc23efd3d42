"""Runs with a key, a name and an address."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, Final

import pytest
from django.db import connections, transaction

from django_celery_safe import AlreadyStarted, ConfigurationError, IllegalTransition, stages
from django_celery_safe.models import StageRun
from tests.sending.conftest import rolled_back
from tests.stages.test_messages import Staged, refuse, statuses

KEY: Final = "album:7"
#: Starts of one key at once.
STARTS: Final = 6


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
