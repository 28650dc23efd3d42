"""Names that look alike are kept apart on every database, by calls, commands and admin."""

from contextlib import ExitStack
from typing import Any, Final

import pytest
from django.db import transaction
from pytest_django import Settings

from django_celery_safe import NotSerializable, cache_lock, idempotent
from django_celery_safe.databases import Now
from django_celery_safe.leases.holder import plain_name
from django_celery_safe.models import IdempotencyRecord, OutboxMessage
from tests.admin.conftest import every_page, make_visitor
from tests.admin.rows import record
from tests.app.tasks import add
from tests.commands import listed, refused, run
from tests.routing import AllIn, routed_by

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


@pytest.fixture(params=["sqlite-immediate", "postgres", "mariadb"], scope="module")
def alias(request: pytest.FixtureRequest, make_module_database: Any) -> Any:
    """The database of all of this app, of each kind in turn."""
    alias = make_module_database(request.param)
    with routed_by(AllIn(alias)):
        yield alias


@pytest.fixture(autouse=True)
def _without_rows(alias: str, settings: Settings, django_db_blocker: Any) -> Any:
    """Begin without rows, with the locks in that database."""
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": alias}
    with django_db_blocker.unblock():
        yield
        for model in (IdempotencyRecord, OutboxMessage):
            model.objects.using(alias).all()._raw_delete(alias)


def do(name: str) -> Any:
    """Do what a key stands for, once; return its result."""
    with idempotent(name) as claim:
        if claim:
            claim.finish(name)
        return claim.result


def test_keys() -> None:
    """Each key has a record of its own, and gets the result of no other."""
    for _ in range(2):
        assert [do(name) for name in NAMES] == NAMES


def test_keys_in_commands() -> None:
    """``show`` and ``forget`` take the very record, and know no other."""
    first, second = PAIRS["case"]
    for name in NAMES:
        if name != second:
            do(name)
    assert "There is no record" in refused("celery_idempotency", "show", second)[1]
    assert "There is no record" in refused("celery_idempotency", "forget", "--no-input", second)[1]
    do(second)
    for name in NAMES:
        run("celery_idempotency", "forget", "--no-input", name)
        left = {row["key"] for row in listed("celery_idempotency")}
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
        with transaction.atomic(using=alias), ExitStack() as stack:
            if name not in short:
                stack.enter_context(pytest.raises(NotSerializable, match="255 characters"))
            add.apply_async_on_commit((1,), outbox=True, using=alias, task_id=name)
            transaction.get_connection(alias).run_on_commit.clear()
    rows = OutboxMessage.objects.using(alias)
    assert [rows.get(task_id=name).task_id for name in short] == short
    first, second = PAIRS["case"]
    rows.filter(task_id=first).update(task="shop.sell", due_at=None, dead_at=Now())
    rows.filter(task_id=second).update(task="shop.SELL", due_at=None, dead_at=Now())
    options = "--no-input", f"--database={alias}", "--all", "--task"
    run("celery_outbox", "discard", *options, "shop.sell")
    assert [rows.filter(task_id=name).count() for name in (first, second)] == [0, 1]


def test_keys_in_the_admin() -> None:
    """Each record has a page of its own, and is forgotten there alone."""
    root = make_visitor(is_superuser=True)
    for name in NAMES:
        record(name)
    url = every_page(IdempotencyRecord, "x")["list"]
    for name in NAMES:
        row = IdempotencyRecord.objects.get(pk=plain_name(name))
        assert root.get(every_page(IdempotencyRecord, row.pk)["change"]).status == 200
        told = root.confirm(url, "forget", row.pk)
        assert told.messages == ["1 idempotency record was forgotten."]
        left = {one.key for one in IdempotencyRecord.objects.all()}
        assert left == {plain_name(other) for other in NAMES[NAMES.index(name) + 1 :]}
