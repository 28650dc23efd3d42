"""
Says from the records of a run whether its locks kept their promises.

Each check is a function of the history that yields what violates it; ``check`` runs
all. A check that found nothing says something only if there was something to be found,
so a history in which too little happened is a violation too.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.histories.holdings import Holding, holdings_of
from tests.histories.records import NO, YES, History, Record

#: Of a hundred operations that each process had on average, it must have acquired so many.
ENOUGH_ACQUIRED = 4

#: So many of a hundred tries to acquire must have met a lock that someone held.
ENOUGH_CONTENDED = 2

#: So many of a hundred ns must lie outside of the windows of memory loss.
ENOUGH_OUTSIDE = 25


class Violation(NamedTuple):
    """What was violated, how, and the records that show it."""

    check: str
    text: str
    records: tuple[Record, ...] = ()


@dataclass
class Story:
    """
    A history with what was made out of it once for all checks.

    Attributes:
        holdings: Every acquisition.
        excused: How many times two holders trusted themselves at once because the
            store had lost its memory.
    """

    history: History
    holdings: list[Holding] = field(init=False)
    excused: int = 0

    def __post_init__(self) -> None:
        self.holdings = holdings_of(self.history.records)

    def explains(self, holding: Holding, since: int, until: int) -> bool:
        """Whether a lease from before a loss of memory explains what was from then till then."""
        return any(
            loss.since <= since
            and until <= loss.gone + holding.longest
            and holding.acquired.sent < loss.gone
            for loss in self.history.losses
        )

    def windows(self) -> list[tuple[int, int]]:
        """Return from when to when leases ran of which the store knew nothing."""
        return [
            (
                loss.since,
                max(
                    (
                        loss.gone + holding.longest
                        for holding in self.holdings
                        if holding.acquired.sent < loss.gone and loss.since < holding.could_end
                    ),
                    default=loss.gone,
                ),
            )
            for loss in self.history.losses
        ]


Check = Callable[[Story], Iterator[Violation]]


def check(history: History) -> tuple[Story, list[Violation]]:
    """Run every check; return what was made out of the records, and all violations."""
    story = Story(history)
    return story, [violation for each in CHECKS for violation in each(story)]


def two_holders(story: Story) -> Iterator[Violation]:
    """No two are trusted with one lock at a time, but for leases that the store forgot."""
    by_lock: dict[str, list[Holding]] = defaultdict(list)
    for holding in story.holdings:
        if holding.since is not None and holding.since < holding.until:
            by_lock[holding.acquired.lock].append(holding)
    for holdings in by_lock.values():
        holdings.sort(key=_since)
        active: list[Holding] = []
        for later in holdings:
            active = [one for one in active if one.until > _since(later)]
            for earlier in active:
                yield from _overlap(story, earlier, later)
            active.append(later)


def _overlap(story: Story, earlier: Holding, later: Holding) -> Iterator[Violation]:
    since, until = _since(later), min(earlier.until, later.until)
    if story.explains(earlier, since, until):
        story.excused += 1
        return
    yield Violation(
        "two holders",
        f"{later.acquired.lock}: two trusted themselves for {_ms(until - since)}, "
        f"from {_at(story, since)} on.",
        (earlier.acquired, later.acquired),
    )


def _since(holding: Holding) -> int:
    assert holding.since is not None
    return holding.since


def broken_promises(story: Story) -> Iterator[Violation]:
    """
    What a holder is promised comes true.

    Before its trusted time is over it does not lose the lock, and no write of its is
    refused, unless the store lost its memory after the promise.
    """
    for holding in story.holdings:
        for promised_until, record in holding.broken:
            moment = record.returned
            if story.explains(holding, moment, moment):
                continue
            what = "a write was refused" if record.action == "write" else "the lock was lost"
            yield Violation(
                "broken promises",
                f"{record.lock}: {what} {_ms(promised_until - moment)} before its trusted "
                f"time was over, at {_at(story, moment)}.",
                (holding.acquired, record),
            )


def unordered_fences(story: Story) -> Iterator[Violation]:
    """Who asked after another had got its answer gets the larger fence; none is given twice."""
    acquired = [one.acquired for one in story.holdings if one.acquired.fence is not None]
    by_return = sorted(acquired, key=lambda record: record.returned)
    largest, returned = None, 0
    for record in sorted(acquired, key=lambda record: record.sent):
        while returned < len(by_return) and by_return[returned].returned < record.sent:
            largest = max(largest or by_return[0], by_return[returned], key=_fence)
            returned += 1
        if largest is not None and _fence(record) <= _fence(largest):
            yield Violation(
                "unordered fences",
                f"{record.lock}: the fence is {_fence(record)} at {_at(story, record.returned)}, "
                f"after {_fence(largest)} at {_at(story, largest.returned)}.",
                (largest, record),
            )
    seen: dict[int, Record] = {}
    for record in acquired:
        if (twin := seen.setdefault(_fence(record), record)) is not record:
            text = f"{record.lock}: the fence {_fence(record)} was given twice."
            yield Violation("unordered fences", text, (twin, record))


def _fence(record: Record) -> int:
    assert record.fence is not None
    return record.fence


def older_writes(story: Story) -> Iterator[Violation]:
    """After a write, none of an older fence nor of an older acquisition is accepted."""
    acquired = {one.acquired.token: one.acquired for one in story.holdings}
    for lock, writes in _writes(story.history).items():
        newest: Record | None = None
        latest: Record | None = None
        for write in writes:
            if write.outcome != YES:
                continue
            acquisition = acquired[write.token]
            if newest is not None and _fence(write) < _fence(newest):
                text = f"{lock}: a write was accepted after one with a newer fence."
                yield Violation("older writes", text, (newest, write))
            elif latest is not None and acquisition.returned < latest.sent:
                text = f"{lock}: a write was accepted after one of a later acquisition."
                yield Violation("older writes", text, (latest, acquisition, write))
            newest = max(newest or write, write, key=_fence)
            latest = max(latest or acquisition, acquisition, key=lambda record: record.sent)


def refusals_without_a_holder(story: Story) -> Iterator[Violation]:
    """A lock is refused only while someone may hold it: a lease ends by itself."""
    taken = _taken(story)
    for record in story.history.records:
        if record.action != "acquire" or record.outcome != NO:
            continue
        starts, ends = taken.get(record.lock, ([], []))
        # The last time that began before the answer; ends grow along with the starts.
        index = bisect_right(starts, record.returned) - 1
        if index < 0 or ends[index] < record.sent:
            yield Violation(
                "refusals without a holder",
                f"{record.lock}: refused at {_at(story, record.returned)}, when every lease "
                f"had ended long before.",
                (record,),
            )


def _taken(story: Story) -> dict[str, tuple[list[int], list[int]]]:
    """Return for each lock when it may have been taken: starts, and ends, of each time."""
    history = story.history
    spans = [(one.acquired.lock, one.acquired.sent, one.could_end) for one in story.holdings]
    # Without an answer it may have been acquired all the same, and nobody knows.
    spans += [
        (record.lock, record.sent, record.returned + int(record.seconds * 1e9))
        for record in history.records
        if record.action == "acquire" and record.outcome not in {YES, NO}
    ]
    spans.sort(key=lambda span: span[1])
    taken: dict[str, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    grace = int(history.grace * 1e9)
    for lock, start, end in spans:
        starts, ends = taken[lock]
        if starts and start <= ends[-1]:
            ends[-1] = max(ends[-1], end + grace)
        else:
            starts.append(start)
            ends.append(end + grace)
    return taken


def incomplete_answers(story: Story) -> Iterator[Violation]:
    """Who acquires gets a token of its own, and a fence if there are any; no write is missing."""
    history = story.history
    tokens: set[str] = set()
    for record in history.records:
        if record.action != "acquire" or record.outcome != YES:
            continue
        missing = [] if record.token else ["token"]
        if history.fences and record.fence is None:
            missing.append("fence")
        if missing:
            text = f"{record.lock}: acquired without a {' and a '.join(missing)}."
            yield Violation("incomplete answers", text, (record,))
        if record.token in tokens:
            text = f"{record.lock}: two acquisitions have one token."
            yield Violation("incomplete answers", text, (record,))
        tokens.add(record.token or "")
    for lock, writes in _writes(history).items():
        if [write.place for write in writes] != list(range(1, len(writes) + 1)):
            text = f"{lock}: the resource saw writes of which there is no record."
            yield Violation("incomplete answers", text)


def too_little(story: Story) -> Iterator[Violation]:
    """Enough has happened for the other checks to mean something."""
    return (Violation("too little", text) for text in _missing(story))


def _missing(story: Story) -> Iterator[str]:
    history, counts = story.history, count(story)
    acquired = [0] * history.processes
    for holding in story.holdings:
        acquired[holding.acquired.process] += 1
    share = counts["operations"] / history.processes * ENOUGH_ACQUIRED / 100
    for process, number in enumerate(acquired):
        if number < max(share, 2):
            yield f"process {process} acquired {number} times, of {share:.0f} that are enough."
    tries = counts["acquisitions"] + counts["contended"]
    if counts["contended"] < max(tries * ENOUGH_CONTENDED / 100, 2):
        yield f"{counts['contended']} of {tries} tries met a lock that someone held."
    wanted = ["ended by lease", "outlived pauses"]
    wanted += ["refused writes"] if history.fences else []
    wanted += ["restarts"] if history.nemesis == "restart" else []
    yield from (f"{name}: none." for name in wanted if not counts[name])
    if history.losses:
        yield from _missing_around_losses(story)


def _missing_around_losses(story: Story) -> Iterator[str]:
    outside = _outside(story)
    if outside < ENOUGH_OUTSIDE:
        yield f"only {outside:.0f} % of the time is outside of windows of memory loss."
    acquired = [holding.acquired for holding in story.holdings]
    first = min((record.returned for record in acquired), default=None)
    last = max((record.sent for record in acquired), default=None)
    if (
        first is None
        or last is None
        or not any(first < loss.since and loss.back < last for loss in story.history.losses)
    ):
        yield "no restart has acquisitions both before and after it."


def _outside(story: Story) -> float:
    """Return how many of a hundred ns lie outside of all windows of memory loss."""
    inside, end = 0, 0
    for first, last in story.windows():
        inside += max(0, last - max(first, end))
        end = max(end, last)
    return 100 - inside / 1e7 / max(story.history.seconds, 1e-9)


def count(story: Story) -> dict[str, int]:
    """Count what happened."""
    history = story.history
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
        "ended by lease": sum(1 for holding in story.holdings if holding.by_lease),
        "found lost": outcomes["extend", "LockLost"] + outcomes["ensure", "LockLost"],
        "not answered": sum(
            number for (_, outcome), number in outcomes.items() if outcome == "LockBackendError"
        ),
        "pauses": len(history.pauses),
        "outlived pauses": _outlived_pauses(story),
        "restarts": len(history.losses),
        "two holders by memory loss": story.excused,
    }


def _outlived_pauses(story: Story) -> int:
    """Count pauses in which the lease of the process that stood still came to its end."""
    by_process: dict[int, list[Holding]] = defaultdict(list)
    for holding in story.holdings:
        by_process[holding.acquired.process].append(holding)
    number = 0
    for pause in story.history.pauses:
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
        of_one.sort(key=lambda write: write.place)
    return writes


def _at(story: Story, moment: int) -> str:
    began = min(record.sent for record in story.history.records)
    return f"{(moment - began) / 1e9:.6f} s"


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.3f} ms"


CHECKS: Iterable[Check] = (
    two_holders,
    broken_promises,
    unordered_fences,
    older_writes,
    refusals_without_a_holder,
    incomplete_answers,
    too_little,
)
