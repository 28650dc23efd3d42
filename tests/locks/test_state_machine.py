"""
Random schedules of holders that take, keep, extend, lose and free a few locks.

Time passes by hand, so at each moment it is known exactly who holds which lock.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from django_celery_safe import CacheLock, HeldLock, LockLost, cache_lock, find_lock, release_lock
from django_celery_safe.locks.stores import local
from tests.clock import HeldClock
from tests.locks.renewals import get_remaining, stop_renewing

pytestmark = pytest.mark.usefixtures("locks_in_memory")

#: How long those wait who wait for a lock, s: no sum of leases and pauses.
WAIT = 15.5
#: Moments are sums of rounded numbers, s.
ROUNDED = 0.01


@dataclass(eq=False)
class Claim:
    """A lock object that acquired its lock, and what is known of that."""

    lock: CacheLock
    token: str | None
    seconds: float
    #: When its lease ends, if nobody extends it; inf: it is renewed.
    ends_at: float
    #: Whether an operator freed it, which its holder can't know.
    is_freed: bool = False


class Schedule(RuleBasedStateMachine):
    """Several holders of a few locks, and what must be true at every moment."""

    names = st.sampled_from("ab")
    leases = st.sampled_from([20, 30, 100])
    #: Index of a claim or a sight, modulo their number.
    picks = st.integers(0, 9)
    _numbers = itertools.count()

    def __init__(self, clock: HeldClock) -> None:
        super().__init__()
        self.clock = clock
        self.prefix = f"schedule {next(self._numbers)}:"
        #: The acquisitions that were not released, and whose holder did not crash.
        self.claims: list[Claim] = []
        #: The last acquisition of each name.
        self.last: dict[str, Claim] = {}
        #: The locks that an operator has seen.
        self.sights: list[HeldLock] = []
        self.highest_fence = 0

    @rule(name=names, seconds=leases, hangs=st.booleans(), wait=st.sampled_from([0, WAIT]))
    def acquire(self, name: str, seconds: float, hangs: bool, wait: float) -> None:
        """Somebody tries to take a lock, may wait for it, and may then renew it no more."""
        lock = cache_lock(self.prefix + name, timeout=seconds)
        before, asked_at = self._holder(lock.name), self.clock.now()
        is_due = before is None or before.ends_at <= asked_at + wait
        assert lock.acquire(wait) is is_due
        if is_due:
            assert lock.fence is not None
            assert lock.fence > self.highest_fence
            self.highest_fence = lock.fence
            if hangs:
                stop_renewing(lock)
            ends_at = self.clock.now() + seconds if hangs else math.inf
            self.last[lock.name] = Claim(lock, lock.token, seconds, ends_at)
            self.claims.insert(0, self.last[lock.name])
        else:
            assert self.clock.now() - asked_at == pytest.approx(wait, abs=ROUNDED)

    @rule(pick=picks)
    def release(self, pick: int) -> None:
        """A holder releases, in time or too late."""
        for claim in self._pick(pick):
            assert claim.lock.release() is self._is_holder(claim)
            self.claims.remove(claim)
            claim.ends_at = self.clock.now()

    @rule(pick=picks, seconds=leases)
    def extend(self, pick: int, seconds: float) -> None:
        """A holder asks for a shorter or longer lease, in time or too late."""
        for claim in self._pick(pick):
            if self._is_allowed(claim, lambda lock: lock.extend(seconds)):
                claim.seconds = seconds
                if claim.ends_at < math.inf:
                    stop_renewing(claim.lock)
                    claim.ends_at = self.clock.now() + seconds

    @rule(pick=picks)
    def ensure(self, pick: int) -> None:
        """A holder makes sure that the lock is its own."""
        for claim in self._pick(pick):
            if self._is_allowed(claim, CacheLock.ensure) and claim.ends_at < math.inf:
                claim.ends_at = self.clock.now() + claim.seconds

    @rule(pick=picks)
    def crash(self, pick: int) -> None:
        """A holder is gone without a release."""
        for claim in self._pick(pick):
            self.claims.remove(claim)
            stop_renewing(claim.lock)
            if self._is_holder(claim):
                claim.ends_at = self.clock.now() + get_remaining(claim.lock.name)

    @rule(name=names)
    def see(self, name: str) -> None:
        """An operator looks who holds a lock."""
        seen = find_lock(self.prefix + name)
        self.sights[:0] = [] if seen is None else [seen]

    @rule(pick=picks)
    def operate(self, pick: int) -> None:
        """An operator frees what was seen, now or some time ago."""
        for seen in self.sights[pick : pick + 1]:
            holder = self._holder(seen.name)
            is_there = holder is not None and holder.token == seen.token
            assert release_lock(seen) is is_there
            if holder is not None and is_there:
                holder.is_freed = True

    @rule(seconds=st.sampled_from([1, 9, 40]))
    def let_time_pass(self, seconds: float) -> None:
        """Nothing happens for a while, but renewals."""
        self.clock.advance(seconds)

    @invariant()
    def the_store_agrees(self) -> None:
        """The store has the locks that are held, and no other; each lease has its length."""
        for name in self.last:
            found, holder = find_lock(name), self._holder(name)
            if found is None or holder is None:
                assert (found, holder) == (None, None)
                continue
            assert (found.token, found.fence) == (holder.token, holder.lock.fence)
            assert found.remaining is not None
            left = holder.ends_at - self.clock.now()
            assert min(left, holder.seconds * 2 / 3) - ROUNDED <= found.remaining
            assert found.remaining <= min(left, holder.seconds) + ROUNDED

    @invariant()
    def holders_know_it(self) -> None:
        """A holder trusts its lock for as long as it has it."""
        for claim in self.claims:
            assert claim.is_freed or claim.lock.held is self._is_holder(claim)

    def teardown(self) -> None:
        """Free the locks that are held."""
        for claim in self.claims:
            claim.lock.release()

    def _holder(self, name: str) -> Claim | None:
        last = self.last.get(name)
        return None if last is None or last.is_freed or last.ends_at <= self.clock.now() else last

    def _is_holder(self, claim: Claim) -> bool:
        return self._holder(claim.lock.name) is claim

    def _pick(self, pick: int) -> Iterator[Claim]:
        """Yield one of the claims, if there is any."""
        yield from self.claims[pick % max(1, len(self.claims)) :][:1]

    def _is_allowed(self, claim: Claim, act: Callable[[CacheLock], None]) -> bool:
        """Let a holder act, which is an error if it holds the lock no more."""
        if self._is_holder(claim):
            act(claim.lock)
            return True
        with pytest.raises(LockLost):
            act(claim.lock)
        return False


def test_in_memory(clock: HeldClock) -> None:
    """In no schedule does a lock have two holders, or one that does not know of its loss."""
    run_state_machine_as_test(
        lambda: Schedule(clock),  # type: ignore[arg-type] # any factory will do
        settings=hypothesis_settings(
            max_examples=40, stateful_step_count=40, deadline=None, database=None
        ),
    )


def test_a_broken_store_is_found_out(clock: HeldClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a release frees whoever holds the lock, a schedule shows it."""
    monkeypatch.setattr(
        local._Memory, "free", lambda memory, name, token: bool(memory.locks.pop(name, None))
    )
    schedule = Schedule(clock)
    schedule.acquire(name="a", seconds=20, hangs=True, wait=0)
    schedule.acquire(name="a", seconds=20, hangs=True, wait=30)
    with pytest.raises(AssertionError):
        schedule.release(pick=1)
