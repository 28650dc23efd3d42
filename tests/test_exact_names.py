"""Names that look alike are kept apart on every database, by calls and commands."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Final

import pytest
from pytest_django import Settings

from django_celery_safe import NotSerializable, cache_lock, forget_record, idempotent
from django_celery_safe.models import IdempotencyRecord, OutboxMessage
from tests.app.tasks import add
from tests.commands import listed, run
from tests.routing import AllIn, routed_by
from tests.sending.conftest import dying_sender

pytestmark = pytest.mark.sql

#: Pairs of names that a collation, a padding or a cut would take for the same.
PAIRS: Final = {
    "case": ("order:ABC", "order:abc"),
    "accent": ("caf\N{LATIN SMALL LETTER E WITH ACUTE}", "cafe"),
    "composed": ("caf\N{LATIN SMALL LETTER E WITH ACUTE}", "cafe\N{COMBINING ACUTE ACCENT}"),
    "space": ("tail", "tail "),
    "emoji": ("\N{GRINNING FACE}", "\N{GRINNING FACE WITH SMILING EYES}"),
    "255": (254 * "x" + "y", 254 * "x" + "Y"),
    "4,000": (3999 * "x" + "y", 3999 * "x" + "Y"),
}
NAMES: Final = sorted({name for pair in PAIRS.values() for name in pair})


@pytest.fixture(autouse=True)
def alias(db_alias: str, settings: Settings) -> Iterator[str]:
    """The database of all of this app, its locks included."""
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": db_alias}
    with routed_by(AllIn(db_alias)):
        yield db_alias


def do(name: str) -> Any:
    """Do what a key stands for, once; return its result."""
    with idempotent(name) as claim:
        if claim:
            claim.finish(name)
        return claim.result


def test_keys() -> None:
    """Each key has a record of its own, which alone is forgotten."""
    first, second = PAIRS["case"]
    for _ in range(2):
        assert [do(name) for name in NAMES if name != second] == [n for n in NAMES if n != second]
    assert not forget_record(second)
    assert do(second) == second
    for name in NAMES:
        assert forget_record(name)
        left = {row.claim.name for row in IdempotencyRecord.objects.listed()}
        assert left == set(NAMES[NAMES.index(name) + 1 :])
    assert first not in left


def test_locks() -> None:
    """All locks can be held at once, and each is found, listed and freed alone."""
    locks = [cache_lock(name, timeout=60) for name in NAMES]
    assert [lock.acquire() for lock in locks] == [True] * len(NAMES)
    assert not any(cache_lock(name).acquire() for name in NAMES)
    for number, lock in enumerate(locks):
        left = set(NAMES[number + 1 :])
        if number % 2:
            lock.release()
        else:
            run("celery_locks", "release", "--no-input", "--force", lock.name)
            lock.release()
        assert {row["name"] for row in listed("celery_locks")} == left


def test_task_ids_and_names(alias: str) -> None:
    """The outbox keeps each task id as it is; one that is too long is refused at the send."""
    short = [name for name in NAMES if len(name) <= 255]
    for name in NAMES:
        with dying_sender(alias), ExitStack() as stack:
            if name not in short:
                stack.enter_context(pytest.raises(NotSerializable, match="255 characters"))
            add.apply_async_on_commit((1,), outbox=True, using=alias, task_id=name)
    rows = OutboxMessage.objects.using(alias)
    assert [rows.get(task_id=name).task_id for name in short] == short
    first, second = PAIRS["case"]
    rows.filter(task_id=first).update(task="shop.sell", due_at=None, state="dead")
    rows.filter(task_id=second).update(task="shop.SELL", due_at=None, state="dead")
    assert [row["task_id"] for row in listed("celery_outbox", "--task", "shop.sell")] == [first]
