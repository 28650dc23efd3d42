"""
:func:`resumable`, a loop that goes on behind its last committed chunk.

:class:`Rows` and :class:`Items` go through a queryset or a list; :class:`Chunk` is the transaction
of a chunk, which ends together with the cursor.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeAlias, TypeVar

from django.core.exceptions import ValidationError
from django.db import DEFAULT_DB_ALIAS, connections, router, transaction
from django.db.models import QuerySet
from django.db.models.query import ModelIterable

from ..databases import MYSQL
from ..exceptions import ConfigurationError, WrongTransaction
from ..leases.claim import Claim
from ..transactions import in_atomic, lock_whole
from .checkpoints import Cursor, begin_walk, hand_over_if_told, record, unfit

T = TypeVar("T")

#: The items of a chunk, the place behind them, and whether there was no further item.
Part: TypeAlias = tuple[list[Any], Any, bool]


class Resumable(Generic[T]):
    """
    The items that are not done yet; each ``for`` begins a loop.

    Not a generator: a variable would keep it, and its open chunk, behind a ``break``.
    """

    def __init__(self, walk: Rows | Items, every: int) -> None:
        self._walk, self._every = walk, every

    def __iter__(self) -> Iterator[T]:
        walk = self._walk
        claim, cursor = begin_walk(walk.of, "resumable()")
        alias = (claim.table or walk).alias or DEFAULT_DB_ALIAS
        if walk.alias not in (None, alias):
            raise ConfigurationError(
                f"{walk.of} is in the database {walk.alias!r}, and the row of {claim.key!r} in "
                f"{alias!r}, so they can't commit together. Send it with using={walk.alias!r}."
            )
        if cursor is None:
            cursor = walk.start()
        elif why := walk.misfit(cursor):
            raise unfit(claim, cursor, why)
        chunk = Chunk(claim, alias)
        try:
            is_last = False
            while not is_last:
                chunk.open()
                items, at, is_last = walk.read(cursor.at, alias, self._every)
                if not items:
                    return
                yield from items
                cursor = cursor._replace(at=at, done=(cursor.done or 0) + len(items))
                del items  # memory for one chunk, not two
                chunk.commit(cursor)
                if not is_last:
                    hand_over_if_told()
        finally:
            chunk.abandon()


def resumable(items: Iterable[T], /, *, every: int = 500, key: str = "pk") -> Resumable[T]:
    """
    Loop over items so that a killed task goes on behind those that are done.

    One transaction commits the writes of a chunk to the database of the task's row, together with
    the place behind it. After a kill, a failure or a retry, the next run begins behind the
    last committed chunk: no item twice, none left out. Effects elsewhere, such as e-mails, are
    repeated for at most one chunk. A worker that shuts down hands the task over behind its chunk.
    ``max_deaths`` counts deaths since the last chunk.

    It works in a task with ``outbox="until_done"``, in a step, and under ``idempotent``. A direct
    or eager call is a plain loop with a transaction for each chunk.

    A chunk is committed when the loop asks for the item behind it: write what an item leads to
    before that, and walk to the end, which ``zip`` and ``islice`` may not do.

    A chunk that is not completed is rolled back: at ``break`` and ``return``, an error, ``retry()``
    or a soft time limit, and at the end of the task, whatever still refers to the loop. A nested
    ``atomic()`` is a savepoint; ``finish()`` belongs behind the loop; async code can't use it.

    Args:
        items: A queryset, which is walked by its key and may change meanwhile, without an order,
            slice or ``distinct()``; or a list or range that is the same in each run.
        every: How many items a chunk has.
        key: The field by which a queryset is walked, unique and never NULL.

    Raises:
        ConfigurationError: The code has no claim, or a second loop; the rows are in another
            database; or the place does not fit the code.
        WrongTransaction: The loop is begun inside ``atomic()``.
        ClaimLost: Another process does the work now; the chunk is rolled back.

    Example:
        >>> from celery import shared_task
        >>> from django_celery_safe import SafeTask, resumable
        >>> @shared_task(base=SafeTask, outbox="until_done")
        ... def refresh_prices(feed):
        ...     for price in resumable(Price.objects.filter(feed=feed), every=500):
        ...         price.refresh()
    """
    if type(every) is not int or every < 1:
        raise ConfigurationError(f"every={every!r} is not a valid size of a chunk: give 1 or more.")
    if isinstance(items, QuerySet):
        return Resumable(Rows(items, key), every)
    if isinstance(items, Sequence) and not isinstance(items, str | bytes):
        return Resumable(Items(items), every)
    raise ConfigurationError(
        f"resumable() got {type(items).__name__}, which can't be begun in the middle. Give a "
        f"queryset, a list or a range, or set cursors yourself: checkpoint() and resumed_at()."
    )


class Rows:
    """
    The rows of a queryset, by a unique key.

    Attributes:
        of: Names the rows in a cursor, such as ``shop.price by id``.
        alias: The database in which the chunks have to be.

    Raises:
        ConfigurationError: The key is not unique, or the queryset can't be ordered by it.
    """

    def __init__(self, rows: Any, key: str) -> None:
        meta = rows.model._meta
        self._key = field = meta.pk if key == "pk" else meta.get_field(key)
        if not (getattr(field, "unique", False) and field.concrete) or field.null:
            raise ConfigurationError(
                f"key={key!r} of {meta.label} can't name a place in a queryset: the key has to be "
                f"one column that is unique and never NULL."
            )
        query = rows.query
        faults = {
            "a slice": query.is_sliced,
            "distinct()": query.distinct,
            "order_by()": query.order_by or query.extra_order_by or not query.standard_ordering,
            "union() or the like": query.combinator,
            "a window function": any(
                getattr(one, "contains_over_clause", False) for one in query.annotations.values()
            ),
            "values()": not issubclass(rows._iterable_class, ModelIterable),
        }
        if fault := next((name for name, is_there in faults.items() if is_there), ""):
            raise ConfigurationError(
                f"resumable() walks rows of {meta.label} in the order of their key, "
                f"each once, and can't do that with {fault}. Leave it out, or go through a list."
            )
        self.alias: str | None = rows._db or router.db_for_write(rows.model, **rows._hints)
        self._rows, self._name = rows, field.attname
        self.of = f"{meta.label_lower} by {field.attname}"

    def start(self) -> Cursor:
        """Return the cursor of the beginning."""
        return Cursor(self.of, None, 0, self._rows.using(self.alias).count())

    def misfit(self, cursor: Cursor) -> str:
        """Return why a cursor does not fit, as a clause; "": it fits."""
        with suppress(ValidationError):
            if cursor.at is None or self._key.to_python(cursor.at) == cursor.at:
                return ""
        return f"the key is now a {type(self._key).__name__}"

    def read(self, at: Any, alias: str, most: int) -> Part:
        """Return up to ``most`` rows behind a place."""
        rows = self._rows.using(alias).order_by(self._name)
        if at is not None:
            rows = rows.filter(**{f"{self._name}__gt": at})
        found = list(rows[:most])
        if found and getattr(found[0], self._name) == at:  # SQLite keeps 15 digits of a decimal
            raise ConfigurationError(
                f"resumable() can't walk {self.of}: the database finds {at!r} behind itself, as it "
                f"compares that key less exactly than Python. Walk another key."
            )
        # The last key before the body runs, which may give a row another one.
        last = getattr(found[-1], self._name) if found else at
        # A join may return a row several times, one behind the other.
        once = {getattr(row, self._name): row for row in found}
        return [*once.values()], last, len(found) < most


class Items:
    """The items of a list or another sequence, by their index; as :class:`Rows` otherwise."""

    of = "a list"
    alias: str | None = None

    def __init__(self, items: Sequence[Any]) -> None:
        self._items = items

    def start(self) -> Cursor:
        return Cursor(self.of, 0, 0, len(self._items))

    def misfit(self, cursor: Cursor) -> str:
        now, before = len(self._items), cursor.total or 0
        return "" if now >= before else f"the list has {now:,} items now, of {before:,}"

    def read(self, at: Any, alias: str, most: int) -> Part:
        items = list(self._items[at : at + most])
        return items, at + len(items), at + len(items) >= len(self._items)


class Chunk:
    """
    The open chunk of a loop: its writes and the cursor are committed together, or not at all.

    The claim knows the open chunk, and ends it at the end of the work. The garbage collector may
    drop the loop much later, when another task has a transaction open, or in another thread or a
    forked process, so :meth:`abandon` does nothing then.

    Args:
        claim: The claim of the work.
        alias: The database of its row.
    """

    def __init__(self, claim: Claim, alias: str) -> None:
        self._claim, self._alias = claim, alias
        self._blocks: list[Any] = []
        self._owner = os.getpid(), threading.get_ident()

    def open(self) -> None:
        """
        Begin a transaction.

        Raises:
            WrongTransaction: One is open.
        """
        table = self._claim.table
        if table is not None and in_atomic(self._alias):
            raise WrongTransaction(
                f"The chunks of {self._claim.key!r} can't be committed inside atomic() of "
                f"{self._alias!r}. Begin the resumable() loop outside of that block."
            )
        self._claim.abandon_chunk = self.abandon
        # After a deadlock, MySQL has rolled back all, and would commit the rest: the end of a
        # savepoint fails then, even if the body has caught the error.
        for _ in range(1 + (connections[self._alias].vendor == MYSQL)):
            self._blocks.append(transaction.atomic(using=self._alias))
            self._blocks[-1].__enter__()
        if table is not None:
            lock_whole(self._alias, table.all().model)

    def commit(self, cursor: Cursor) -> None:
        """
        Commit the chunk with the cursor behind it.

        Raises:
            ClaimLost: The claim is no longer ours; the chunk is rolled back.
            WrongTransaction: The body has left a block open; the chunk is rolled back.
        """
        if connections[self._alias].atomic_blocks[-1:] != self._blocks[-1:]:
            raise WrongTransaction(
                f"The loop of {self._claim.key!r} began its next item inside an atomic() block of "
                f"its body, so its chunk can't be committed. Leave each block before the next item."
            )
        # The end of a savepoint would hide an error of the body that it has caught.
        connections[self._alias].validate_no_broken_transaction()
        if len(self._blocks) > 1:
            self._blocks.pop().__exit__(None, None, None)
        if (lost := record(self._alias, cursor.encode())) is not None:
            self.abandon()
            lost.raise_lost()
        block = self._blocks.pop()
        self._claim.abandon_chunk = None
        block.__exit__(None, None, None)

    def abandon(self) -> None:
        """Roll the chunk back, unless it has ended."""
        if not self._blocks or self._owner != (os.getpid(), threading.get_ident()):
            return
        blocks, self._blocks = self._blocks, []
        self._claim.abandon_chunk = None
        open_blocks = connections[self._alias].atomic_blocks
        while open_blocks and open_blocks[-1] in blocks:
            open_blocks[-1].__exit__(GeneratorExit, GeneratorExit(), None)
