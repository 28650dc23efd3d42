"""
Running a carried task, whose message stays in the outbox until the task is done.

With ``outbox="until_done"`` a run claims the row of its message under a renewed lease, and ends
the row when the run ends. If the process dies on any line, the lease expires and a relay re-sends
the message. A message whose row has ended, or is claimed by another run, does nothing.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from celery._state import get_current_task
from celery.app.task import Context
from celery.backends.base import DisabledBackend
from celery.exceptions import (
    Ignore,
    Reject,
    Retry,
    SoftTimeLimitExceeded,
    TaskPredicate,
    WorkerShutdown,
    WorkerTerminate,
)
from django.db import Error as DatabaseError
from django.db import transaction

from .. import conf
from ..delivery.call import Function
from ..delivery.copies import MessageGoesOn, WillBeRedelivered, is_requeued
from ..delivery.endings import Outcome
from ..delivery.header import Header, Kept, get_header
from ..events import MESSAGE_DONE, MESSAGE_FAILED, TASK_NOT_RUN, TASK_POISONED
from ..exceptions import ClaimLost, TaskPoisoned
from ..foreign_errors import describe_error, find_soft_time_limit
from ..leases.holder import HeldLock, decode_holder
from ..resuming.checkpoints import HandedOver
from ..texts import get_logger
from ..values import decode
from .capture import Captured, capture
from .carried_claim import DATABASE_AWAY, MessageClaim, claim_message
from .followed import Fault, fail_message, find_follower
from .followers import carried_followers, end_with_body, send_followers
from .message_table import Claimed
from .outbox import can_carry, keep, name_attempt, rewrite
from .sender import OutboxSender

if TYPE_CHECKING:
    from ..stages.follower import StepFollower

T = TypeVar("T")

logger = get_logger(__name__)

#: Exit codes of billiard's children after a signal. A task may call ``sys.exit(-1)`` itself.
SIGNALLED: Final = range(-255, -191)


class NoAnswer(WillBeRedelivered):
    """The database did not say what follows the message, so the task was not called."""


class Run:
    """
    The run of a carried task in this process.

    Each of its ends is one statement, or one transaction, that checks the token of its claim.

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
            self.unrun = follower.begin(self._task_id)
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
        before = self.resent or Captured()  # such as a retry without throw
        captured = Captured([*before.messages], [*before.chord_calls])
        try:
            result = capture(self.task.app, captured, lambda _: send())
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
            if not self.has_begun:
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
            event.emit(Run, task=self.task.name, task_id=self._task_id, error=describe_error(error))
        return ours

    def _record_fault(self, fault: Fault) -> bool:
        """Fail the row and what follows it; return whether the claim still held the row."""
        row, token = self.claim.table.at(self.claim.name), self.claim.token

        def was_written() -> bool:
            gone = not row.exists()
            return gone if self.follower else row.failed().filter(error_type=fault.type).exists()

        return self._write_end(
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
        return self._write_end(
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
        back = self.put_back(0.0, describe_error(error), died=_ends_process(error))
        row = self.claim.table.at(self.claim.name)
        return back or not self.claim.ask(row.filter(due_at__isnull=False).exists)

    def _come_again(self, error: BaseException) -> bool:
        """Leave the message to the broker, which has it or will have it; otherwise to a relay."""
        self._let_wait(Fault.of(error))
        is_away, is_handed_over = isinstance(error, NoAnswer), isinstance(error, HandedOver)
        later = 0.0 if is_handed_over else conf.get("OUTBOX_RESEND_AFTER")
        return self.put_back(DATABASE_AWAY if is_away else later, describe_error(error))

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
            with transaction.atomic(using=alias):
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
        return self._write_end(write, lambda: self.claim.table.has_ended(name))


def find_run(task_id: str | None) -> Run | None:
    """Return the run of the carried task with this id, if this code is inside that run."""
    task = get_current_task()
    run = None if task is None else _run_of(task.request)
    return run if run is not None and run.claim.is_held and task.request.id == task_id else None


def _run_of(request: Any) -> Run | None:
    """Return the run of a carried task that has begun with this request; None: none has."""
    kept = getattr(request, "safe_kept", None)
    return kept.run if isinstance(kept, Kept) else None


def is_by_row(request: Context) -> bool:
    """Return whether only the row of a carried task runs it again: no run holds the row now."""
    run = _run_of(request)
    return "attempt" in get_header(request) if run is None else not run.claim.is_held


def run_carried(task: Any, request: Any, function: Function, /, *args: Any, **kwargs: Any) -> Any:
    """Run a carried task; see :func:`run_part`."""
    return run_part(task, request, partial(function, *args, **kwargs))


def run_part(task: Any, request: Any, part: Callable[[], Any], *, is_called: bool = True) -> Any:
    """
    Run a carried task, unless its message has ended or another process runs it.

    Args:
        part: Calls the task, or what its class does before that.
        is_called: Whether it calls the task.

    Raises:
        MessageGoesOn: The task must not run for this message.
        TaskPoisoned: So many processes died in the task that it is not run again.
        ClaimLost: When the work was done, another run had claimed the message.
    """
    kept: Kept = request.safe_kept
    header, run = kept.header, kept.run
    if request.is_eager or (run is not None and run.is_called):
        return part()
    if run is None:
        begun = claim_message(task, request, header)
        if isinstance(begun, str):
            _emit_not_run(task, request, begun)
            raise MessageGoesOn(f"Not run: {begun}")
        run = kept.run = Run(begun[0], task, request, begun[1])
    run.is_called = is_called
    try:
        result = _call(run, request, header, part)
        # After a bare os.fork() the child also gets here, and must not end the claim.
        is_ours = not run.claim.is_of_parent()
        if is_ours and run.claim.is_finished:
            run.claim.check_committed()
    except BaseException as error:
        if not _is_for_autoretry(task, error):
            _fail(run, error)
        raise
    if run.is_called and is_ours:
        _succeed(run, request, result)
        if not run.claim.is_held:
            request.safe_ended = "attempt"
    return result


def _succeed(run: Run, request: Context, result: Any) -> None:
    """
    End the row of a run that has returned, with what follows if that is carried too.

    Raises:
        MessageGoesOn: The row does not say that the task is done, so it runs elsewhere, or again.
    """
    task, alias = run.task, run.claim.table.alias
    follow = None
    if run.has_followers and run.resent is None and run.follower is None:
        if not carried_followers(task, request, alias):
            # Celery sends them, and then reports the success.
            end_with_body(task, request, alias, run.end_with)
            return
        follow = partial(send_followers, task, request, result)
    try:
        _check_storable(task, request, result)
        run.succeed(follow)
    except (DatabaseError, ClaimLost) as error:
        raise WillBeRedelivered(f"Its end is not recorded: {describe_error(error)}") from error
    except Exception as error:
        _fail(run, error)
        raise
    if follow is not None:
        request.callbacks = request.chain = None


def _fail(run: Run, error: BaseException) -> None:
    """
    Record a failure.

    Raises:
        MessageGoesOn: The row does not say so: no result is stored, and no errback is called.
    """
    is_failure = isinstance(error, Exception) and not isinstance(error, TaskPredicate)
    if not run.fail(error) and is_failure:
        text = f"Its end is not recorded ({describe_error(error)})"
        raise WillBeRedelivered(text) from error


def _emit_not_run(task: Any, request: Context, reason: str) -> None:
    """Report that a task is not run for its message, and why."""
    TASK_NOT_RUN.emit(run_carried, task=task.name, task_id=request.id, reason=reason)


def _call(run: Run, request: Context, header: Header, function: Callable[[], Any]) -> Any:
    """Run the task, or return the result that it was finished with before its process died."""
    found = run.found
    if run.claim.lease is None:
        run.begin(header)
    if run.unrun:
        if run.is_called:
            _emit_not_run(run.task, request, run.unrun)
        return None
    if found.result:
        if run.is_called:
            done = "its work was finished before, and its result is returned"
            _emit_not_run(run.task, request, done)
        return decode(found.result)
    if found.deaths:
        _refuse_after_deaths(run.task, request.id, found)
    with run.claim.current():
        run.has_begun = run.is_called
        return function()


def _refuse_after_deaths(task: Any, task_id: str | None, found: Claimed) -> None:
    """
    Refuse to run a task in which too many processes died.

    Raises:
        TaskPoisoned: So many processes died in the task that it is not run again.
    """
    given: int | conf.Unset | None = getattr(task, "max_deaths", conf.UNSET)
    most: int | None = conf.get("MAX_DEATHS") if isinstance(given, conf.Unset) else given
    if most is not None and found.deaths >= most:
        last = decode_holder(found.last_death, HeldLock("")).holder
        process = str(last._replace(task_id=None))
        raise TaskPoisoned(f"{task.name}[{task_id}]", found.deaths, process)


def _ends_process(error: BaseException) -> bool:
    """Return whether an error ends the process because the task itself raised it."""
    match error:
        case WorkerShutdown() | WorkerTerminate():
            return False
        case SystemExit(code=code):
            return code not in SIGNALLED
    return isinstance(error, KeyboardInterrupt)


def end_run(outcome: Outcome) -> None:
    """End a run whose outcome only Celery knows, such as one that ``autoretry_for`` decides."""
    is_over = outcome.kind == "over"
    run = _run_of(outcome.request)
    if run is None or not run.claim.is_held or run.claim.is_of_parent():
        return
    if is_over:
        run.claim.end()
        run.record_failure(RuntimeError("Its result can't be stored, or what follows it be sent."))
    elif outcome.kind == "succeeded":
        run.succeed()
    else:
        run.fail(outcome.error)


def _check_storable(task: Any, request: Context, result: Any) -> None:
    """
    Check that the result backend can take a result, as long as the row can fail because it can't.

    Raises:
        EncodeError: It can't: Celery would say so after the end of the row.
    """
    ignores = vars(request).get("ignore_result")
    if result is None or (task.ignore_result if ignores is None else ignores):
        return
    backend = task.backend
    if not isinstance(backend, DisabledBackend):
        backend.encode(backend.prepare_value(result))


def _is_for_autoretry(task: Any, error: BaseException) -> bool:
    """Return whether Celery's ``autoretry_for``, which wraps the run, may retry this error."""
    is_error = isinstance(error, Exception) and not isinstance(error, (TaskPredicate, TaskPoisoned))
    return is_error and hasattr(task, "_orig_run")
