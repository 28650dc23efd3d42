"""
Says from the records of a run whether its locks kept their promises.

Each check is a function of the history that yields what violates it.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from operator import attrgetter

from django_celery_safe.leases.holder import split_place
from tests.faults.locks.history import History
from tests.faults.locks.holdings import Holding
from tests.faults.locks.records import NO, YES, Record
from tests.faults.oracle import Findings, Oracle, scarce

#: Acquisitions that each process must have made in a hundred operations, on average.
ENOUGH_ACQUIRED = 4

#: So many of a hundred tries to acquire must have met a lock that someone held.
ENOUGH_CONTENDED = 2


def show(text: str, *records: Record) -> str:
    """Return a finding with the records that it is about."""
    return "\n".join((f"{records[-1].lock}: {text}", *map(str, records)))


def two_holders(history: History) -> Findings:
    """No two are trusted with one place at a time, but for leases that the store forgot."""
    for earlier, later in _pairs(history):
        if not _excuses(history, earlier, later):
            seconds = (min(earlier.until, later.until) - later.since) / 1e9
            yield show(f"two holders for {seconds:.6f} s.", earlier.acquired, later.acquired)


def too_many_holders(history: History) -> Findings:
    """No more places of a lock are trusted at a time than it has, but for forgotten leases."""
    for later, others in _meetings(history):
        rivals = [one for one in others if not _excuses(history, one, later)]
        places = {one.acquired.lock for one in (*rivals, later)}
        if len(places) > history.plan.limit:
            acquired = [one.acquired for one in (*rivals, later)]
            yield show(f"{len(places)} places of {history.plan.limit} were held.", *acquired)


def _pairs(history: History) -> Iterator[tuple[Holding, Holding]]:
    """Yield those that were trusted with one place at once."""
    for later, others in _meetings(history):
        for earlier in others:
            if earlier.acquired.lock == later.acquired.lock:
                yield earlier, later


def _meetings(history: History) -> Iterator[tuple[Holding, list[Holding]]]:
    """Yield each holding with those that were trusted with the same lock when it began."""
    by_lock: dict[str, list[Holding]] = defaultdict(list)
    for holding in history.holdings:
        if holding.since is not None and holding.since < holding.until:
            by_lock[_lock(holding.acquired)].append(holding)
    for holdings in by_lock.values():
        holdings.sort(key=attrgetter("since"))
        active: list[Holding] = []
        for later in holdings:
            active = [one for one in active if one.until > later.since]
            yield later, active
            active.append(later)


def _excuses(history: History, earlier: Holding, later: Holding) -> bool:
    """Return whether the store had forgotten the earlier one when the later one began."""
    return history.explains(earlier, later.since, min(earlier.until, later.until))


def _lock(record: Record) -> str:
    """Return the name of the lock that a place belongs to."""
    return split_place(record.lock)[0]


def broken_promises(history: History) -> Findings:
    """
    The promises to a holder come true.

    Before its trusted time is over it does not lose the lock, and no write of its is
    refused, unless the store lost its memory after the promise.
    """
    for holding in history.holdings:
        for promised_until, record in holding.broken:
            moment = record.returned
            if history.explains(holding, moment, moment):
                continue
            early = (promised_until - moment) / 1e9
            text = f"{record.action}: lost {early:.6f} s before its trusted time was over."
            yield show(text, holding.acquired, record)


def unordered_fences(history: History) -> Findings:
    """A lock's fences grow from answer to request, and it gives none of them twice."""
    acquired = [one.acquired for one in history.holdings if one.acquired.fence]
    by_return = sorted(acquired, key=lambda record: record.returned)
    largest, returned = dict[str, Record](), 0
    for record in sorted(acquired, key=lambda record: record.sent):
        while returned < len(by_return) and by_return[returned].returned < record.sent:
            before = by_return[returned]
            lock = _lock(before)
            largest[lock] = max(largest.get(lock, before), before, key=attrgetter("fence"))
            returned += 1
        if (last := largest.get(_lock(record))) is not None and record.fence <= last.fence:
            yield show("a fence that is no larger than an earlier one.", last, record)
    seen: dict[tuple[str, int], Record] = {}
    for record in acquired:
        if (twin := seen.setdefault((_lock(record), record.fence), record)) is not record:
            yield show("a fence was given twice.", twin, record)


def older_writes(history: History) -> Findings:
    """After a write, none of an older fence nor of an older acquisition is accepted."""
    acquired = {one.acquired.token: one.acquired for one in history.holdings}
    for writes in _writes(history).values():
        newest: Record | None = None
        latest: Record | None = None
        for write in writes:
            if write.outcome != YES:
                continue
            acquisition = acquired[write.token]
            if newest is not None and write.fence < newest.fence:
                yield show("a write was accepted after one with a newer fence.", newest, write)
            elif latest is not None and acquisition.returned < latest.sent:
                text = "a write was accepted after one of a later acquisition."
                yield show(text, latest, acquisition, write)
            newest = max(newest or write, write, key=attrgetter("fence"))
            latest = max(latest or acquisition, acquisition, key=lambda record: record.sent)


def refusals_without_a_holder(history: History) -> Findings:
    """A lock is refused only while someone may hold it: a lease ends by itself."""
    taken = _taken(history)
    for record in history.records:
        if record.action != "acquire" or record.outcome != NO:
            continue
        starts, ends = taken.get(_lock(record), ([], []))
        # The last time that began before the answer; ends grow along with the starts.
        index = bisect_right(starts, record.returned) - 1
        if index < 0 or ends[index] < record.sent:
            yield show("refused when every lease had ended long before.", record)


def _spans(history: History) -> list[tuple[str, int, int]]:
    """Return when a place of a lock may have been taken."""
    spans = [(_lock(one.acquired), one.acquired.sent, one.could_end) for one in history.holdings]
    # Without an answer it may have been acquired all the same, and nobody knows.
    spans += [
        (record.lock, record.sent, record.returned + int(record.seconds * 1e9))
        for record in history.records
        if record.action == "acquire" and record.outcome not in {YES, NO}
    ]
    return spans


def _taken(history: History) -> dict[str, tuple[list[int], list[int]]]:
    """Return for each lock when all its places may have been taken: starts, ends of each time."""
    # A place that is taken when another is freed comes first.
    grace, spans = int(history.grace * 1e9), _spans(history)
    changes = [(start, 0, lock) for lock, start, _ in spans]
    changes += [(end + grace, 1, lock) for lock, _, end in spans]
    taken: dict[str, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    holders: dict[str, int] = defaultdict(int)
    for moment, is_end, lock in sorted(changes):
        if not is_end:
            holders[lock] += 1
        if holders[lock] == history.plan.limit:
            taken[lock][is_end].append(moment)
        holders[lock] -= is_end
    return taken


def incomplete_answers(history: History) -> Findings:
    """Each acquisition has its own token, and a fence if there are any; no write is missing."""
    tokens: set[str | None] = {None}
    for record in history.records:
        if record.action != "acquire" or record.outcome != YES:
            continue
        if record.token in tokens or record.fence is None:
            yield show("acquired without a token of its own, or without a fence.", record)
        tokens.add(record.token)
    for writes in _writes(history).values():
        if [write.number for write in writes] != list(range(1, len(writes) + 1)):
            yield show("the resource saw writes of which there is no record.", writes[-1])


def too_little(history: History) -> Findings:
    """Enough has happened for the other checks to mean something."""
    counts, plan = count(history), history.plan
    acquired = [0] * plan.processes
    for holding in history.holdings:
        acquired[holding.acquired.process] += 1
    share = counts["operations"] / plan.processes * ENOUGH_ACQUIRED / 100
    for process, number in enumerate(acquired):
        if number < max(share, 2):
            yield f"process {process} acquired {number} times, of {share:.0f} that are enough."
    tries = counts["acquisitions"] + counts["contended"]
    wanted = dict.fromkeys(("ended by lease", "outlived pauses", "refused writes"), 1.0)
    wanted |= {"contended": max(tries * ENOUGH_CONTENDED / 100, 2), "most at once": plan.limit}
    yield from scarce(counts, wanted | {"restarts": int(plan.nemesis == "restart")})


def count(history: History) -> dict[str, int]:
    """Count what happened."""
    outcomes: dict[tuple[str, str], int] = defaultdict(int)
    for record in history.records:
        outcomes[record.action, record.outcome] += 1
    return {
        "operations": history.operations,
        "looks": sum(number for (action, _), number in outcomes.items() if action == "look"),
        "writes": outcomes["write", YES] + outcomes["write", NO],
        "refused writes": outcomes["write", NO],
        "acquisitions": outcomes["acquire", YES],
        "contended": outcomes["acquire", NO],
        "ended by lease": sum(1 for holding in history.holdings if holding.by_lease),
        "found lost": outcomes["extend", "LockLost"] + outcomes["ensure", "LockLost"],
        "not answered": sum(
            number for (_, outcome), number in outcomes.items() if outcome == "LockBackendError"
        ),
        "pauses": len(history.pauses),
        "outlived pauses": _outlived_pauses(history),
        "restarts": len(history.losses),
        "most at once": max((len(others) + 1 for _, others in _meetings(history)), default=0),
        "two holders by memory loss": sum(_excuses(history, *pair) for pair in _pairs(history)),
    }


def _outlived_pauses(history: History) -> int:
    """Count pauses in which the lease of the process that stood still came to its end."""
    by_process: dict[int, list[Holding]] = defaultdict(list)
    for holding in history.holdings:
        by_process[holding.acquired.process].append(holding)
    number = 0
    for pause in history.pauses:
        holdings = by_process[pause.process]
        # In the order of time, and each ends before the next begins.
        index = bisect_right(holdings, pause.until, key=lambda one: one.acquired.sent) - 1
        # The pause may have caught it while it asked for the next one.
        number += any(
            _outlived(one, pause.since, pause.until) for one in holdings[index : index + 1]
        )
    return number


def _outlived(holding: Holding, since: int, until: int) -> bool:
    if holding.since is None:
        # The answer came when its lease was over already.
        return holding.acquired.sent < until <= holding.acquired.returned
    return since < holding.until <= until < holding.could_end


def _writes(history: History) -> dict[str, list[Record]]:
    """Return the writes to each resource in its own order."""
    writes: dict[str, list[Record]] = defaultdict(list)
    for record in history.records:
        if record.action == "write":
            writes[record.lock].append(record)
    for of_one in writes.values():
        of_one.sort(key=lambda write: write.number)
    return writes


CHECKS = [
    two_holders, too_many_holders, broken_promises, unordered_fences, older_writes,
    refusals_without_a_holder, incomplete_answers, too_little,
]  # fmt: skip
ORACLE = Oracle(count, CHECKS)
