"""
The run of a carried task in this process: its claim of the message's row, and its ends.

Each end is one statement, or one transaction, that checks the token of the claim. ``carried`` calls
the task in between.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from celery._state import get_current_task
from celery.app.task import Context
from celery.exceptions import (
    Ignore,
    Reject,
    Retry,
    SoftTimeLimitExceeded,
    WorkerShutdown,
    WorkerTerminate,
)
from django.db import DEFAULT_DB_ALIAS, connections, transaction
from django.db import Error as DatabaseError

from .. import conf
from ..delivery.copies import (
    MessageGoesOn,
    WillBeRedelivered,
    is_requeued,
    refuse_run,
    resend_later,
)
from ..delivery.header import Header, Kept, get_header
from ..events import MESSAGE_DONE, MESSAGE_FAILED, TASK_POISONED
from ..exceptions import ConfigurationError, TaskPoisoned, find_soft_time_limit
from ..leases.claim import Claim
from ..leases.lease import clock
from ..resuming.checkpoints import HandedOver
from ..texts import describe_error, get_logger
from .capture import Message, capture
from .followed import NOTHING, Fault, fail_message, find_follower
from .message_table import Claimed, MessageTable, message_table
from .outbox import carry, keep, rewrite
from .sender import OutboxSender

if TYPE_CHECKING:
    from ..stages.follower import StepFollower

T = TypeVar("T")

logger = get_logger(__name__)

#: Delay of a message that is re-sent because the database with its row did not answer, s.
DATABASE_AWAY: Final = 5.0
#: Exit codes of billiard's children after a signal. A task may call ``sys.exit(-1)`` itself.
SIGNALLED: Final = range(-255, -191)


class NoAnswer(WillBeRedelivered):
    """The database did not say what follows the message, so the task was not called."""


class MessageClaim(Claim):
    """
    The claim of a carried message.

    ``finish()`` writes the result into the row, which stays until the run has ended: if the
    process dies in between, the next run returns that result and does nothing else.
    """

    table: MessageTable
    is_carried = True
    #: What the message belongs to, such as a step; None: nothing.
    follower: StepFollower | None = None

    def __init__(self, alias: str, attempt: str, task: Any, request: Context) -> None:
        key = f"{task.name}[{request.id}]"
        super().__init__(message_table(alias), attempt, key, conf.get("LOCK_TIMEOUT"))

    def _encode(self, result: Any) -> str:
        follower = self.follower
        return super()._encode(result) if follower is None else follower.encode(result, self.key)

    def _write_done(self, text: str) -> bool:
        text = text or NOTHING
        ours = bool(self._rows().claimed(self.token).update(result=text))
        if ours and self.follower is not None:
            self.follower.finish(text)
        return ours


def claim_message(task: Any, request: Context, header: Header) -> Run:
    """
    Claim the message of a task for a run.

    Raises:
        MessageGoesOn: The message has ended, or another process runs it.
    """
    alias = header.get("using", DEFAULT_DB_ALIAS)
    if alias not in connections.settings:
        raise ConfigurationError(
            f"The row of this message of {task.name} is in the database {alias!r}, which DATABASES "
            f"of this worker has not, so it can't know whether the task is to run. Add it there, "
            f"or let a worker that has it take the queue."
        )
    claim = MessageClaim(alias, header["attempt"], task, request)
    table = claim.table

    def ask() -> Any:
        claim.asked_at = clock.now()
        claimed = table.claim(claim.name, claim.token, claim.seconds, holder)
        return table.find(claim.name) if claimed is None else claimed

    what, instead = f"The task {task.name}", "Put atomic() inside the function."
    try:
        holder = claim.prepare(task, request, what, instead)
        found = claim.ask(ask)
    except DatabaseError as error:
        table.check_migrated(error)
        resend_later(task, request, DATABASE_AWAY, f"No answer: {describe_error(error)}")
    # Its own token: it was claimed, but the answer got lost.
    if isinstance(found, Claimed) or (found is not None and found.token == claim.token):
        return Run(task, request.id or "", claim, found)
    reason = "its row is gone, so it is done, was discarded, or was rolled back"
    if found is not None:
        is_running = found.state == "running"
        reason = "another process runs it" if is_running else f"it is {found.state}"
    return refuse_run(task, request, reason)


class Run:
    """
    The run of a carried task in this process.

    Each of its ends is one statement, or one transaction, that checks the token of its claim.

    Attributes:
        resent: The messages with which the task continues, such as a retry; None: it does not.
        found: The row as the claim found it.
        is_called: Whether the task is being called; before, ``before_start()`` of its class runs.
        has_begun: Whether the task itself has begun, as far as is known here.
        returned: The task's return value as JSON, for a row that is kept; "": the value is not
            recorded.
        follower: What the message belongs to, such as a step; None: nothing.
        unrun: Why the follower does not let the task be called; "": it does.
        held: The name and the token of this run's claim, for statements.
    """

    def __init__(self, task: Any, task_id: str, claim: MessageClaim, found: Claimed) -> None:
        self.task, self._task_id, self.claim = task, task_id, claim
        self.held = claim.name, claim.token
        self.found, self.returned, self.unrun = found, "", ""
        self.follower: StepFollower | None = None
        self.is_called = self.has_begun = False
        self.resent: list[Message] | None = None
        self._is_replaced = False

    def begin(self, header: Header) -> None:
        """
        Begin to renew the lease, and begin what follows the message with this header.

        Raises:
            NoAnswer: What follows could not be read, so nothing has begun.
        """
        self.claim.begin()
        follower = self.follower = self.claim.follower = find_follower(header)
        if follower is None:
            return
        try:
            self.unrun = self.claim.ask(lambda: follower.begin(self._task_id))
        except DatabaseError as error:
            raise NoAnswer(f"No answer: {describe_error(error)}") from error
        if self.found.result:
            follower.finish(self.found.result)

    def keep(self, send: Callable[[], T], *, unchanged: bool = False) -> T:
        """
        Call ``send``, and keep the messages that it sends until the run has ended.

        Args:
            unchanged: Whether the run's own message is sent again, because it did not begin.
        """
        self.has_begun = self.has_begun and not unchanged
        captured = [*(self.resent or ())]  # such as a retry without throw
        try:
            result = capture(self.task.app, captured, lambda **_: send())
        except Ignore:
            self._is_replaced, self.resent = True, captured
            raise
        self.resent = captured
        return result

    def succeed(self, follow: Callable[[], object] | None = None) -> None:
        """
        Record that the task is done, or that it continues with another message.

        Args:
            follow: Sends what follows, in the transaction that ends the row.

        Raises:
            ClaimLost: Another run has claimed the message by now.
        """
        goes_on, fault = self.resent, None if self.follower is None else self.follower.fault
        try:
            self._uncount_unbegun()
            if goes_on is not None:
                ours = self._go_on(goes_on, Fault(Retry.__name__, "The task has re-sent itself."))
            elif fault is None or self.claim.is_finished:
                ours = self.end(follow) or bool(self.unrun)
            else:
                ours = self._record_fault(fault)
        finally:
            self.claim.end()
        if not ours:
            self.claim.raise_lost()
        if goes_on is None and self.follower is None:
            self._emit_done()

    def end_with(self, follow: Callable[[], object]) -> bool:
        """End the row together with what follows; return whether the claim still held it."""
        ours = self.end(follow)
        if ours:
            self.claim.end()
            self._emit_done()
        return ours

    def _emit_done(self) -> None:
        MESSAGE_DONE.emit(Run, task=self.task.name, task_id=self._task_id)

    def end(self, follow: Callable[[], object] | None = None) -> bool:
        """End the row of a task that is done, with what follows; return whether it was ours."""
        table, name = self.claim.table, self.claim.name
        # A finished task has its result in the row already.
        returned = "" if self.claim.is_finished else self.returned
        end_row = partial(table.end, *self.held, returned)
        follower = self.follower

        def write() -> bool:
            if follower is not None:
                return follower.end(self.held, end_row)
            if follow is None:
                return end_row()
            with transaction.atomic(using=table.alias):
                ours = end_row()
                if ours:
                    follow()
            return ours

        if follow is not None or follower is not None:
            self.claim.stop_renewing()  # the row may be gone before the claim ends
        return self._write_end(write, lambda: table.has_ended(name))

    def _write_end(self, write: Callable[[], bool], is_written: Callable[[], bool]) -> bool:
        """Execute the statement that ends the row; see :meth:`Claim.end_by`."""
        try:
            return self.claim.end_by(write, is_written)
        except SoftTimeLimitExceeded:
            # It is no longer the outcome if it came after that, as in a publication after the
            # commit: the row says another one, and a relay sends what was not sent.
            if not self.claim.ask(is_written):
                raise
            return True

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
            text = "How %s ended (%s) can't be recorded; a relay sends it again after its lease: %s"
            logger.warning(text, self.claim.key, describe_error(error), describe_error(failure))
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
            event.emit(Run, task=self.task.name, task_id=self._task_id, error=describe_error(error))
        return ours

    def _record_fault(self, fault: Fault) -> bool:
        """Fail the row and what follows it; return whether the claim still held the row."""
        row, token = self.claim.table.at(self.claim.name), self.claim.token

        def was_written() -> bool:
            gone = not row.exists()
            return gone if self.follower else row.failed().filter(error_type=fault.type).exists()

        fail = partial(fail_message, self.follower, self._task_id, row, token, fault)
        return self._write_end(fail, was_written)

    def _let_wait(self, fault: Fault) -> None:
        """Let what follows the message wait for the next run, before the row says so."""
        if (follower := self.follower) is not None:
            self.claim.ask(lambda: follower.wait(self.held, fault))

    def _put_back(self, error: BaseException, delay: float, *, died: bool = False) -> bool:
        """Let a relay re-send the message after ``delay``; return whether the claim held it."""
        self._let_wait(Fault.of(error))
        row, token = self.claim.table.at(self.claim.name), self.claim.token
        wait, reason = timedelta(seconds=delay), describe_error(error)
        put_back = partial(row.put_back, token, wait, reason, died=died)
        return self._write_end(put_back, lambda: row.was_put_back(reason))

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
        comes_again = is_requeued(error) or isinstance(error, Retry | WillBeRedelivered)
        if comes_again or (follows and isinstance(error, MessageGoesOn)):
            # The broker has the message, or will have it; otherwise a relay re-sends it.
            later = 0.0 if isinstance(error, HandedOver) else conf.get("OUTBOX_RESEND_AFTER")
            return self._put_back(error, DATABASE_AWAY if isinstance(error, NoAnswer) else later)
        if isinstance(error, Ignore) and not (follows or isinstance(error, Reject)):
            return self.end()
        if isinstance(error, Exception | CancelledError):  # Celery also fails the task with these
            return self.record_failure(error)
        # The process ends, because of a signal or because the task ended it. If a worker has
        # ended it, the worker may have failed the task already.
        back = self._put_back(error, 0.0, died=_ends_process(error))
        return back or self.claim.ask(lambda: self.claim.table.has_ended(self.claim.name))

    def _go_on(self, messages: list[Message], why: Fault) -> bool:
        """Write the messages with which the task continues into the outbox, and publish them."""
        self._let_wait(why)
        table, replaced = self.claim.table, self._is_replaced
        for message in messages:
            carry(message, table.alias)
        own = [one for one in messages if one.task_id == self._task_id][:1]
        others = [one for one in messages if one not in own]

        def write() -> bool:
            with transaction.atomic(using=table.alias):
                sender = OutboxSender.join(table.alias)
                if own:  # written into the row of the task
                    ours = rewrite(sender, own[0], *self.held, other_work=replaced)
                else:
                    ours = table.end(*self.held)
                if ours and others:
                    keep(sender, others, goes_on=True)
            return ours

        self.claim.stop_renewing()
        # If the answer got lost: no row is for this attempt any more.
        return self._write_end(write, lambda: table.has_ended(self.claim.name))


def _ends_process(error: BaseException) -> bool:
    """Return whether an error ends the process because the task itself raised it."""
    if isinstance(error, SystemExit):
        by_worker = isinstance(error, WorkerShutdown | WorkerTerminate)
        return not by_worker and error.code not in SIGNALLED
    return isinstance(error, KeyboardInterrupt)


def find_run(task_id: str | None) -> Run | None:
    """Return the run of the carried task with this id, if this code is inside that run."""
    task = get_current_task()
    run = None if task is None else run_of(task.request)
    return run if run is not None and run.claim.is_held and task.request.id == task_id else None


def run_of(request: Any) -> Run | None:
    """Return the run of a carried task that has begun with this request; None: none has."""
    kept = getattr(request, "safe_kept", None)
    return kept.run if isinstance(kept, Kept) else None


def is_by_row(request: Context) -> bool:
    """Return whether only the row of a carried task runs it again: no run holds the row now."""
    run = run_of(request)
    return "attempt" in get_header(request) if run is None else not run.claim.is_held
