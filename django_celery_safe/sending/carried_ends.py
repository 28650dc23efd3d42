"""
The ends of a carried run that did not just succeed: it failed, was put back, or goes on.

Each end is one statement, or one transaction, that checks the token of the run's claim. ``carried``
has the run itself, and its success.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from celery.app.task import Context
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded
from django.db import Error as DatabaseError
from django.db import transaction

from .. import conf
from ..delivery.copies import MessageGoesOn, WillBeRedelivered, is_requeued
from ..delivery.deaths import ends_process
from ..events import MESSAGE_FAILED, TASK_POISONED
from ..exceptions import TaskPoisoned
from ..foreign_errors import describe_error, find_soft_time_limit
from ..resuming.handing_over import HandedOver
from ..texts import get_logger
from .capture import Captured
from .followed import Fault, fail_message
from .message_table import Claimed
from .outbox import can_carry, keep, name_attempt, rewrite
from .sender import OutboxSender

if TYPE_CHECKING:
    from ..stages.follower import StepFollower
    from .carried_claim import MessageClaim

logger = get_logger(__name__)

#: Why a run that has returned is not done.
RESENT: Final = Fault(Retry.__name__, "The task has re-sent itself.")
#: Delay of a message that is re-sent because the database with its row did not answer, s.
DATABASE_AWAY: Final = 5.0


class NoAnswer(WillBeRedelivered):
    """The database did not say what follows the message, so the task was not called."""


@contextmanager
def ending(using: str) -> Iterator[None]:
    """
    Open the transaction in which a run ends.

    A soft time limit that interrupts a publication after its commit is no longer the run's
    outcome: the row says another one, and a relay sends what was not sent.
    """
    is_committed: list[bool] = []
    try:
        with transaction.atomic(using=using):
            # Before the publications, which are made in the order of their registration.
            transaction.on_commit(lambda: is_committed.append(True), using=using)
            yield
    except SoftTimeLimitExceeded:
        if not is_committed:
            raise


class RunEnds:
    """
    The ends of a carried run.

    Attributes:
        resent: The messages with which the task continues, such as a retry; None: it does not.
        has_followers: Whether Celery sends messages that wait for the run: the next link of a
            chain, callbacks, or the body of a chord.
        found: The row as the claim found it.
        is_called: Whether the task is being called; before, ``before_start()`` of its class runs.
        has_begun: Whether the task itself has begun, as far as is known here.
        returned: The task's return value as JSON, for a row that is kept; "": the value is not
            recorded.
        follower: What the message belongs to, such as a step; None: nothing.
        unrun: Why the follower does not let the task be called; "": it does.
        held: The name and the token of this run's claim, for statements.
    """

    def __init__(self, claim: MessageClaim, task: Any, request: Context, found: Claimed) -> None:
        # Not the request, which has this run.
        self.claim, self.task, self._task_id = claim, task, request.id or ""
        self.held = claim.name, claim.token
        self.found, self.returned, self.unrun = found, "", ""
        self.follower: StepFollower | None = None
        self.is_called = self.has_begun = False
        self.resent: Captured | None = None
        self._is_replaced = False
        self.has_followers = bool(request.chain or request.callbacks or request.chord)

    def end(self, follow: Callable[[], object] | None = None) -> bool:
        """End the row of a task that is done, with what follows; return whether it was ours."""
        table, name, token = self.claim.table, self.claim.name, self.claim.token
        # A finished task has its result in the row already.
        returned = "" if self.claim.is_finished else self.returned
        if (follower := self.follower) is not None and self.claim.is_finished:
            follower.finish(self.claim.text)

        def end_row() -> bool:
            return table.end(name, token, returned)

        def write() -> bool:
            if follower is not None:
                return follower.end(self.held, end_row)
            with nullcontext() if follow is None else ending(table.alias):
                ours = end_row()
                if ours and follow is not None:
                    follow()
            return ours

        if follow is not None or follower is not None:
            self.claim.stop_renewing()  # the row may be gone before the claim ends
        return self.claim.end_by(write, lambda: table.has_ended(name))

    def fail(self, error: BaseException) -> bool:
        """
        Record the outcome of a run that ended in an error, and end its claim.

        Returns:
            False if it is not recorded: then the row says that the task runs, or runs again.
        """
        if self.claim.is_of_parent():
            return True  # after a bare os.fork() the child leaves the run too
        self.claim.end()
        goes_on = isinstance(error, MessageGoesOn) and not isinstance(error, HandedOver)
        self.has_begun = self.has_begun and not goes_on
        try:
            if isinstance(error, Exception):
                self._uncount_unbegun()
            ours = self._record(error)
        except DatabaseError as failure:
            logger.warning(
                "How %s ended (%s) can't be recorded; a relay sends it again when its lease is "
                "over: %s",
                self.claim.key,
                describe_error(error),
                describe_error(failure),
            )
            return False
        if not ours:
            self.claim.find_new_holder()
        return ours

    def record_failure(self, error: BaseException) -> bool:
        """Store the error in the row; return whether the claim still held the row."""
        error = find_soft_time_limit(error) or error
        fault = Fault.of(error)
        if name_error := getattr(self.task, "_name_error", None):
            fault = fault._replace(type=name_error(error))  # a Django task's result shows the path
        ours = self._record_fault(fault)
        is_poisoned = isinstance(error, TaskPoisoned)
        if ours and (is_poisoned or self.follower is None):
            event = TASK_POISONED if is_poisoned else MESSAGE_FAILED
            event.emit(
                RunEnds, task=self.task.name, task_id=self._task_id, error=describe_error(error)
            )
        return ours

    def _record_fault(self, fault: Fault) -> bool:
        """Fail the row and what follows it; return whether the claim still held the row."""
        row, token = self.claim.table.at(self.claim.name), self.claim.token

        def was_written() -> bool:
            gone = not row.exists()
            return gone if self.follower else row.failed().filter(error_type=fault.type).exists()

        return self.claim.end_by(
            lambda: fail_message(self.follower, self._task_id, row, token, fault), was_written
        )

    def _let_wait(self, fault: Fault) -> None:
        """Let what follows the message wait for the next run, before the row says so."""
        if (follower := self.follower) is not None:
            self.claim.ask(lambda: follower.wait(self.held, fault))

    def put_back(self, delay: float, reason: str, *, died: bool = False) -> bool:
        """Let a relay re-send the message after ``delay``; return whether the claim held it."""
        row, token = self.claim.table.at(self.claim.name), self.claim.token
        wait = timedelta(seconds=delay)
        return self.claim.end_by(
            lambda: row.put_back(token, wait, reason, died=died), lambda: row.was_put_back(reason)
        )

    def _uncount_unbegun(self) -> None:
        """Take back that the claim counted as a start, if the task itself has not begun."""
        # A relay reads from the number that the message which the row has was sent before.
        if not self.has_begun and (self.resent is not None or self.found.starts > 1):
            row, token = self.claim.table.at(self.claim.name), self.claim.token
            self.claim.ask(lambda: row.uncount(token, self.found.starts))

    def _record(self, error: BaseException) -> bool:
        follows = self.follower is not None
        if self.resent is not None and not (follows and self._is_replaced):
            return self._go_on(self.resent, Fault.of(error))
        match error:
            case Reject() if not is_requeued(error):
                return self.record_failure(error)
            case Reject() | Retry() | WillBeRedelivered():
                return self._come_again(error)
            case Ignore() if not follows:
                return self.end()
            case MessageGoesOn():
                return self._come_again(error)
            case Exception() | CancelledError():  # Celery also fails the task with these
                return self.record_failure(error)
        self._let_wait(Fault.of(error))
        # The process ends, because of a signal or because the task ended it. If a worker has
        # ended it, the worker may have failed the task already.
        back = self.put_back(0.0, describe_error(error), died=ends_process(error))
        return back or self._is_ended()

    def _come_again(self, error: BaseException) -> bool:
        """Leave the message to the broker, which has it or will have it; otherwise to a relay."""
        self._let_wait(Fault.of(error))
        is_away, is_handed_over = isinstance(error, NoAnswer), isinstance(error, HandedOver)
        later = 0.0 if is_handed_over else conf.get("OUTBOX_RESEND_AFTER")
        return self.put_back(DATABASE_AWAY if is_away else later, describe_error(error))

    def _is_ended(self) -> bool:
        """Return whether the task has ended, by whoever recorded that."""
        row = self.claim.table.at(self.claim.name)
        return not self.claim.ask(row.filter(due_at__isnull=False).exists)

    def _go_on(self, captured: Captured, why: Fault) -> bool:
        """Write the messages with which the task continues into the outbox, and publish them."""
        self._let_wait(why)
        alias, token = self.claim.table.alias, self.claim.token
        for message in captured.messages:
            if can_carry(message):
                name_attempt(message, alias)
        own = [one for one in captured.messages if one.task_id == self._task_id][:1]
        others = [one for one in captured.messages if one not in own]
        name, replaced = self.claim.name, self._is_replaced

        def write() -> bool:
            with ending(alias):
                sender = OutboxSender.join(alias)
                if own:  # written into the row of the task
                    ours = rewrite(sender, own[0], name, token, other_work=replaced)
                else:
                    ours = self.claim.table.end(name, token)
                if ours and others:
                    keep(sender, Captured(others, captured.chord_calls), goes_on=True)
            return ours

        self.claim.stop_renewing()
        # If the answer got lost: no row is for this attempt any more.
        return self.claim.end_by(write, lambda: self.claim.table.has_ended(name))
