""":func:`resumable`, a loop that goes on behind its last committed chunk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from django.db import DEFAULT_DB_ALIAS

from ..exceptions import ConfigurationError
from .chunks import Chunk
from .cursor import begin_walk, unfit
from .handing_over import hand_over_if_told
from .walks import Items, Rows, find_walk

T = TypeVar("T")


class Resumable(Generic[T]):
    """The items that are not done yet; each ``for`` begins a loop."""

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
    return Resumable(find_walk(items, key), every)
