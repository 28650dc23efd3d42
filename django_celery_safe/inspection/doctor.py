"""
The doctor, which tests whether the configured store keeps its guarantees.

:func:`examine` takes locks, lets their leases expire, lets processes race for them, and
yields a finding for each check. ``race`` runs the processes; ``manage.py celery_locks doctor``
prints the findings.
"""

from __future__ import annotations

import os
import statistics
import time
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any, Final

from .. import conf
from ..exceptions import (
    BackendNotSupported,
    CelerySafeError,
    LockBackendError,
    WrongTransaction,
)
from ..foreign_errors import describe_error
from ..leases.holder import Holder, describe_holder, place_names
from ..locks import CacheLock, cache_lock
from ..locks.stores import USE_INSTEAD, Location, emptied_with_locks, locate
from ..locks.stores.base import Acquired, Store
from .findings import OK, UNKNOWN, UNSAFE, WARNING, Finding
from .race import INTERVAL, RaceFailed, RaceOutcome, Racers, find_doubt

#: Lease of the locks that do not have to expire, s. If the doctor is killed, its locks stay
#: held for this time.
LEASE: Final = 10.0
#: Lease of the lock that has to expire, s, and the longest wait after its end.
MEASURED_LEASE: Final = 1.0
LONGEST_DELAY: Final = 5.0
#: Pause between two tries to get a lock whose lease is about to end, s.
TRY_EVERY: Final = 0.005
#: A lease that ends this much too late causes a warning, s.
LATE: Final = 0.5
#: Limit of the lock for whose last place the processes race.
PLACES: Final = 2
#: Number of locks for which the processes race after their lease has expired, longest time to
#: acquire and release them (a slow store gets fewer locks), s, and their lease, s.
EXPIRED: Final = 20
EXPIRED_WITHIN: Final = 5.0
SHORT_LEASE: Final = 0.3
#: Most pairs of acquire and release that are timed, and for how long, s.
PAIRS: Final = 200
PAIRS_WITHIN: Final = 1.0
#: A round trip longer than this part of a lease is worth a warning.
ROUND_TRIP: Final = 1 / 10
#: How many times the clock is queried; the fastest answer counts.
CLOCK_ASKED: Final = 5
#: By how much the clocks may differ, s.
CLOCK_OFFSET: Final = 1.0
#: How many times a waiter is woken, how long it waits before that, and at most, s.
WAKINGS: Final = 3
WAITS_BEFORE: Final = 0.2
LONGEST_WAIT: Final = 10.0
#: A waiter that a release wakes has the lock within this time, s.
WOKEN_WITHIN: Final = 0.5
#: How long a store may keep a wake-up for a waiter, s.
WAKE_UP_LASTS: Final = 2.1

#: Lease of the test lock, s: if the process is killed, the lock stays held for this time.
TRIED_LEASE: Final = 10.0


def find_place(cache: str | conf.Unset = conf.UNSET) -> Finding:
    """Find out where locks live, and whether processes share that place; query no server."""
    values: dict[str, Any] = {}
    try:
        location = locate(cache)
        values |= location._asdict()
        store = location.store()
    except Exception as error:  # noqa: BLE001 - it must be said, whatever it is
        if isinstance(error, BackendNotSupported):
            values["where"] = error.where
        return explain(error)._replace(values=values)
    values["where"] = store.where
    text = f"Locks live in {store.where}"
    if store.shared:
        return Finding(OK, f"{text}.", values=values)
    text += (
        ", which every process has for itself: two worker processes, or a worker and a web "
        "server, get the same lock."
    )
    return Finding(WARNING, text, USE_INSTEAD, values=values)


def try_lock(store: Store) -> None:
    """Acquire a lock and release it; raise the store's error if that fails."""
    name, token = f"check:{uuid.uuid4().hex}", os.urandom(16).hex()
    holder = describe_holder(None, None, renewed=False)
    store.acquire(name, token, store.nearest_lease(TRIED_LEASE), holder)
    store.release(name, token)


def find_permissions(store: Store) -> Finding | None:
    """Find out whether the server allows this user all commands that locks need; doctor only."""
    refused = store.ask_refused()
    if not refused:
        text = "The server lets this user run every command that locks need."
        return None if refused is None else Finding(OK, text, values={"refused": []})
    text = (
        f"The server refuses to this user what locks need: {'; '.join(refused)}. Locks fail with "
        f"LockBackendError, at once or now and then."
    )
    hint = "Allow it in the user's ACL."
    return Finding(WARNING, text, hint, values={"refused": refused})


def find_weakness(store: Store) -> Finding | None:
    """Report a weakness of the store that can lose locks."""
    if not store.weakness:
        return None
    text = f"Locks live in {store.where}: {store.weakness}."
    return Finding(WARNING, text, USE_INSTEAD)


def find_clearing(location: Location) -> Finding:
    """Find out whether ``cache.clear()`` frees the locks along with other things."""
    shared = emptied_with_locks(location)
    values = {"emptied_with": shared}
    if not shared:
        text = "Nothing else that the project clears takes the locks along."
        return Finding(OK, text, values=values)
    text = (
        f"Locks live in {location.store().where}, which is emptied along with "
        f"{', '.join(shared)}: one cache.clear() frees every lock while its holder works."
    )
    hint = (
        "Name in LOCK_CACHE an alias with a database number (memcached: a server; Redis "
        "Cluster: a cluster) of its own: "
        'DJANGO_CELERY_SAFE = {"LOCK_CACHE": "locks"}. If other projects share that, give it a '
        "KEY_PREFIX too: locks of the same name would exclude each other."
    )
    return Finding(WARNING, text, hint, values=values)


def find_eviction(store: Store) -> Finding | None:
    """Find out whether the server deletes locks when it runs short of memory."""
    eviction = store.ask_eviction()
    if eviction is None:
        return None
    values = {"policy": eviction.policy, "max_memory_bytes": eviction.max_memory}
    text = f"Locks live in {store.where}: its maxmemory-policy is {eviction.policy}, which deletes "
    if eviction.spares_locks:
        text += "no lock when its memory is short."
        return Finding(OK, text, values=values)
    text += "locks when its memory is short, and then two processes hold one lock."
    if not eviction.max_memory:
        text += " (maxmemory is 0: the server deletes nothing before somebody sets it.)"
    hint = (
        "Set maxmemory-policy to noeviction, give the locks a server of their own, set "
        "LOCK_DATABASE, or protect what the locks guard by their fence."
    )
    return Finding(UNSAFE, text, hint, values=values)


def explain(error: Exception) -> Finding:
    """Return the finding for an error that the store raised."""
    if isinstance(error, BackendNotSupported):
        text = f"{error.where} can't {error.what}: {error.reason}."
        return Finding(UNSAFE, text, error.hint)
    if isinstance(error, LockBackendError) and error.hint:
        text = f"Locks live in {error.where}, which refused to {error.action}: {error.reason}."
        return Finding(UNKNOWN, text, error.hint)
    if isinstance(error, LockBackendError):
        asked = f"could not be asked to {error.action} ({error.reason})"
        text = f"Locks live in {error.where}, which {asked}."
        hint = "Check that the server is up and reachable, and lets this user ask it."
        return Finding(UNKNOWN, text, hint)
    hint = "See LOCK_CACHE and LOCK_DATABASE"
    if isinstance(error, CelerySafeError):
        return Finding(UNKNOWN, str(error), f"{hint}.")
    text = f"The store of the locks failed: {describe_error(error)}."
    return Finding(UNKNOWN, text, f"{hint}, and that alias in CACHES.")


def examine(
    cache: str | conf.Unset = conf.UNSET, *, processes: int = 2, seconds: float = 1.0
) -> Generator[Finding]:
    """
    Test the store that holds the locks, and yield each finding as soon as it is made.

    It takes a few seconds, longer if the store's leases are whole seconds, and about a minute
    if each answer takes 0.7 s. The locks have unique names, and none stays held, whatever
    happens; only a doctor that is killed leaves locks, for 10 s.

    Args:
        cache: Alias of the cache; unset: the place where the settings keep locks.
        processes: Number of processes that race, at least 2. They are new processes of this
            project, with the settings that ``DJANGO_SETTINGS_MODULE`` names.
        seconds: How long the processes race once they are set up; longer on a slow store.

    Raises:
        WrongTransaction: LOCK_DATABASE is inside ``atomic()``.
    """
    place = find_place(cache)._replace(check="store")
    if place.verdict in (UNSAFE, UNKNOWN):
        yield place
        return
    store = locate(cache).store()
    try:
        store.check_lease(conf.lock_timeout())
        try_lock(store)
    except WrongTransaction:
        raise
    except Exception as error:  # noqa: BLE001 - a doctor must say what it is, whatever it is
        yield explain(error)._replace(values=place.values, check="store")
        # A server that refuses a command still answers, and may explain more.
        if isinstance(error, LockBackendError) and error.hint:
            with suppress(LockBackendError):
                if permissions := find_permissions(store):
                    yield permissions._replace(check="permissions")
        return
    yield place
    examination = _Examination(store, cache, processes, seconds)
    try:
        yield from examination.findings()
    finally:
        examination.clean_up()


class _Ended(Exception):
    """A check has ended early, with this verdict, text and hint."""


class _Examination:
    """One examination of one store; it knows the names of the locks that it took."""

    def __init__(
        self, store: Store, cache: str | conf.Unset, processes: int, seconds: float
    ) -> None:
        self._store, self._cache = store, cache
        self._processes, self._seconds = processes, seconds
        self._names: list[str] = []
        self._waited_at = 0.0
        self._pair_takes = 0.0
        self._fences: list[int | None] = []

    def findings(self) -> Iterator[Finding]:
        """Yield the finding of each check; a check that fails does not stop the others."""
        checks: dict[str, Callable[[], Finding | None]] = {
            "permissions": lambda: find_permissions(self._store),
            "weakness": lambda: find_weakness(self._store),
            "eviction": lambda: find_eviction(self._store),
            "clearing": lambda: find_clearing(locate(self._cache)),
            "clock": self.clock,
            "round_trip": self.round_trip,
            "listing": self.listing,
            "waking": self.waking,
            "lease": self.lease,
            "exclusion": self.exclusion,
            "fencing": self.fencing,
        }
        for name, check in checks.items():
            try:
                finding = check()
            except _Ended as end:
                finding = Finding(*end.args)
            except Exception as error:  # noqa: BLE001 - as in examine()
                finding = explain(error)
            if finding is not None:
                yield finding._replace(check=name)

    def clock(self) -> Finding:
        """Measure how much this machine's clock differs from the store's."""
        answers = []
        for _ in range(CLOCK_ASKED):
            began = time.monotonic()
            store_time = self._store.ask_time()
            took = time.monotonic() - began
            if store_time is None:
                text = "The store has no clock that could be asked."
                return Finding(OK, text, values={"offset_s": None})
            answers.append((took, time.time() - took / 2 - store_time))
        offset = min(answers)[1]
        values = {"offset_s": round(offset, 3)}
        way = "ahead of" if offset > 0 else "behind"
        text = f"This machine's clock is {abs(offset):.3f} s {way} the store's"
        # If the store's leases are whole seconds, its clock is, too.
        if abs(offset) <= CLOCK_OFFSET + self._store.early:
            return Finding(OK, f"{text}.", values=values)
        text += ": ages of locks are shown wrong by so much. Leases do not depend on it."
        hint = "Let both synchronise their clocks (NTP)."
        return Finding(WARNING, text, hint, values=values)

    def round_trip(self) -> Finding:
        """Measure how long acquiring and releasing a lock takes."""
        name = self._new_name("round_trip")
        took: list[float] = []
        ends_at = time.monotonic() + PAIRS_WITHIN
        while len(took) < 2 or (len(took) < PAIRS and time.monotonic() < ends_at):
            began = time.monotonic()
            with self._held(name):
                pass
            took.append((time.monotonic() - began) * 1000)
        median, slow = statistics.median(took), statistics.quantiles(took, n=100)[-1]
        slow = min(slow, max(took))  # a quantile of few values is extrapolated
        self._pair_takes = median / 1000
        values = {"median_ms": round(median, 3), "p99_ms": round(slow, 3), "pairs": len(took)}
        text = (
            f"To acquire and release takes {median:.1f} ms (median of {len(took)}; {slow:.1f} ms "
            f"at the 99th percentile)"
        )
        lease = conf.lock_timeout()
        if slow <= lease * ROUND_TRIP * 1000:
            return Finding(OK, f"{text}.", values=values)
        text += (
            f", more than a tenth of LOCK_TIMEOUT ({lease:g} s): a lease may end before it is "
            f"renewed."
        )
        hint = "Give a longer LOCK_TIMEOUT, or find out what makes the store slow."
        return Finding(WARNING, text, hint, values=values)

    def listing(self) -> Finding:
        """Check whether a held lock is listed."""
        name = self._new_name("listing")
        with self._held(name) as lock:
            try:
                is_listed = any(held.token == lock.token for held in self._store.iter_locks())
            except BackendNotSupported as refusal:
                return Finding(WARNING, str(refusal), values={"listed": None})
        if is_listed:
            return Finding(OK, "A lock that is held is listed.", values={"listed": True})
        text = (
            f"The lock {name!r} was held and not listed: celery_locks and the admin do not show "
            f"all locks that are held."
        )
        return Finding(WARNING, text, values={"listed": False})

    def waking(self) -> Finding:
        """Measure how soon after a release a waiter has the lock."""
        name = self._new_name("waking")
        waits: list[float] = []
        for _ in range(WAKINGS):
            with ThreadPoolExecutor(1) as threads:
                # The release comes before the wait for the thread, even after Ctrl-C.
                with self._held(name):
                    waiter = threads.submit(self._wait_for, name)
                    time.sleep(WAITS_BEFORE)
                    released_at = time.monotonic()
                waits.append(max(0.0, waiter.result() - released_at) * 1000)
        median, longest = statistics.median(waits), max(waits)
        values = {
            "promised": self._store.wakes,
            "median_ms": round(median, 3),
            "longest_ms": round(longest, 3),
        }
        text = (
            f"A waiter had the lock {median:.1f} ms after its release (median of {WAKINGS}; "
            f"{longest:.1f} ms at the most)"
        )
        if not self._store.wakes:
            text += ": no release wakes it here, it asks again and again."
            return Finding(OK, text, values=values)
        if longest <= WOKEN_WITHIN * 1000:
            return Finding(OK, f"{text}.", values=values)
        text += (
            ", though a release wakes it: something between here and the store keeps answers "
            "back, or one of both is overloaded."
        )
        return Finding(WARNING, text, values=values)

    def _wait_for(self, name: str) -> float:
        """Wait for the lock; return the time of the acquisition by the monotonic clock."""
        self._waited_at = time.monotonic()
        lock = self._lock(name)
        try:
            if not lock.acquire(LONGEST_WAIT):
                raise _Ended(UNKNOWN, f"A waiter did not get a lock within {LONGEST_WAIT:g} s.")
            acquired_at = time.monotonic()
            lock.release()
            return acquired_at
        finally:
            self._waited_at = time.monotonic()
            if self._store.connects_threads:
                self._store.close()

    def lease(self) -> Finding:
        """Measure when a lock that is neither renewed nor released becomes free."""
        name = self._new_name("lease")
        seconds = self._store.nearest_lease(MEASURED_LEASE)
        asked_at = time.monotonic()
        _require_acquired(name, self._lock(name, seconds).acquire())
        held_at = time.monotonic()
        other = self._lock(name)
        values: dict[str, Any] = {"asked_s": seconds, "free_after_s": None}
        text = f"A lock with a lease of {seconds:g} s was "
        while not other.acquire():
            if time.monotonic() > held_at + seconds + LONGEST_DELAY:
                text += (
                    f"not free {LONGEST_DELAY:g} s after its end: the lock of a killed holder "
                    f"would stay held."
                )
                return Finding(WARNING, text, values=values)
            time.sleep(TRY_EVERY)
        free_at = time.monotonic()
        other.release()
        values["free_after_s"] = lasted = round(free_at - asked_at, 3)
        text += f"free after {lasted:.3f} s"
        if free_at - asked_at < seconds - self._store.early:
            text += ", while its holder still trusted it: two processes hold one lock."
            return Finding(UNSAFE, text, self._advise(), values=values)
        if free_at - held_at <= seconds + LATE + 2 * self._store.early:
            return Finding(OK, f"{text}.", values=values)
        text += ": the lock of a killed holder stays held for too long."
        return Finding(WARNING, text, values=values)

    def exclusion(self) -> Finding:
        """Check whether several processes that race for a lock hold it at the same time."""
        most = int(EXPIRED_WITHIN / max(self._pair_takes, EXPIRED_WITHIN / EXPIRED))
        expired = [self._new_name(f"expired:{number}") for number in range(max(1, most))]
        fresh, places = self._new_name("exclusion"), self._new_name("places")
        # A process that is killed in the race may hold any place.
        self._names += place_names(places, PLACES)[1:]
        each = [fresh, places] if self._store.limits else [fresh]
        # The kinds alternate, so a short overload of the machine spoils only some of each.
        names = [name for once in expired for name in (once, *each)]
        names += [fresh] * (round(self._seconds / INTERVAL) - len(expired))
        try:
            race = self._race(names, expired, places)
        except RaceFailed as failure:
            raise _Ended(UNKNOWN, f"Processes could not race for a lock: {failure}.") from failure
        fences = [holding.fence for holding in race.holdings if holding.name == fresh]
        tried, overlaps = Counter(names[: race.tries]), race.overlaps()
        acquired = Counter(holding.name for holding in race.holdings)
        values = {"processes": self._processes}
        for what, counts in (("tries", tried), ("acquired", acquired), ("overlaps", overlaps)):
            others = counts.total() - counts[fresh] - counts[places]
            values |= {what: counts[fresh], f"expired_{what}": others}
            values[f"places_{what}"] = counts[places]
        values["errors"] = len(race.errors)
        # Overlapping acquisitions have no order.
        self._fences = [] if overlaps[fresh] else fences
        text = f"{self._processes} processes raced {tried[fresh]} times for a lock"
        ended = f"{values['expired_tries']} times for one whose lease had ended"
        if self._store.limits:
            text += f", {ended} and {tried[places]} times for the last of {PLACES} places"
        else:
            text += f" and {ended}"
        if overlaps.total():
            text += f": {overlaps.total()} times two held one lock at once."
            return Finding(UNSAFE, text, self._advise(), values=values)
        if doubt := find_doubt(values, race.errors):
            text += f", and never did two hold one; but {doubt}"
            return Finding(UNKNOWN, text, values=values)
        return Finding(OK, f"{text}; never did two hold one.", values=values)

    def _race(self, names: Sequence[str], expired: Sequence[str], places: str) -> RaceOutcome:
        """Let processes race for locks, some of which are held until just before the race."""
        limits = {places: PLACES}
        with Racers(self._processes, self._cache) as racers:
            # The leases end while the processes are set up.
            self._let_expire(expired)
            racers.wait_until_ready()
            self._wait_until_free(expired)
            with cache_lock(places, cache=self._cache):
                return racers.race(names, self._store.nearest_lease(LEASE), limits)

    def _let_expire(self, names: Sequence[str]) -> None:
        seconds = self._store.nearest_lease(SHORT_LEASE)
        for name in names:
            # Not through a Lock, which refuses a lease that has expired when the answer arrives.
            token = uuid.uuid4().hex
            outcome = self._store.acquire(name, token, seconds, Holder(lease=seconds))
            _require_acquired(name, isinstance(outcome, Acquired))

    def _wait_until_free(self, names: Sequence[str]) -> None:
        longest = self._store.nearest_lease(SHORT_LEASE) + LONGEST_DELAY
        ends_at = time.monotonic() + longest
        for name in names:
            while self._store.peek(name) is not None and time.monotonic() < ends_at:
                time.sleep(TRY_EVERY)

    def fencing(self) -> Finding:
        """Check whether each acquisition has a larger number than all earlier ones."""
        fences = []
        for _ in range(2):
            with self._held(self._new_name("fencing")) as lock:
                fences.append(lock.fence)
        if not self._store.fences and fences == [None, None]:
            text = (
                "The store does not number acquisitions: lock.fence is None. Only writes that "
                "are guarded by it need that."
            )
            return Finding(OK, text, values={"acquisitions": 0})
        fences = [*self._fences, *fences]
        values = {"acquisitions": len(fences)}
        if all(a is not None and b is not None and a < b for a, b in pairwise(fences)):
            text = f"The fence grew with each of {len(fences)} acquisitions."
            return Finding(OK, text, values=values)
        text = (
            f"The fence did not grow with each of {len(fences)} acquisitions: a write that it "
            f"guards may be refused to the holder, or allowed to the holder before."
        )
        return Finding(UNSAFE, text, values=values)

    def clean_up(self) -> None:
        """Release the locks that are held, and remove their names from the store."""
        if self._store.wakes:
            # A release within this time would leave a wake-up for a waiter.
            time.sleep(max(0.0, self._waited_at + WAKE_UP_LASTS - time.monotonic()))
        with suppress(Exception):  # otherwise everything ends with its lease
            for name in self._names:
                # A lock that expired may still be in the store's list.
                lock = self._lock(name)
                if lock.acquire():
                    lock.release()
                elif (held := self._store.peek(name)) is not None:
                    self._store.release(name, held.token)

    def _new_name(self, what: str) -> str:
        name = f"doctor:{uuid.uuid4().hex}:{what}"
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
        _require_acquired(name, lock.acquire())
        try:
            yield lock
        finally:
            released = lock.release()
        held_for, lease = time.monotonic() - asked_at, self._store.nearest_lease(LEASE)
        if not released and held_for < lease - self._store.early:
            text = (
                f"A lock with a lease of {lease:g} s was gone when its holder released it after "
                f"{held_for:.3f} s: two processes can hold one lock."
            )
            raise _Ended(UNSAFE, text, self._advise())

    def _advise(self) -> str:
        if not self._store.shared or self._store.weakness:
            return f"Keep the locks elsewhere. {USE_INSTEAD}"
        return (
            "Find out what deletes locks there (FLUSHDB, cache.clear(), an eviction, a restart, a "
            "failover), or give the locks a server of their own."
        )


def _require_acquired(name: str, is_acquired: bool) -> None:
    if not is_acquired:
        text = f"The lock {name!r} could not be acquired, though no other process knows of it."
        raise _Ended(UNKNOWN, text)
