"""On a real worker: results under the ids announced, and re-sends that no rollback loses."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from celery import chain, chord, group
from celery.canvas import Signature
from django.db import connections, transaction

from django_celery_safe import send_on_commit
from tests.app.models import Person
from tests.app.tasks import add, total
from tests.conftest import MakeDatabase
from tests.processes import CeleryWorker, Journal, wait_for
from tests.sending import tasks
from tests.servers import RedisServer

if TYPE_CHECKING:
    pass

#: Seconds until a result must be there.
PATIENCE = 20


@pytest.fixture(scope="module")
def shop(make_module_database: MakeDatabase) -> str:
    """The alias, here, of the SQLite file that is the worker's default database."""
    return make_module_database("sqlite-immediate")


@pytest.fixture(scope="module")
def worker(redis_server: RedisServer, shop: str) -> Iterator[CeleryWorker]:
    """One worker with two children for all tests of this module."""
    redis_server.flush()
    database = connections.settings[shop]
    settings = {
        "CELERY_BROKER_URL": redis_server.database_url(1),
        "CELERY_RESULT_BACKEND": redis_server.database_url(2),
        "DATABASES": {
            "default": {name: database[name] for name in ("ENGINE", "NAME", "OPTIONS")},
        },
    }
    with CeleryWorker("tests.sending.worker_app", concurrency=2, settings=settings) as worker:
        yield worker


@pytest.fixture
def journal(tmp_path: Path, broker: object, worker: CeleryWorker) -> Journal:
    """The journal of one test's tasks; the worker runs, and this process can send to it."""
    return Journal(tmp_path / "journal")


CANVASES: dict[str, tuple[Callable[[], Signature[Any]], Any]] = {
    "task": (lambda: add.s(1, 2), 3),
    "by name": (lambda: add.app.signature("tests.app.tasks.add", (1, 2)), 3),
    "chain": (lambda: chain(add.s(1, 2), add.s(3), add.s(4)), 10),
    "group": (lambda: group(add.s(1, 2), add.s(3, 4)), [3, 7]),
    "chord": (lambda: chord([add.s(1, 2), add.s(3, 4)], total.s()), 10),
    "chord of chords": (
        lambda: chord([chord([add.s(1), add.s(2)], total.s()), add.s(4)], total.s()),
        7,
    ),
    "group, then group, then task": (
        lambda: chain(group(add.s(1), add.s(2)), group(total.s(), total.s()), total.s()),
        6,
    ),
    "group of groups": (
        lambda: group(group(add.s(1, 2), add.s(3, 4)), group(add.s(5, 6))),
        [3, 7, 11],
    ),
    "chain that ends in a group": (lambda: chain(add.s(1, 2), group(add.s(1), add.s(2))), [4, 5]),
    "chord whose body is a group": (
        lambda: chord([add.s(1), add.s(2)], group(total.s(), total.s())),
        [3, 3],
    ),
}


@pytest.mark.parametrize("outbox", [False, True])
@pytest.mark.parametrize("when", ["at once", "once it is ready"])
@pytest.mark.parametrize(("make", "value"), CANVASES.values(), ids=CANVASES.keys())
def test_the_result_comes_under_the_id_announced(
    make: Callable[[], Signature[Any]],
    value: Any,
    when: str,
    outbox: bool,
    shop: str,
    journal: Journal,
) -> None:
    """The result of send_on_commit has the task's result after the commit, with all its parts."""
    with transaction.atomic(using=shop):
        result = send_on_commit(make(), using=shop, outbox=outbox)
        assert not result.ready()
    if when == "once it is ready":
        wait_for(result.ready, PATIENCE)
    assert result.get(timeout=PATIENCE) == value
    assert result.send_error is None
    for part in getattr(result, "results", ()):
        assert part.get(timeout=PATIENCE) in value


@pytest.mark.parametrize("failures", [0, 1, 3])
def test_a_retry_inside_do_once_runs_again(failures: int, shop: str, journal: Journal) -> None:
    """The rollback that Retry causes does not drop the message of the retry."""
    person = Person.everyone.using(shop).create()
    result = tasks.welcome.delay(person.pk, str(journal.path), failures, "at_least_once")
    assert result.get(timeout=PATIENCE) == "greeted"
    runs = journal.entries("began")
    assert [run["retries"] for run in runs] == list(range(failures + 1))
    assert {run["task_id"] for run in runs} == {result.id}
    assert journal.count("greeted") == 1
    person.refresh_from_db(using=shop, from_queryset=Person.everyone.using(shop))
    assert person.is_welcome_email_sent


def test_autoretry_inside_a_transaction_runs_again(shop: str, journal: Journal) -> None:
    """The retries that Celery makes go out; the sends of the failed runs do not."""
    before = Person.everyone.using(shop).count()
    result = tasks.reconnect.delay(str(journal.path), 2)
    assert result.get(timeout=PATIENCE) == "connected"
    wait_for(lambda: journal.count("sent by a run"))
    # Sent by the last run, it came after whatever an earlier one would have sent.
    assert journal.count("failed") == 2
    assert journal.count("sent by a run") == 1
    assert Person.everyone.using(shop).count() == before + 1


@pytest.mark.parametrize(
    ("kind", "value"),
    [("task", "replaced"), ("chain", 42), ("group", [3, 7]), ("chord", 10)],
)
def test_a_replacement_is_sent_in_spite_of_the_rollback(
    kind: str, value: Any, shop: str, journal: Journal
) -> None:
    """``self.replace`` ends the block by an exception; the replacement comes all the same."""
    before = Person.everyone.using(shop).count()
    result = tasks.replace.delay(str(journal.path), kind)
    assert result.get(timeout=PATIENCE) == value
    assert journal.count("replaced") == (1 if kind in ("task", "chain") else 0)
    assert journal.count("rolled back") == 0
    assert Person.everyone.using(shop).count() == before


def test_a_task_sends_at_its_own_commit(journal: Journal) -> None:
    """The next task finds the row; the one of the rolled-back transaction never comes."""
    result = tasks.send_in_a_transaction.delay(str(journal.path))
    kept, dropped = result.get(timeout=PATIENCE)
    wait_for(lambda: journal.count("looked"))
    # A message of its own to each child: both have nothing older left.
    group(add.s(n) for n in range(4))().get(timeout=PATIENCE)
    assert journal.tally("task_id", "looked") == {kept: 1}
    assert journal.count("looked", found=True) == 1
    assert add.AsyncResult(dropped).state == "PENDING"
