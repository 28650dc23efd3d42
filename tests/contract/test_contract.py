"""The contract, on every store."""

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from django.db import connections, transaction
from pytest_django import Settings

from django_celery_safe import cache_lock
from tests.app.models import Person
from tests.clock import HeldClock
from tests.conftest import MakeCaches, MakeDatabase
from tests.contract import cases
from tests.contract.conftest import SHARED_STORES, params
from tests.servers.databases import DatabaseKind

UseStore = Callable[[str], None]

#: Each kind of store in which several may hold a lock.
LIMITED = ["django-redis-of-3", "database-of-3"]


@pytest.mark.parametrize("name", params(*SHARED_STORES, *LIMITED))
def test_every_store(name: str, use_store: UseStore, tmp_path: Path) -> None:
    """Every store does what each case says."""
    use_store(name)
    for case in cases.QUICK:
        case(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", params(*SHARED_STORES, *LIMITED))
def test_every_store_in_real_time(name: str, use_store: UseStore, tmp_path: Path) -> None:
    """The same with leases of ten seconds that end, and with other processes."""
    use_store(name)

    def play(*played: cases.Case) -> None:
        try:
            for case in played:
                case(tmp_path)
        finally:
            connections.close_all()

    # All at once, because they wait.
    stories = [cases.BY_PROCESSES, *[[case] for case in cases.PATIENT]]
    with ThreadPoolExecutor(len(stories)) as threads:
        outcomes = [threads.submit(play, *story) for story in stories]
    for outcome in outcomes:
        outcome.result()


@pytest.mark.parametrize("name", ["local", "local-of-3"])
def test_local_store(name: str, use_store: UseStore, clock: HeldClock, tmp_path: Path) -> None:
    """The store in this process's memory does what each case says, as time passes."""
    use_store(name)
    for case in [*cases.QUICK, *cases.PATIENT]:
        case(tmp_path)


@pytest.mark.sql
def test_renewal_goes_on_beside_an_open_transaction(
    use_store: UseStore, clock: HeldClock, db_kind: DatabaseKind, make_database: MakeDatabase
) -> None:
    """A lease is renewed while the body has a transaction open on the data's database."""
    use_store("database")
    data = make_database(db_kind)
    with cache_lock("renewed", timeout=30) as lock, transaction.atomic(using=data):
        Person.everyone.using(data).create(email="written, and not committed")
        clock.advance(100)
        assert lock.held
        lock.ensure()


def test_local_store_excludes_threads(use_store: UseStore) -> None:
    """Exactly one of 8 threads that race for a key in local memory gets it."""
    use_store("local")
    names = [f"threads:{number}" for number in range(150)]
    barrier = threading.Barrier(8)
    won: list[str] = []

    def race(_: int) -> None:
        for name in names:
            barrier.wait()
            if cache_lock(name).acquire():
                won.append(name)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(race, range(8)))
    assert Counter(won) == dict.fromkeys(names, 1)


# Broken stores are caught by the contract's cases.


#: Each fault, and the cases that must fail on it.
FAULTS: list[tuple[str, cases.Case]] = [
    ("NoOwnerCheckCache", cases.late_holder_spares_the_new_one),
    ("NoOwnerCheckCache", cases.operator_frees_only_what_was_seen),
    ("NoExpiryCache", cases.holder_is_shown),
    ("NoExpiryCache", cases.killed_and_paused_holders_lose_their_locks_by_processes),
    ("FencePerProcessCache", cases.fences_grow_by_processes),
    ("ReadThenWriteCache", partial(cases.one_winner_for_each_new_key_by_processes, keys=20)),
    ("ReadThenWriteCache", partial(cases.one_winner_for_each_expired_key_by_processes, keys=20)),
]


def name_of(case: cases.Case) -> str:
    """Return the name of a case, also with arguments of its own."""
    return str(getattr(case, "func", case).__name__)


#: Broken stores that break each place of a lock, too.
OF_PLACES = [
    *[each for each in FAULTS if each[0] in {"NoOwnerCheckCache", "NoExpiryCache"}],
    ("OneTooManyCache", partial(cases.one_winner_for_each_new_key_by_processes, keys=20)),
]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fault", "case", "limit"),
    [
        pytest.param(fault, case, limit, id=f"{fault}-{name_of(case)}-of-{limit}")
        for limit, faults in (("1", FAULTS), ("3", OF_PLACES))
        for fault, case in faults
    ],
)
def test_a_broken_store_fails(
    fault: str,
    case: cases.Case,
    limit: str,
    settings: Settings,
    redis_cache_settings: MakeCaches,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A store with this fault fails this case."""
    cases.hold_other_places.cache_clear()
    monkeypatch.setenv(cases.LIMIT, limit)
    settings.CACHES = redis_cache_settings(f"tests.faulty.{fault}")
    with pytest.raises((AssertionError, TimeoutError)):
        case(tmp_path)
