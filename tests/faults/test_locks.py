"""The locks keep their promises while all goes wrong, and the oracle sees it if they do not."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from django_celery_safe.leases.holder import place_name
from tests.faults import __main__ as runner
from tests.faults.lab import Lab
from tests.faults.locks.history import History
from tests.faults.locks.holdings import holdings_of
from tests.faults.locks.oracle import ORACLE
from tests.faults.locks.plan import ROUGH, Plan
from tests.faults.locks.records import NO, YES, MemoryLoss, Pause, Record
from tests.faults.locks.resource import Resource
from tests.faults.locks.scenario import OURS, OUTSTAYING, VARIANTS, record
from tests.servers import RedisServer, ServerPool

pytestmark = pytest.mark.nightly

#: A run of a second or two in which everything happens.
SHORT = Plan(
    operations=200,
    processes=4,
    store="redis-cache",
    locks=2,
    span=(0.04, 0.12),
    ways=ROUGH,
    at_least=1,
)

#: The checks' names.
Found = set[str]


@pytest.fixture(scope="module")
def found(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Found]]:
    """
    Run each fault, and return what the oracle finds.

    The runs mostly wait, so they go on side by side, each on a Redis of its own; that
    of this test run says whether there is one at all.
    """
    folder = tmp_path_factory.mktemp("faults")  # here, because its first use fails in threads
    with ThreadPoolExecutor(4) as pool:
        futures: dict[str, Future[Found]] = {
            fault: pool.submit(find, fault, folder) for fault in VARIANTS
        }
        yield lambda fault: futures[fault].result()


def find(fault: str, folder: Path) -> Found:
    """Return the findings of the oracle in up to six runs, since each run depends on chance."""
    names: Found = set()
    for seed in range(6):
        own = folder / f"{fault}-{seed}"
        own.mkdir()
        with ServerPool() as servers, Lab(own, servers.get, no_database) as lab:
            history = record(replace(SHORT, broken=fault, seed=seed), lab)
        names = ORACLE.found(history)
        if names.issuperset(VARIANTS[fault]):
            break
    return names


def no_database(kind: str) -> str:
    """Give none."""
    raise NotImplementedError


@pytest.mark.quarantine("2026-11-26", "six seeds and luck")
@pytest.mark.parametrize("fault", VARIANTS)
def test_a_broken_store_is_rejected(fault: str, found: Callable[[str], Found]) -> None:
    """The history of a store, a lock or a resource with this fault is rejected for this fault."""
    assert found(fault).issuperset(VARIANTS[fault])


def test_a_slow_answer_alone_breaks_nothing(lab: Lab) -> None:
    """A lock that gets its answers late is trusted for a shorter time, and nothing is wrong."""
    lock = OURS + "SlowAnswerLock"
    plan = replace(SHORT, operations=100, ways=OUTSTAYING, make_lock=lock)
    assert ORACLE.found(record(plan, lab)) <= {"too little"}


@pytest.mark.parametrize(("nemesis", "limit"), [("pause", 1), ("restart", 1), ("restart", 3)])
def test_our_locks_keep_their_promises(nemesis: str, limit: int, lab: Lab) -> None:
    """Nothing is wrong with our locks while processes stand still and Redis loses its memory."""
    plan = replace(SHORT, operations=1000, processes=6, nemesis=nemesis, locks=None, limit=limit)
    history = record(replace(plan, span=(0.04, 0.15), at_least=6.0), lab)
    assert ORACLE.check(history) == []
    counts = ORACLE.count(history)
    assert counts["operations"] >= 1000
    assert counts["outlived pauses"] > 0
    assert (counts["restarts"] > 0) is (nemesis == "restart")


# Histories written by hand; all times in ms.


def at(moment: float) -> int:
    """Return a moment in ns."""
    return round(moment * 1e6)


def acquire(
    token: str,
    sent: float,
    lease: float,
    fence: int | None = None,
    process: int = 0,
    place: int = 1,
) -> Record:
    """Return an acquisition whose answer took 1 ms, trusted until ``sent + lease``."""
    fence = int(sent) + 1 if fence is None else fence
    answer = (YES, token, fence, lease / 1000, at(lease - 1))
    return Record(process, "acquire", place_name("a", place), at(sent), at(sent + 1), *answer)


def act(
    action: str, token: str, sent: float, outcome: str = YES, left: float = 0, **more: Any
) -> Record:
    """Return something that a holder did within 1 ms."""
    return Record(0, action, "a", at(sent), at(sent + 1), outcome, token, left=at(left), **more)


def refused(sent: float) -> Record:
    """Return a try to acquire what someone else held."""
    return Record(1, "acquire", "a", at(sent), at(sent + 1), NO, seconds=0.1)


def violations_in(*records: Record, **more: Any) -> Found:
    """Return what the checker finds in these records, but that there are too few."""
    history = History(list(records), 2, grace=0.05, idle=0.05, **more)
    names = ORACLE.found(history)
    assert "too little" in names
    return names - {"too little"}


def loss(since: float) -> list[MemoryLoss]:
    """Return a restart that took 10 ms to end the server and 10 to start it."""
    return [MemoryLoss(at(since), at(since + 10), at(since + 20))]


def test_two_with_a_lock_are_found() -> None:
    """One who acquires before the other's promise is over is a second holder."""
    assert violations_in(acquire("x", 0, 100), acquire("y", 98, 100)) == {"two holders"}
    assert violations_in(acquire("x", 0, 100), acquire("y", 100, 100)) == set()


def test_more_than_the_limit_are_found() -> None:
    """A lock with places has one holder for each, and no more places than its limit."""
    first, second = acquire("x", 0, 100), acquire("y", 10, 100, place=2)
    assert violations_in(first, second, limit=2) == set()
    assert violations_in(first, second) == {"too many holders"}
    same = acquire("z", 20, 100, place=2)
    assert violations_in(first, second, same, limit=2) == {"two holders"}
    third = acquire("z", 20, 100, place=3)
    assert violations_in(first, second, third, limit=2) == {"too many holders"}
    assert violations_in(first, second, third, limit=2, losses=loss(5)) == set()
    assert violations_in(first, act("release", "x", 15), second, third, limit=2) == set()
    at_other_lock = third._replace(lock="b:place:3")
    assert violations_in(first, second, at_other_lock, limit=2) == set()


def test_a_refusal_needs_as_many_holders_as_there_are_places() -> None:
    """A lock is refused only while all of its places may be held."""
    first, second = acquire("x", 0, 20), acquire("y", 0, 60, place=2, fence=9)
    assert violations_in(first, second, refused(65), limit=2) == set()
    assert violations_in(first, second, refused(85), limit=2) == {"refusals without a holder"}
    assert violations_in(first, refused(10), limit=2) == {"refusals without a holder"}


@pytest.mark.parametrize("limit", [1, 2])
def test_a_wait_for_a_place_that_is_free_is_found(limit: int) -> None:
    """A waiter has a place within the grace after one is free, if its process runs."""
    held = [acquire(f"x{place}", 0, 20, fence=place, place=place) for place in range(1, limit + 1)]
    late = acquire("y", 5, 90)._replace(returned=at(190), process=1)
    soon = late._replace(returned=at(160))
    assert violations_in(*held, late, limit=limit) == {"idle places"}
    assert violations_in(*held, late, limit=limit, losses=loss(100)) == set()
    assert violations_in(*held, soon, limit=limit) == set()
    paused = [Pause(1, at(100), at(120))]
    assert violations_in(*held, late, limit=limit, pauses=paused) == set()


def test_a_promise_ends_with_the_request_to_release() -> None:
    """From the request to release on its holder does not count as trusted."""
    released = act("release", "x", 20)
    assert violations_in(acquire("x", 0, 100), released, acquire("y", 20, 100)) == set()
    assert violations_in(acquire("x", 0, 100), released, acquire("y", 18, 100)) == {"two holders"}


def test_locks_of_two_names_do_not_meet() -> None:
    """Two may be trusted at once with two locks."""
    other = acquire("y", 50, 100)._replace(lock="b")
    assert violations_in(acquire("x", 0, 100), other) == set()


def test_a_shorter_lease_replaces_a_longer_one() -> None:
    """A holder that asks for a shorter lease gives up the longer one."""
    shorter = act("extend", "x", 10, left=20, seconds=0.02)
    assert violations_in(acquire("x", 0, 100), shorter, acquire("y", 31, 60)) == set()
    assert violations_in(acquire("x", 0, 100), shorter, acquire("y", 29, 60)) == {"two holders"}
    lost = act("extend", "x", 10, "LockLost", seconds=0.02)._replace(returned=at(99))
    assert violations_in(acquire("x", 0, 100), lost, acquire("y", 31, 60)) == set()
    assert violations_in(acquire("x", 0, 100), lost, acquire("y", 28, 60)) == {"two holders"}


def test_a_longer_lease_counts_from_its_answer() -> None:
    """The promise of an extended lease must be kept too."""
    longer = act("extend", "x", 10, left=98, seconds=0.1)
    assert violations_in(acquire("x", 0, 50), longer, acquire("y", 60, 60)) == {"two holders"}


def test_trust_never_comes_back() -> None:
    """Who is trusted before and after another is a second holder."""
    between = [acquire("y", 60, 30, process=1), act("release", "y", 70)]
    back = act("extend", "x", 80, left=50, seconds=0.05)
    assert violations_in(acquire("x", 0, 50), *between, back) == {"two holders"}
    lost = act("extend", "x", 80, "LockLost")
    assert violations_in(acquire("x", 0, 50), *between, lost) == set()


def test_held_alone_is_trust() -> None:
    """A holder that sees ``held`` after its time is a second one, whatever ``remaining`` says."""
    seen = act("look", "x", 70)
    assert violations_in(acquire("x", 0, 50), seen, acquire("y", 55, 60)) == {"two holders"}
    over = act("look", "x", 70, NO)
    assert violations_in(acquire("x", 0, 50), over, acquire("y", 55, 60)) == set()


def test_an_answer_that_came_too_late_is_no_trust() -> None:
    """Who got its answer when the lease was over was never trusted."""
    late = acquire("x", 0, 50)._replace(returned=at(90), left=0)
    assert violations_in(late, acquire("y", 60, 60)) == set()


def test_memory_loss_excuses_what_it_explains() -> None:
    """Two holders are excused if the first got its lease before the loss, until that is over."""
    before, after = acquire("x", 0, 100), acquire("y", 60, 100)
    assert violations_in(before, after) == {"two holders"}
    assert violations_in(before, after, losses=loss(40)) == set()
    assert violations_in(before, after, losses=loss(70)) == {"two holders"}
    # Both after it, or longer than a lease can run.
    assert violations_in(before, after, losses=loss(-30)) == {"two holders"}
    endless = before._replace(left=at(300))
    longer = after._replace(left=at(300))
    assert violations_in(endless, longer, losses=loss(40)) == {"two holders"}


@pytest.mark.parametrize(
    "broken",
    [
        act("release", "x", 50, NO),
        act("ensure", "x", 50, "LockLost"),
        act("extend", "x", 50, "LockLost", seconds=0.1),
        act("look", "x", 50, NO),
        act("write", "x", 50, NO, fence=1, number=1),
    ],
    ids=lambda broken: broken.action,
)
def test_a_broken_promise_is_found(broken: Record) -> None:
    """A holder loses nothing while it is promised the lock, unless the store lost its memory."""
    promised = acquire("x", 0, 100)
    assert violations_in(promised, broken) == {"broken promises"}
    assert violations_in(promised, broken, losses=loss(40)) == set()
    late = broken._replace(sent=at(101), returned=at(102))
    assert violations_in(promised, late) == set()


def test_fences_grow_in_the_order_of_acquisitions() -> None:
    """Who asks after another's answer has the larger fence; at the same time any order will do."""
    first, second = acquire("x", 0, 10, fence=5), acquire("y", 20, 10, fence=4)
    assert violations_in(first, second) == {"unordered fences"}
    assert violations_in(first, second._replace(fence=5)) == {"unordered fences"}
    assert violations_in(first, second._replace(fence=6)) == set()
    elsewhere = second._replace(lock="b")
    assert violations_in(first, elsewhere) == {"unordered fences"}
    at_once = elsewhere._replace(sent=first.sent)
    assert violations_in(first, at_once) == set()
    assert violations_in(first, second, losses=loss(12)) == {"unordered fences"}


def test_a_fence_is_given_once() -> None:
    """Two acquisitions at the same time have different fences."""
    first = acquire("x", 0, 10, fence=5)
    twin = acquire("y", 0, 10, fence=5)._replace(lock="b")
    assert violations_in(first, twin) == {"unordered fences"}


def test_an_older_write_is_found() -> None:
    """A write is not accepted after one with a newer fence."""
    first, second = acquire("x", 0, 10, fence=5), acquire("y", 20, 10, fence=6)
    newer = act("write", "y", 22, fence=6, number=1)
    older = act("write", "x", 24, fence=5, number=2)
    assert violations_in(first, second, newer, older) == {"older writes"}
    assert violations_in(first, second, newer, older._replace(outcome=NO)) == set()


def test_a_write_of_an_older_acquisition_is_found() -> None:
    """A fence that is larger only by a fault does not make an older acquisition newer."""
    first, second = acquire("x", 0, 10, fence=6), acquire("y", 20, 10, fence=5)
    newer = act("write", "y", 22, fence=5, number=1)
    older = act("write", "x", 24, fence=6, number=2)
    found = violations_in(first, second, newer, older)
    assert found == {"older writes", "unordered fences"}


def test_a_missing_write_is_found() -> None:
    """Every write that the resource counted must be in the records."""
    write = act("write", "x", 2, fence=1, number=2)
    assert violations_in(acquire("x", 0, 10), write) == {"incomplete answers"}


def test_a_refusal_needs_a_holder() -> None:
    """No request is refused once every possible lease and the grace are over."""
    held = acquire("x", 0, 20)
    assert violations_in(held, refused(71)) == set()
    assert violations_in(held, refused(72)) == {"refusals without a holder"}
    assert violations_in(held, act("release", "x", 10), refused(60)) == set()
    released = violations_in(held, act("release", "x", 10), refused(62))
    assert released == {"refusals without a holder"}
    assert violations_in(refused(0)) == {"refusals without a holder"}


def test_an_acquisition_without_an_answer_may_be_a_holder() -> None:
    """A process that got no answer may have acquired the lock all the same."""
    unknown = refused(0)._replace(outcome="LockBackendError")
    assert violations_in(unknown, refused(90)) == set()


def test_an_answer_is_complete() -> None:
    """An acquisition has a token of its own and a fence."""
    assert violations_in(acquire("x", 0, 10)._replace(token=None)) == {"incomplete answers"}
    assert violations_in(acquire("x", 0, 10)._replace(fence=None)) == {"incomplete answers"}
    twice = violations_in(acquire("x", 0, 10), acquire("x", 20, 10))
    assert twice == {"incomplete answers"}


def test_an_empty_history_proves_nothing() -> None:
    """A history in which nothing happened is rejected, with what is missing."""
    violations = ORACLE.check(History([], 2, nemesis="restart"))
    missing = " ".join(violation.text for violation in violations)
    for name in ("process 1", "tries met", "ended by lease", "outlived pauses", "restarts"):
        assert name in missing


def test_a_pause_counts_if_a_lease_ended_in_it() -> None:
    """A pause outlived a lease if its process held a lock whose lease ended meanwhile."""
    records = [acquire("x", 0, 50), act("release", "x", 200, NO)]
    history = History(records, 1)
    for since, until, outlived in [(10, 190, 1), (10, 40, 0), (310, 400, 0)]:
        history.pauses = [Pause(0, at(since), at(until))]
        assert ORACLE.count(history)["outlived pauses"] == outlived, (since, until)


def test_trust_is_taken_at_its_shortest() -> None:
    """Trust begins with the answer and ends with what ``remaining`` said, counted from there."""
    (holding,) = holdings_of([acquire("x", 10, 50)])
    assert (holding.since, holding.until) == (at(11), at(60))


def test_the_resource_takes_no_older_fence(tmp_path: Path) -> None:
    """The resource counts all writes and accepts those with the largest fence so far."""
    resource, again = Resource(tmp_path), Resource(tmp_path)
    assert resource.write("a", 5) == (1, True)
    assert again.write("a", 4) == (2, False)
    assert resource.write("a", 5) == (3, True)
    assert resource.write("b", 1) == (1, True)


def test_a_short_run_proves_nothing(lab: Lab) -> None:
    """The oracle says so where too little happened."""
    history = record(Plan(operations=4, processes=2), lab)
    assert history.operations >= 4
    assert "too little" in ORACLE.found(history)


def test_the_command_refuses_a_restart_that_loses_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A database keeps its locks over a restart, so that run would prove nothing."""
    with pytest.raises(SystemExit):
        runner.main(["locks", "--store", "postgres", "--nemesis", "restart"])
    assert "use pause" in capsys.readouterr().err


def test_a_finding_shows_its_records() -> None:
    """A violation by two holders fits a terminal, and shows both acquisitions."""
    history = History([acquire("x" * 32, 0, 100), acquire("y" * 32, 50, 100)], 2)
    (violation,) = (one for one in ORACLE.check(history) if one.check == "two holders")
    assert len(violation.details) == 6
    assert max(map(len, violation.details)) <= 78
