"""
Random schedules of holders that take, keep, extend, lose and free a few locks.

Each holder is a thread with connections of its own, and leases are so short that
they end everywhere in a schedule. ``SAFE_SCHEDULES=2000`` runs that many schedules on
each store.
"""

import itertools
import math
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import pytest
from django.core.cache import caches
from django.db import connections
from hypothesis import HealthCheck, Phase
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)
from pytest_django import Settings

from django_celery_safe import CacheLock, HeldLock, cache_lock, find_lock, release_lock
from django_celery_safe.exceptions import LockBackendError, LockLost, LockNotAcquired
from django_celery_safe.leases.clock import clock
from django_celery_safe.leases.renewer import renewer
from tests.contract import broken
from tests.servers import RedisServer

T = TypeVar("T")

#: How many schedules to run on each store; unset: a few, for the suite.
ASKED_FOR = os.environ.get("SAFE_SCHEDULES")
SCHEDULES = int(ASKED_FOR or 10)

#: A long run takes about a second for each schedule.
pytestmark = [pytest.mark.timeout(120 + 5 * int(ASKED_FOR))] if ASKED_FOR else []

NAMES = ("a", "b")
HOLDERS = 3


class Holder:
    """A thread that holds locks and has its own connections to the store."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"holder {number}")

    def begin(self, function: Callable[..., T], *args: Any) -> "Future[T]":
        """Let the holder do something, and do not wait for it."""
        return self._thread.submit(function, *args)

    def do(self, function: Callable[..., T], *args: Any) -> T:
        """Let the holder do something and return the outcome."""
        return self.begin(function, *args).result(60)

    def close(self) -> None:
        """Close its connections and end the thread."""
        self.do(_close_connections)
        self._thread.shutdown()

    def __repr__(self) -> str:
        return f"holder {self.number}"


def _close_connections() -> None:
    connections.close_all()
    caches.close_all()


@dataclass
class Surroundings:
    """Where the schedules run, and what is particular to that store."""

    #: Leases to choose from, s; one is no whole number of ms, by which Redis counts.
    leases: tuple[float, ...] = (0.0204, 0.03, 0.06)
    #: Pauses to choose from, s.
    pauses: tuple[float, ...] = (0.005, 0.02, 0.07)
    #: How long those wait who wait for a lock, s.
    wait: float = 0.02
    #: How much longer than asked for the store may keep a lease, s.
    late: float = 0.003
    holders: list[Holder] = field(default_factory=lambda: [*map(Holder, range(HOLDERS))])
    #: Faults that were found; a schedule that depends on time may not show them twice.
    faults: list[str] = field(default_factory=list)
    _number: Iterator[int] = field(default_factory=itertools.count)

    def new_prefix(self) -> str:
        """Return what no name of an earlier schedule begins with."""
        return f"schedule {next(self._number)}:"

    def require(self, truth: object, fault: str) -> None:
        """Note and raise a fault unless something is true."""
        if not truth:
            self.faults.append(fault)
            raise AssertionError(fault)


@dataclass(eq=False)
class Acquisition:
    """A lock that was acquired, as the schedule knows of it."""

    name: str
    holder: Holder
    token: str
    fence: int | None
    #: The longest lease that the store may have.
    lease: float
    #: The latest moment at which the store lets it end.
    ends_by: float
    #: Released, or freed by an operator.
    freed: bool = False
    #: Freed by an operator, which its holder can't know.
    deceived: bool = False

    def __repr__(self) -> str:
        return f"<{self.token[:4]} of {self.name!r} by {self.holder}, fence {self.fence}>"


@dataclass(eq=False)
class Claim:
    """A lock object of one holder, and its last acquisition if that was not released."""

    holder: Holder
    lock: CacheLock
    renew: bool
    acquired: Acquisition | None = None
    #: Until when the holder trusts it without a renewal, as it was last asked.
    trusted_until: float = 0.0

    def look(self) -> bool:
        """In the holder's thread: note and tell whether the holder trusts the lock."""
        asked_at, remaining = clock.now(), self.lock.remaining
        self.trusted_until = asked_at + remaining
        return remaining > 0


class Schedule(RuleBasedStateMachine):
    """
    Several holders of a few locks, and what must be true at every moment.

    What a rule may draw never depends on an outcome, since the outcome depends on time.
    """

    names = st.sampled_from(NAMES)
    numbers = st.integers(0, HOLDERS - 1)
    #: Index of a lease or a pause.
    choices = st.integers(0, 2)
    #: Index of a claim or a sight, modulo their number.
    picks = st.integers(0, 9)

    def __init__(self, surroundings: Surroundings) -> None:
        super().__init__()
        self.around = surroundings
        self.require = surroundings.require
        self.prefix = surroundings.new_prefix()
        #: The lock objects of those who have not crashed.
        self.alive: list[Claim] = []
        #: The locks that an operator has seen.
        self.sights: list[HeldLock] = []
        #: The last acquisition of each name.
        self.last: dict[str, Acquisition] = {}
        self.highest_fence = 0

    # Rules.

    @rule(name=names, number=numbers, lease=choices, renew=st.booleans(), wait=st.booleans())
    def acquire(self, name: str, number: int, lease: int, renew: bool, wait: bool) -> None:
        """Somebody tries to take a lock, and may wait for it for a while."""
        claim = self._new_claim(self.around.holders[number], name, lease, renew)
        self._take(claim, claim.lock.acquire, self.around.wait if wait else 0)

    @rule(pick=picks)
    def release(self, pick: int) -> None:
        """A holder releases, in time, too late, or once more."""
        claim = self._pick(pick)
        claim.holder.do(self._release, claim)

    @rule(pick=picks, lease=choices)
    def extend(self, pick: int, lease: int) -> None:
        """A holder asks for a shorter or longer lease, in time or too late."""
        claim = self._pick(pick)
        claim.holder.do(self._extend, claim, self.around.leases[lease])

    @rule(pick=picks)
    def ensure(self, pick: int) -> None:
        """A holder makes sure that the lock is its own."""
        claim = self._pick(pick)
        claim.holder.do(self._ensure, claim)

    @rule(pick=picks)
    def crash(self, pick: int) -> None:
        """A holder is gone without a release."""
        claim = self._pick(pick)
        lease = claim.lock.lease
        if lease is not None:
            renewer.remove(lease)
        _abandon(claim)
        self.alive.remove(claim)

    @rule(name=names)
    def see(self, name: str) -> None:
        """An operator looks who holds a lock."""
        seen = find_lock(self.prefix + name)
        if seen is not None:
            self.sights.insert(0, seen)

    @rule(pick=picks)
    def operate(self, pick: int) -> None:
        """An operator frees what was seen, now or some time ago."""
        seen = self.sights[pick % len(self.sights)] if self.sights else None
        if seen is None or not release_lock(seen):
            return
        last = self.last[seen.name]
        ours = last.token == seen.token and not last.freed
        self.require(ours, f"An operator could free {seen}, but {last} was last")
        last.freed = last.deceived = True

    @rule(pause=choices)
    def let_time_pass(self, pause: int) -> None:
        """Nothing happens for a while."""
        clock.sleep(self.around.pauses[pause])

    # Invariants.

    @invariant()
    def at_most_one_is_trusted(self) -> None:
        """No lock has two holders that trust it."""
        for name in self.last:
            trusted = self._trusted(name)
            self.require(len(trusted) < 2, f"Two are trusted: {trusted}")

    @invariant()
    def the_store_agrees(self) -> None:
        """The store has the lock that is trusted, and none that was freed or has ended."""
        for name, last in self.last.items():
            trusted = self._trusted(name)
            asked_at = clock.now()
            found = find_lock(name)
            answered_at = clock.now()
            for claim in self.alive:
                # A lease that ended before the answer may have been renewed after it.
                if claim.acquired in trusted and claim.trusted_until > answered_at:
                    has = found is not None and found.token == claim.acquired.token
                    self.require(has, f"{claim.acquired} is trusted, but the store has {found}")
            if found is None:
                continue
            self.require(found.token == last.token, f"The store has {found}, but {last} was last")
            self.require(not last.freed, f"{last} was freed, but the store has it")
            self.require(found.fence == last.fence, f"{last} has another fence in {found}")
            self.require(asked_at <= last.ends_by + self.around.late, f"{last} does not end")
            longest = last.lease + self.around.late
            ends = _lasts_at_most(longest, found)
            if not ends and last.ends_by == math.inf:
                # A renewal that was under way while its holder asked for a shorter lease may have
                # come to the store after it; the next one brings the new length.
                ends = _comes_true(partial(_lasts_at_most_now, longest, name), 5)
            self.require(ends, f"{last} was to last {longest} s, but the store has {found}")

    def teardown(self) -> None:
        """Free the locks that are held; the others end by themselves."""
        for claim in self.alive:
            with suppress(LockNotAcquired):
                claim.holder.do(claim.lock.release)
        self.alive.clear()
        if self.around.faults:
            return
        for name, last in self.last.items():
            ends = _comes_true(partial(_is_free, name), 5 + self.around.late)
            self.require(ends, f"{last} does not end, though nobody holds it")

    # How it is done, and what each step must lead to.

    def _pick(self, pick: int) -> Claim:
        """Return one of the claims, most often one that holds its lock or did so."""
        claims = [claim for claim in self.alive if claim.acquired]
        if not claims or pick > 7:
            claims = self.alive or [self._new_claim(self.around.holders[0], NAMES[0], 0, False)]
        return claims[pick % len(claims)]

    def _new_claim(self, holder: Holder, name: str, lease: int, renew: bool) -> Claim:
        seconds = self.around.leases[lease]
        lock = cache_lock(self.prefix + name, timeout=seconds, renew=renew)
        claim = Claim(holder, lock, renew)
        self.alive.append(claim)
        return claim

    def _take(self, claim: Claim, acquire: Callable[[float], bool], wait: float) -> None:
        last, asked_at = self.last.get(claim.lock.name), clock.now()
        before = self._trusted(claim.lock.name)
        acquired, at = claim.holder.do(_timed, acquire, wait)
        if acquired is None:
            self._note_late(claim)
            return
        if acquired:
            for other in self.alive:
                if other.acquired in before and other is not claim:
                    ended = other.trusted_until <= at
                    self.require(ended, f"Two are trusted: {other.acquired} and {claim.lock!r}")
            self._note(claim)
            return
        assert isinstance(claim.lock._options.timeout, float)
        if at - asked_at > wait + claim.lock._options.timeout:
            # So slow that the lease may have ended before anybody knew of it.
            return
        taken = last is not None and not last.freed and asked_at <= last.ends_by + self.around.late
        self.require(taken, f"{claim.lock.name!r} was refused, but is free: {last}")

    def _note_late(self, claim: Claim) -> None:
        """Note an acquisition that was given back, since its lease was over by then."""
        name, now = claim.lock.name, clock.now()
        self.last[name] = Acquisition(name, claim.holder, "", None, 0.0, now, freed=True)

    def _note(self, claim: Claim) -> None:
        """Note an acquisition."""
        name, lease, fence = claim.lock.name, claim.lock._options.timeout, claim.lock.fence
        assert isinstance(lease, float)
        token = claim.holder.do(lambda: claim.lock.token)
        assert token is not None
        ends_by = math.inf if claim.renew else clock.now() + lease
        acquired = Acquisition(name, claim.holder, token, fence, lease, ends_by)
        claim.acquired = self.last[name] = acquired
        above = fence is not None and fence > self.highest_fence
        self.require(above, f"{acquired} is not above {self.highest_fence}")
        self.highest_fence = fence or 0

    def _release(self, claim: Claim) -> None:
        acquired, ours = self._before(claim)
        if acquired is None:
            self._must_refuse(claim, claim.lock.release)
            return
        released = claim.lock.release()
        self._judge(claim, released, ours, "released")
        acquired.freed |= released
        acquired.ends_by = clock.now()
        claim.acquired = None

    def _extend(self, claim: Claim, lease: float) -> None:
        acquired, ours = self._before(claim)
        if acquired is None:
            self._must_refuse(claim, claim.lock.extend, lease)
            return
        # Longer from now on: the store may have it before we know.
        acquired.lease = max(acquired.lease, lease)
        extended = _does(claim.lock.extend, lease)
        self._judge(claim, extended, ours, "extended")
        if extended:
            acquired.lease = lease
            acquired.ends_by = math.inf if claim.renew else clock.now() + lease

    def _ensure(self, claim: Claim) -> None:
        acquired, ours = self._before(claim)
        if acquired is None:
            self._must_refuse(claim, claim.lock.ensure)
            return
        self._judge(claim, _does(claim.lock.ensure), ours, "ensured")

    def _before(self, claim: Claim) -> tuple[Acquisition | None, bool]:
        """Return what the holder has, and whether the store may still have it."""
        claim.look()
        acquired = claim.acquired
        if acquired is None:
            return None, False
        return acquired, self.last[acquired.name] is acquired and not acquired.freed

    def _judge(self, claim: Claim, done: bool, may_be_ours: bool, what: str) -> None:
        acquired = claim.acquired
        assert acquired is not None
        if done:
            self.require(may_be_ours, f"{acquired} was {what}, but is not the last")
        elif not acquired.deceived:
            late = clock.now() >= claim.trusted_until
            self.require(late, f"{acquired} was not {what}, but is trusted")

    def _must_refuse(self, claim: Claim, method: Callable[..., object], *args: Any) -> None:
        try:
            method(*args)
        except LockNotAcquired:
            return
        self.require(False, f"{claim.lock!r} was never acquired: {method.__name__}() must refuse")

    def _trusted(self, name: str) -> list[Acquisition]:
        """Return the claims on this name that may rely on it. No acquisition runs meanwhile."""
        claims = [claim for claim in self.alive if claim.lock.name == name and claim.acquired]
        trusted: list[Acquisition] = []
        for holder in self.around.holders:
            theirs = [claim for claim in claims if claim.holder is holder]
            trusted += holder.do(_trusted, theirs) if theirs else []
        return trusted


def _trusted(claims: list[Claim]) -> list[Acquisition]:
    looked = [claim.acquired for claim in claims if claim.look()]
    return [acquired for acquired in looked if acquired is not None and not acquired.deceived]


def _abandon(claim: Claim) -> None:
    """Note that nobody renews it any more, and that nobody can free it."""
    acquired, claim.acquired = claim.acquired, None
    if acquired is not None:
        # A renewal may be on its way at this moment.
        slack = 1.0 if claim.renew else 0.0
        acquired.ends_by = min(acquired.ends_by, clock.now() + acquired.lease + slack)


def _in_time(acquire: Callable[[float], bool], wait: float) -> bool | None:
    """Return what came of it; None: acquired too late for its lease, and given back."""
    try:
        return acquire(wait)
    except LockBackendError as error:
        if "not in time" not in error.reason:
            raise
        return None


def _timed(acquire: Callable[[float], bool], wait: float) -> tuple[bool | None, float]:
    return _in_time(acquire, wait), clock.now()


def _comes_true(condition: Callable[[], bool], longest: float) -> bool:
    ends_at = clock.now() + longest
    while not condition():
        if clock.now() > ends_at:
            return False
        clock.sleep(0.01)
    return True


def _lasts_at_most(longest: float, found: HeldLock | None) -> bool:
    return found is None or found.remaining is None or found.remaining <= longest


def _lasts_at_most_now(longest: float, name: str) -> bool:
    return _lasts_at_most(longest, find_lock(name))


def _does(method: Callable[..., object], *args: Any) -> bool:
    try:
        method(*args)
    except LockLost:
        return False
    return True


def _is_free(name: str) -> bool:
    return find_lock(name) is None


@pytest.fixture
def surroundings() -> Iterator[Surroundings]:
    """Three holders, whose connections are closed in the end."""
    around = Surroundings()
    yield around
    for holder in around.holders:
        holder.close()


def run(around: Surroundings, schedules: int, *, steps: int = 60) -> None:
    """Try schedules until one shows a fault."""
    run_state_machine_as_test(
        lambda: Schedule(around),  # type: ignore[arg-type] # any factory will do
        settings=hypothesis_settings(
            max_examples=max(1, schedules),
            stateful_step_count=steps,
            # An example that depends on time can't be shrunk.
            phases=[Phase.generate],
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            # A schedule is made of pauses.
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )


@pytest.mark.usefixtures("locks_in_memory", "clock")
def test_in_memory(surroundings: Surroundings) -> None:
    """No schedule in local memory lets two holders trust one lock."""
    run(surroundings, SCHEDULES, steps=40)


def test_in_redis(in_redis: None, surroundings: Surroundings) -> None:
    """Nor does one in Redis."""
    run(surroundings, SCHEDULES, steps=25)


@pytest.mark.nightly
def test_in_a_database(settings: Settings, db_alias: str, surroundings: Surroundings) -> None:
    """Nor does one in a database."""
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": db_alias}
    run(surroundings, SCHEDULES)


#: Each broken store, and what is wrong on it.
FAULTS = [
    ("NoOwnerCheckCache", "trusted, but the store has|is not the last|was last|Two are"),
    ("NoExpiryCache", "does not end|but is free|was to last"),
    ("FencePerProcessCache", "has another fence"),
]


@pytest.mark.parametrize(("fault", "expected"), FAULTS)
def test_a_broken_store_is_found_out(
    fault: str,
    expected: str,
    settings: Settings,
    redis_server: RedisServer,
    surroundings: Surroundings,
) -> None:
    """On a store with this fault a schedule shows what is wrong."""
    redis_server.flush()
    settings.CACHES = {
        "default": {"BACKEND": f"{broken.__name__}.{fault}", "LOCATION": redis_server.url}
    }
    # A fault that depends on time may not show again at once.
    with pytest.raises((AssertionError, Flaky)):
        run(surroundings, 200)
    assert re.search(expected, surroundings.faults[0])
