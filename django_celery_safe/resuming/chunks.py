"""The transaction of a chunk, which ends together with the cursor."""

from __future__ import annotations

import os
import threading
from typing import Any

from django.db import connections, transaction

from ..databases import MYSQL
from ..exceptions import WrongTransaction
from ..leases.claim import Claim
from ..transactions import in_atomic, lock_whole
from .cursor import Cursor, record


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
        if (lost := record(self._alias, cursor)) is not None:
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
