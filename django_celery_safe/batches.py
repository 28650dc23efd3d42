"""How many messages are handled at a time: a number of them, and a number of bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

T = TypeVar("T")

#: Bytes of the messages that a process handles at a time. It needs several times that much
#: memory, because a broker's client encodes each message once more.
BATCH_BYTES: Final = 16 * 1024 * 1024


def in_batches(
    items: Iterable[T], most: int, size: Callable[[T], int], most_bytes: int | None = None
) -> Iterator[list[T]]:
    """
    Yield all items in their order, a batch at a time.

    Args:
        most: How many items a batch has at most.
        size: Returns the bytes of an item.
        most_bytes: How many bytes a batch has at most, unless it is a single item; None:
            ``BATCH_BYTES``.
    """
    limit = BATCH_BYTES if most_bytes is None else most_bytes
    batch: list[T] = []
    total = 0
    for item in items:
        added = size(item)
        if batch and (len(batch) == most or total + added > limit):
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += added
    if batch:
        yield batch
