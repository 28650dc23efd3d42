"""The contract, on every store."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from django_celery_safe import cache_lock
from tests.conftest import MakeDatabase
from tests.contract import cases
from tests.kinds import KINDS
from tests.processes import run_in_processes

#: Cases in quarantine.
HURRIED = [
    pytest.param(case, marks=pytest.mark.quarantine("2026-11-26", reason), id=case.__name__)
    for case, reason in cases.HURRIED
]


@pytest.mark.parametrize("case", [*cases.QUICK, *HURRIED], ids=lambda case: case.__name__)
def test_every_store(any_store: str, case: cases.Case, tmp_path: Path) -> None:
    """Every store does what the case says."""
    case(tmp_path)


@pytest.mark.parametrize("case", cases.PATIENT, ids=lambda case: case.__name__)
def test_every_lease(fine_store: str, case: cases.Case, tmp_path: Path) -> None:
    """A store with short leases does what the case says."""
    case(tmp_path)


@pytest.mark.nightly
def test_every_lease_of_seconds(coarse_store: str, tmp_path: Path) -> None:
    """A store with leases of seconds does what the same cases say, all at the same time."""
    with ThreadPoolExecutor(len(cases.PATIENT)) as threads:
        outcomes = [threads.submit(case, tmp_path) for case in cases.PATIENT]
    for outcome in outcomes:
        outcome.result()


@pytest.mark.parametrize("case", cases.SHARED, ids=lambda case: case.__name__)
def test_shared_store(shared_store: str, case: cases.Case, tmp_path: Path) -> None:
    """Every store that processes share does what the case says."""
    case(tmp_path)


@pytest.mark.quarantine("2026-11-26", "2 s lease, 6.2 s of sleep")
@pytest.mark.parametrize("kind", KINDS)
def test_renewal_goes_on_beside_an_open_transaction(
    fine_shared_store: str, kind: str, make_database: MakeDatabase, tmp_path: Path
) -> None:
    """A lease is renewed while the body has a transaction open on the data's database."""
    data = make_database(kind)  # type: ignore[arg-type]
    cases.renewed_lock_outlives_three_leases_in_a_transaction(tmp_path, data)


def test_local_store_excludes_threads(use_store: object, tmp_path: Path) -> None:
    """Exactly one of 8 threads that race for a key in local memory gets it."""
    use_store("local")  # type: ignore[operator]
    names = [f"threads:{number}" for number in range(150)]
    barrier = threading.Barrier(8)
    won: list[str] = []

    def race() -> None:
        for name in names:
            barrier.wait()
            if cache_lock(name, renew=False).acquire():
                won.append(name)

    threads = [threading.Thread(target=race) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(won) == dict.fromkeys(names, 1)


def test_local_store_is_each_process_its_own(use_store: object) -> None:
    """Local memory can't keep processes apart: both get the lock."""
    use_store("local")  # type: ignore[operator]
    assert run_in_processes(take_for_ever, 2) == [True, True]


def take_for_ever() -> bool:
    """Take a lock and keep it."""
    return cache_lock("for ever").acquire()
