"""
What the configured store really guarantees, tried out.

:func:`examine` takes locks, lets their leases end and lets processes race for them, and
yields a :class:`Finding` for each thing that it looked at. ``race`` has the processes;
``manage.py celery_locks doctor`` prints the findings.
"""

from __future__ import annotations

import statistics
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from enum import StrEnum
from itertools import pairwise
from typing import Any, Final, NamedTuple

from .. import conf
from ..exceptions import (
    BackendNotSupported,
    CelerySafeError,
    LockBackendError,
    WrongTransaction,
    describe_error,
)
from .lock import CacheLock, cache_lock
from .race import INTERVAL, Outcome, RaceFailed, Racers
from .stores import USE_INSTEAD, Location, find_emptied_with, locate
from .stores.base import Acquired, Holder, Store

#: Lease of the locks whose end is not waited for, s: as long may one be left by a doctor
#: that was killed.
LEASE: Final = 10.0
#: Lease whose end is waited for, s, and how much longer it is waited for.
MEASURED_LEASE: Final = 1.0
PATIENCE: Final = 5.0
#: Pause between two tries to get a lock whose lease is about to end, s.
TRY_EVERY: Final = 0.005
#: A lease that ends so much too late is worth a word, s.
LATE: Final = 0.5
#: How many locks, with what lease, s, processes race for when it has ended; fewer where it
#: would take longer than so much, s, to acquire and release that many.
EXPIRED: Final = 20
EXPIRED_WITHIN: Final = 5.0
SHORT_LEASE: Final = 0.3
#: Fewer tries than so many show nothing if all went well.
FEWEST_TRIES: Final = 10
#: Most pairs of acquire and release that are timed, and for how long, s.
PAIRS: Final = 200
PAIRS_WITHIN: Final = 1.0
#: A round trip longer than this part of a lease is worth a word.
ROUND_TRIP: Final = 1 / 10
#: How often the clock is asked; the quickest answer counts.
CLOCK_ASKED: Final = 5
#: By how much the clocks may differ, s.
CLOCK_OFFSET: Final = 1.0
#: How often a waiter is woken, how long it waits before that and at the most, s.
WAKINGS: Final = 3
WAITS_BEFORE: Final = 0.2
LONGEST_WAIT: Final = 10.0
#: A waiter that a release wakes has the lock within so much, s.
WOKEN_WITHIN: Final = 0.5
#: How long a store may keep a note of a waiter, s.
NOTE_LASTS: Final = 2.1


class Verdict(StrEnum):
    """What a finding means."""

    #: As promised.
    OK = "ok"
    #: Two do not hold one lock because of it, but somebody may be surprised.
    WARNING = "warning"
    #: Two can hold one lock, or writes that its fence guards can be those of two.
    UNSAFE = "unsafe"
    #: It could not be found out.
    UNKNOWN = "unknown"


class Finding(NamedTuple):
    """
    What was found out about one thing.

    Attributes:
        check: What was looked at: store, permissions, weakness, eviction, clearing, clock,
            round_trip, listing, waking, lease, exclusion or fencing.
        verdict: What it means.
        said: The same in sentences: what was measured, what it means, what to do.
        values: What was measured, the unit in the name, such as ``median_ms``.
    """

    check: str
    verdict: Verdict
    said: str
    values: dict[str, Any]


def examine(
    cache: str | conf.Unset = conf.UNSET, *, processes: int = 2, seconds: float = 1.0
) -> Generator[Finding]:
    """
    Try out the store that holds the locks, and yield what is found as it is found.

    Takes some seconds, more where leases count whole ones, and about a minute where each
    answer takes 0.7 s. The locks have names that nobody else uses, and none is left,
    whatever happens; only a doctor that is killed leaves some, for 10 s.

    Args:
        cache: Alias of the cache; unset: where the settings keep locks.
        processes: How many race, 2 at least. They are new ones of this project, with the
            settings that ``DJANGO_SETTINGS_MODULE`` names.
        seconds: For how long they race, once set up; longer where the store is slow.

    Raises:
        WrongTransaction: LOCK_DATABASE is inside ``atomic()``.
    """
    values: dict[str, Any] = {}
    try:
        location = locate(cache)
        values.update(location._asdict())
        store = location.store()
        values["where"] = store.where
        store.check_lease(conf.lease_seconds(conf.get("LOCK_TIMEOUT"), "LOCK_TIMEOUT"))
        store.peek(_new_name("store"))
    except WrongTransaction:
        raise
    except BackendNotSupported as refusal:
        values["where"] = refusal.where
        yield Finding("store", Verdict.UNSAFE, str(refusal), values)
    except LockBackendError as error:
        yield Finding("store", Verdict.UNKNOWN, _say_unasked(error), values)
        # It answers, and may say more.
        if error.hint:
            with suppress(LockBackendError):
                yield from filter(None, [_examine_permissions(store)])
    except CelerySafeError as error:
        yield Finding("store", Verdict.UNKNOWN, str(error), values)
    except Exception as error:  # noqa: BLE001 - a doctor must say what it is, whatever it is
        said = f"Locks can't live where the settings say: {describe_error(error)}."
        yield Finding("store", Verdict.UNKNOWN, said, values)
    else:
        yield _describe_store(store, values)
        examination = _Examination(location, store, cache, processes, seconds)
        try:
            yield from examination.findings()
        finally:
            examination.clean_up()


class _NotFound(Exception):
    """Something can't be found out; the text says why."""


class _Lost(Exception):
    """The store lost a lock that was held; the text says which."""


class _Examination:
    """One look at one store; knows the names of the locks that it took."""

    def __init__(
        self,
        location: Location,
        store: Store,
        cache: str | conf.Unset,
        processes: int,
        seconds: float,
    ) -> None:
        self._location, self._store, self._cache = location, store, cache
        self._processes, self._seconds = processes, seconds
        self._names: list[str] = []
        self._waited_at = 0.0
        self._pair_takes = 0.0
        self._race: Outcome | None = None

    def findings(self) -> Iterator[Finding]:
        """Yield what each check finds; one that can't be made stops none of the others."""
        checks: tuple[Callable[[], Finding | None], ...] = (
            self.permissions,
            self.weakness,
            self.eviction,
            self.clearing,
            self.clock,
            self.round_trip,
            self.listing,
            self.waking,
            self.lease,
            self.exclusion,
            self.fencing,
        )
        for check in checks:
            try:
                finding = check()
            except LockBackendError as error:
                finding = Finding(check.__name__, Verdict.UNKNOWN, _say_unasked(error), {})
            except BackendNotSupported as refusal:
                # A cluster shows only when one of its servers refuses a command.
                finding = Finding(check.__name__, Verdict.UNSAFE, str(refusal), {})
            except _NotFound as reason:
                finding = Finding(check.__name__, Verdict.UNKNOWN, str(reason), {})
            except _Lost as loss:
                finding = Finding(check.__name__, Verdict.UNSAFE, str(loss), {})
            except Exception as error:  # noqa: BLE001 - as in examine()
                said = f"This could not be tried out: {describe_error(error)}."
                finding = Finding(check.__name__, Verdict.UNKNOWN, said, {})
            if finding is not None:
                yield finding

    def permissions(self) -> Finding | None:
        """Whether the server lets this user do all that locks need."""
        return _examine_permissions(self._store)

    def weakness(self) -> Finding | None:
        """How the store can lose locks in ways of its own."""
        if not self._store.weakness:
            return None
        said = f"A lock can get lost: {self._store.weakness}. {USE_INSTEAD}"
        return Finding("weakness", Verdict.WARNING, said, {})

    def eviction(self) -> Finding | None:
        """Whether the server deletes locks when its memory is short."""
        eviction = self._store.ask_eviction()
        if eviction is None:
            return None
        values = {"policy": eviction.policy, "max_memory_bytes": eviction.max_memory}
        policy = f"maxmemory-policy is {eviction.policy}"
        if eviction.spares_locks:
            said = f"The server's {policy}: it deletes no lock when its memory is short."
            return Finding("eviction", Verdict.OK, said, values)
        deletes = f"The server's {policy}, which deletes locks when memory is short"
        if not eviction.max_memory:
            deletes += " (maxmemory is 0: not before somebody sets it)"
        said = (
            f"{deletes}, and then two hold one. Set maxmemory-policy to noeviction, give the locks "
            f"a server of their own, or set LOCK_DATABASE."
        )
        return Finding("eviction", Verdict.UNSAFE, said, values)

    def clearing(self) -> Finding:
        """Whether ``cache.clear()`` frees the locks along with other things."""
        shared = find_emptied_with(self._location)
        values = {"emptied_with": shared}
        if not shared:
            said = "Nothing else that the project clears takes the locks along."
            return Finding("clearing", Verdict.OK, said, values)
        said = (
            f"The locks are emptied along with {', '.join(shared)}: one cache.clear() frees every "
            f"lock while its holder works. Name in LOCK_CACHE an alias with a database number "
            f"(memcached: a server) of its own."
        )
        return Finding("clearing", Verdict.WARNING, said, values)

    def clock(self) -> Finding:
        """By how much this machine's clock differs from the store's."""
        answers = []
        for _ in range(CLOCK_ASKED):
            began = time.monotonic()
            told = self._store.ask_time()
            took = time.monotonic() - began
            if told is None:
                said = "The store has no clock that could be asked."
                return Finding("clock", Verdict.OK, said, {"offset_s": None})
            answers.append((took, time.time() - took / 2 - told))
        offset = min(answers)[1]
        values = {"offset_s": round(offset, 3)}
        way = "ahead of" if offset > 0 else "behind"
        measured = f"This machine's clock is {abs(offset):.3f} s {way} the store's"
        # Where leases are of seconds, so is the clock.
        if abs(offset) <= CLOCK_OFFSET + self._store.early:
            return Finding("clock", Verdict.OK, f"{measured}.", values)
        said = (
            f"{measured}: ages of locks are shown wrong by so much. Leases do not depend on it. "
            f"Let both synchronise their clocks (NTP)."
        )
        return Finding("clock", Verdict.WARNING, said, values)

    def round_trip(self) -> Finding:
        """How long it takes to acquire and release a lock."""
        name = self._new_name("round_trip")
        took: list[float] = []
        ends_at = time.monotonic() + PAIRS_WITHIN
        while len(took) < 2 or (len(took) < PAIRS and time.monotonic() < ends_at):
            began = time.monotonic()
            with self._held(name):
                pass
            took.append((time.monotonic() - began) * 1000)
        median, slow = statistics.median(took), statistics.quantiles(took, n=100)[-1]
        slow = min(slow, max(took))  # with few of them it is extrapolated
        self._pair_takes = median / 1000
        values = {"median_ms": round(median, 3), "p99_ms": round(slow, 3), "pairs": len(took)}
        measured = (
            f"To acquire and release takes {median:.1f} ms (median of {len(took)}; {slow:.1f} ms "
            f"at the 99th percentile)"
        )
        lease = conf.lease_seconds(conf.get("LOCK_TIMEOUT"), "LOCK_TIMEOUT")
        if slow <= lease * ROUND_TRIP * 1000:
            return Finding("round_trip", Verdict.OK, f"{measured}.", values)
        said = (
            f"{measured}, more than a tenth of LOCK_TIMEOUT ({lease:g} s): a lease may end before "
            f"it is renewed. Give a longer LOCK_TIMEOUT, or find out what makes the store slow."
        )
        return Finding("round_trip", Verdict.WARNING, said, values)

    def listing(self) -> Finding:
        """Whether a lock that is held is listed."""
        name = self._new_name("listing")
        with self._held(name) as lock:
            try:
                token = lock.token
                listed = any(one.token == token for one in self._store.iter_locks())
            except BackendNotSupported as refusal:
                return Finding("listing", Verdict.WARNING, str(refusal), {"listed": None})
        if listed:
            said = "A lock that is held is listed."
            return Finding("listing", Verdict.OK, said, {"listed": True})
        said = (
            f"The lock {name!r} was held and not listed: what celery_locks and the admin show is "
            f"not all that is held."
        )
        return Finding("listing", Verdict.WARNING, said, {"listed": False})

    def waking(self) -> Finding:
        """How soon after a release a waiter has the lock."""
        name = self._new_name("waking")
        waits: list[float] = []
        for _ in range(WAKINGS):
            with ThreadPoolExecutor(1) as threads:
                # Released before the thread is waited for, also when Ctrl-C hits.
                with self._held(name):
                    waiter = threads.submit(self._wait_for, name)
                    time.sleep(WAITS_BEFORE)
                    released_at = time.monotonic()
                waits.append(max(0.0, waiter.result() - released_at))
        median, longest = statistics.median(waits), max(waits)
        values = {
            "promised": self._store.wakes,
            "median_ms": round(median * 1000, 3),
            "longest_ms": round(longest * 1000, 3),
        }
        measured = (
            f"A waiter had the lock {median * 1000:.1f} ms after its release (median of {WAKINGS}; "
            f"{longest * 1000:.1f} ms at the most)"
        )
        if not self._store.wakes:
            said = f"{measured}: no release wakes it here, it asks again and again."
            return Finding("waking", Verdict.OK, said, values)
        if longest <= WOKEN_WITHIN:
            return Finding("waking", Verdict.OK, f"{measured}.", values)
        said = (
            f"{measured}, though a release wakes it: something between here and the store keeps "
            f"answers back, or one of both is overloaded."
        )
        return Finding("waking", Verdict.WARNING, said, values)

    def _wait_for(self, name: str) -> float:
        """Return when the lock was ours, by the monotonic clock."""
        self._waited_at = time.monotonic()
        lock = self._lock(name)
        try:
            if not lock.acquire(LONGEST_WAIT):
                raise _NotFound(f"A waiter did not get a lock within {LONGEST_WAIT:g} s.")
            acquired_at = time.monotonic()
            lock.release()
            return acquired_at
        finally:
            self._waited_at = time.monotonic()
            if self._store.connects_threads:
                self._store.close()

    def lease(self) -> Finding:
        """When a lock that nobody renews or releases is free again."""
        name = self._new_name("lease")
        seconds = self._store.nearest_lease(MEASURED_LEASE)
        asked_at = time.monotonic()
        self._acquire(self._lock(name, seconds))
        held_at = time.monotonic()
        other = self._lock(name)
        while not other.acquire():
            if time.monotonic() > held_at + seconds + PATIENCE:
                said = (
                    f"A lock with a lease of {seconds:g} s was not free {PATIENCE:g} s after its "
                    f"end: that of a holder who was killed would stay held."
                )
                values = {"asked_s": seconds, "free_after_s": None}
                return Finding("lease", Verdict.WARNING, said, values)
            time.sleep(TRY_EVERY)
        free_at = time.monotonic()
        other.release()
        lasted = free_at - asked_at
        values = {"asked_s": seconds, "free_after_s": round(lasted, 3)}
        measured = f"A lock with a lease of {seconds:g} s was free after {lasted:.3f} s"
        if lasted < seconds - self._store.early:
            said = (
                f"{measured}, while its holder still trusted it: two hold one lock. "
                f"{self._advise()}"
            )
            return Finding("lease", Verdict.UNSAFE, said, values)
        if free_at - held_at <= seconds + LATE + 2 * self._store.early:
            return Finding("lease", Verdict.OK, f"{measured}.", values)
        said = f"{measured}: the lock of a holder who was killed stays held for too long."
        return Finding("lease", Verdict.WARNING, said, values)

    def exclusion(self) -> Finding:
        """Whether two of several processes that race for a lock hold it at once."""
        most = int(EXPIRED_WITHIN / max(self._pair_takes, EXPIRED_WITHIN / EXPIRED))
        expired = [self._new_name(f"expired:{number}") for number in range(max(1, most))]
        fresh = [self._new_name("exclusion")] * max(1, round(self._seconds / INTERVAL))
        lease = self._store.nearest_lease(LEASE)
        try:
            with Racers(self._processes, self._cache) as racers:
                # Their leases end while the processes are set up.
                self._let_expire(expired)
                racers.wait_until_ready()
                self._race = race = racers.race(fresh, lease)
                self._wait_until_free(expired)
                after = racers.race(expired, lease)
        except RaceFailed as failure:
            said = f"Processes could not race for a lock: {failure}."
            raise _NotFound(said) from failure
        overlaps = race.overlaps() + after.overlaps()
        values = {
            "processes": self._processes,
            "tries": race.tries,
            "acquired": len(race.holdings),
            "overlaps": race.overlaps(),
            "expired_tries": after.tries,
            "expired_acquired": len(after.holdings),
            "expired_overlaps": after.overlaps(),
            "errors": len(race.errors) + len(after.errors),
        }
        raced = (
            f"{self._processes} processes raced {race.tries} times for a lock and {after.tries} "
            f"times for one whose lease had ended"
        )
        if overlaps:
            said = f"{raced}: {overlaps} times two held one lock at once. {self._advise()}"
            return Finding("exclusion", Verdict.UNSAFE, said, values)
        if errors := [*race.errors, *after.errors]:
            said = (
                f"{raced}, and never did two hold one; but {len(errors)} tries failed, so nothing "
                f"is known. The first: {errors[0]}"
            )
            return Finding("exclusion", Verdict.UNKNOWN, said, values)
        if not race.holdings or not after.holdings:
            said = f"{raced}; nobody got one of them, so nothing is known."
            return Finding("exclusion", Verdict.UNKNOWN, said, values)
        if min(race.tries, after.tries) < FEWEST_TRIES:
            said = (
                f"{raced}, and never did two hold one; but the store is so slow that there were "
                f"fewer than {FEWEST_TRIES} tries, so nothing is known. Examine it from a machine "
                f"nearer to it."
            )
            return Finding("exclusion", Verdict.UNKNOWN, said, values)
        return Finding("exclusion", Verdict.OK, f"{raced}; never did two hold one.", values)

    def _let_expire(self, names: Sequence[str]) -> None:
        seconds = self._store.nearest_lease(SHORT_LEASE)
        for name in names:
            # Not by a lock, which refuses a lease that is over when the answer comes.
            token = uuid.uuid4().hex
            outcome = self._store.acquire(name, token, seconds, Holder(lease=seconds))
            self._require_acquired(name, isinstance(outcome, Acquired))

    def _wait_until_free(self, names: Sequence[str]) -> None:
        longest = self._store.nearest_lease(SHORT_LEASE) + PATIENCE
        ends_at = time.monotonic() + longest
        for name in names:
            while self._store.peek(name) is not None and time.monotonic() < ends_at:
                time.sleep(TRY_EVERY)

    def fencing(self) -> Finding:
        """Whether each acquisition has a larger number than all before it."""
        fences = []
        for _ in range(2):
            with self._held(self._new_name("fencing")) as lock:
                fences.append(lock.fence)
        if not self._store.fences and fences == [None, None]:
            said = (
                "The store does not number acquisitions: lock.fence is None. Only writes that "
                "are guarded by it need that."
            )
            return Finding("fencing", Verdict.OK, said, {"acquisitions": 0})
        # Of overlapping ones there is no order.
        if self._race is not None and not self._race.overlaps():
            fences[:0] = [holding.fence for holding in self._race.holdings]
        values = {"acquisitions": len(fences)}
        if all(a is not None and b is not None and a < b for a, b in pairwise(fences)):
            said = f"The fence grew with each of {len(fences)} acquisitions."
            return Finding("fencing", Verdict.OK, said, values)
        said = (
            f"The fence did not grow with each of {len(fences)} acquisitions: a write that it "
            f"guards may be refused to the holder, or allowed to the one before."
        )
        return Finding("fencing", Verdict.UNSAFE, said, values)

    def clean_up(self) -> None:
        """Free what is held, and let the store forget the names."""
        if self._store.wakes:
            # A release within that time leaves a note for a waiter.
            time.sleep(max(0.0, self._waited_at + NOTE_LASTS - time.monotonic()))
        with suppress(Exception):  # then it all ends by its lease
            for name in self._names:
                # What ended by itself may stand on the store's list still.
                lock = self._lock(name)
                if lock.acquire():
                    lock.release()
                elif (held := self._store.peek(name)) is not None:
                    self._store.release(name, held.token)

    def _new_name(self, what: str) -> str:
        name = _new_name(what)
        self._names.append(name)
        return name

    def _lock(self, name: str, lease: float = LEASE) -> CacheLock:
        return cache_lock(
            name, timeout=self._store.nearest_lease(lease), renew=False, cache=self._cache
        )

    @contextmanager
    def _held(self, name: str) -> Iterator[CacheLock]:
        lock = self._lock(name)
        asked_at = time.monotonic()
        self._acquire(lock)
        try:
            yield lock
        finally:
            released = lock.release()
        held_for, lease = time.monotonic() - asked_at, self._store.nearest_lease(LEASE)
        if not released and held_for < lease - self._store.early:
            raise _Lost(
                f"A lock with a lease of {lease:g} s was gone when its holder released it after "
                f"{held_for:.3f} s: two can hold one lock. {self._advise()}"
            )

    def _advise(self) -> str:
        if not self._store.shared or self._store.weakness:
            return f"Keep the locks elsewhere. {USE_INSTEAD}"
        return (
            "Find out what deletes locks there (FLUSHDB, cache.clear(), an eviction, a restart, a "
            "failover), or give the locks a server of their own."
        )

    def _acquire(self, lock: CacheLock) -> None:
        self._require_acquired(lock.name, lock.acquire())

    def _require_acquired(self, name: str, acquired: bool) -> None:
        if not acquired:
            raise _NotFound(
                f"The lock {name!r} could not be acquired, though nobody else knows of it."
            )


def _describe_store(store: Store, values: dict[str, Any]) -> Finding:
    if store.shared:
        return Finding("store", Verdict.OK, f"Locks live in {store.where}.", values)
    said = (
        f"Locks live in {store.where}, which every process has for itself: two worker processes, "
        f"or a worker and a web server, get the same lock. {USE_INSTEAD}"
    )
    return Finding("store", Verdict.WARNING, said, values)


def _examine_permissions(store: Store) -> Finding | None:
    refused = store.ask_refused()
    if refused is None:
        return None
    values = {"refused": refused}
    if not refused:
        said = "The server lets this user run every command that locks need."
        return Finding("permissions", Verdict.OK, said, values)
    said = (
        f"The server refuses to this user what locks need: {'; '.join(refused)}. Locks fail with "
        f"LockBackendError, at once or now and then. Allow it in the user's ACL."
    )
    return Finding("permissions", Verdict.WARNING, said, values)


def _say_unasked(error: LockBackendError) -> str:
    if error.hint:
        return f"Nothing is known of this: {error}"
    return (
        f"{error.where} could not be asked to {error.action} ({error.reason}), so nothing is known "
        f"of this. Check that the server is up and reachable, and lets this user ask it."
    )


def _new_name(what: str) -> str:
    return f"doctor:{uuid.uuid4().hex}:{what}"
