"""
The spans in which a process may rely on a lock, made out of the records.

Trust is what the holder's own lock object said: at a moment between two readings of
the clock its ``held`` was True, or its ``remaining`` promised that it would be until
some later moment. Where a record leaves room, the shorter time is taken, so that what
follows from it is certain.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.faults.locks.records import NO, YES, Record

#: Outcomes by which a holder learns that the lock is not its own any more.
LOST = "LockLost"


@dataclass(slots=True)
class Holding:
    """
    One acquisition, from the request to the moment when its holder gave it up.

    Attributes:
        acquired: The record of the acquisition.
        since: From here on the holder was trusted, for certain; None: it never was.
        until: Up to here it was, for certain. Between the two nobody else may have been.
        promised: Up to here it will be trusted by what it knows now.
        could_end: By now the store has let it go at the latest.
        longest: The longest lease that was asked for, ns.
        broken: The ends of promises that were not kept, each with the record that breaks it.
        by_lease: It was not released in time.
    """

    acquired: Record
    since: int | None = None
    until: int = 0
    promised: int = 0
    could_end: int = 0
    longest: int = 0
    broken: list[tuple[int, Record]] = field(default_factory=list)
    by_lease: bool = False

    def promise(self, record: Record) -> None:
        """Take over what ``remaining`` said after this record."""
        self.promised = record.returned + record.left if record.left > 0 else 0
        if self.promised:
            self.trust(record.returned, self.promised)

    def trust(self, since: int, until: int) -> None:
        """Note that the holder was trusted for this time."""
        if self.since is None:
            self.since = since
        self.until = max(self.until, until)

    def end_at(self, moment: int) -> None:
        """Note that the holder does not rely on earlier promises from this moment on."""
        self.until = min(self.until, moment)
        self.promised = 0


def holdings_of(records: Iterable[Record]) -> list[Holding]:
    """Return every acquisition of the history, in the order of the records."""
    found: dict[str, Holding] = {}
    for record in records:
        if record.token is None:
            continue
        if record.action == "acquire":
            holding = found[record.token] = Holding(record)
            holding.promise(record)
        else:
            holding = found[record.token]
            _READERS[record.action](holding, record)
        holding.longest = max(holding.longest, int(record.seconds * 1e9))
        gone = record.action == "release" and record.outcome in {YES, NO}
        holding.could_end = record.returned + (0 if gone else holding.longest)
    return list(found.values())


def _read_look(holding: Holding, record: Record) -> None:
    if record.outcome == YES:
        moment = record.returned if holding.since is None else record.sent
        holding.trust(moment, moment)
        if record.left > 0:
            holding.promise(record)
    else:
        _read_loss(holding, record)


def _read_extend(holding: Holding, record: Record) -> None:
    if record.outcome == LOST:
        # The store may have set the lease that was asked for, and that was over by the answer.
        asked = record.sent + int(record.seconds * 1e9)
        holding.until, holding.promised = min(holding.until, asked), min(holding.promised, asked)
        _read_loss(holding, record)
        return
    # It may have become shorter: from the request on, only what is said now counts.
    holding.end_at(record.sent)
    holding.promise(record)


def _read_ensure(holding: Holding, record: Record) -> None:
    if record.outcome == LOST:
        _read_loss(holding, record)
    elif record.left > 0:
        holding.promise(record)


def _read_release(holding: Holding, record: Record) -> None:
    if record.outcome == NO:
        holding.by_lease = True
        _read_loss(holding, record)
    holding.end_at(record.sent)


def _read_leave(holding: Holding, record: Record) -> None:
    holding.by_lease = True
    holding.end_at(record.sent)


def _read_write(holding: Holding, record: Record) -> None:
    if record.outcome == NO and record.returned < holding.promised:
        holding.broken.append((holding.promised, record))


def _read_loss(holding: Holding, record: Record) -> None:
    """Its holder heard that it is not trusted any more: not before the time, if that was kept."""
    if record.returned < holding.promised:
        holding.broken.append((holding.promised, record))
    holding.end_at(record.returned)


_READERS = {
    "look": _read_look,
    "extend": _read_extend,
    "ensure": _read_ensure,
    "release": _read_release,
    "leave": _read_leave,
    "write": _read_write,
}
