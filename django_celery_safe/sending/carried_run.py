"""
Running a carried task, whose message stays in the outbox until the task is done.

With ``outbox="until_done"`` a run claims the row of its message under a renewed lease, and ends
the row when the run ends, by one statement, or one transaction, that checks the token of the claim.
If the process dies on any line, the lease expires and a relay re-sends the message. A message whose
row has ended, or is claimed by another run, does nothing.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

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
from django.db import DEFAULT_DB_ALIAS, connections, transaction
from django.db import Error as DatabaseError

from .. import conf, queries
from ..delivery import copies
from ..delivery.call import Function
from ..delivery.header import Header, Kept, get_header
from ..events import MESSAGE_DONE, MESSAGE_FAILED, TASK_NOT_RUN, TASK_POISONED
from ..exceptions import ClaimLost, ConfigurationError, TaskPoisoned, find_soft_time_limit
from ..leases.claim import Claim
from ..leases.holder import HeldLock, decode_holder
from ..leases.lease import clock
from ..resuming.checkpoints import HandedOver
from ..texts import describe_error, get_logger
from ..values import decode
from .capture import Message, capture
from .commit import OutboxSender
from .followed import (
    NOTHING,
    Fault,
    end_with_body,
    fail_message,
    find_follower,
    is_carried,
    send_followers,
)
from .outbox import MessageTable, carry, message_table

if TYPE_CHECKING:
    from ..stages.engine import StepFollower

T = TypeVar("T")

logger = get_logger(__name__)

#: Delay of a message that is re-sent because the database with its row did not answer, s.
DATABASE_AWAY: Final = 5.0
#: Exit codes of billiard's children after a signal. A task may call ``sys.exit(-1)`` itself.
SIGNALLED: Final = range(-255, -191)


class Claimed(NamedTuple):
    """
    The columns of a claimed row that its run needs.

    Attributes:
        deaths: How many processes died in the task.
        last_death: The process that died last, as JSON like ``holder``.
        result: The result that the task was finished with, as JSON; "": it was not finished.
        starts: How many times the task was started, this run included.
    """

    deaths: int
    last_death: str
    result: str
    starts: int


class NoAnswer(copies.WillBeRedelivered):
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

    def take(self, holder: str) -> Any:
        """
        Claim the row, if no other run has it and its task has not ended.

        Returns:
            The claimed columns; otherwise the row, None: it was deleted.
        """
        self.asked_at = clock.now()
        values = {"attempt": self.name, "token": self.token, "lease": self.seconds}
        rows = queries.fetch(self.table.alias, "claim_message", holder=holder, **values)
        return Claimed(*rows[0]) if rows else self.table.find(self.name)

    def end_row(self, returned: str = "") -> bool:
        """
        Record that the task succeeded, or delete its row if none is kept.

        Args:
            returned: The return value of the task, as JSON; "": the row keeps its result.

        Returns:
            Whether the claim still held the row.
        """
        ends = "end_message" if conf.keeps_sent() else "erase_message"
        values = {"attempt": self.name, "token": self.token, "result": returned or None}
        return bool(queries.execute(self.table.alias, ends, **values))

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
    what, instead = f"The task {task.name}", "Put atomic() inside the function."
    try:
        found = claim.take(claim.prepare(task, request, what, instead))
    except DatabaseError as error:
        claim.table.check_migrated(error)
        claim.table.close()  # its server may not accept writes any more
        copies.resend_later(task, request, DATABASE_AWAY, f"No answer: {describe_error(error)}")
    # Its own token: it was claimed, but the answer got lost.
    if isinstance(found, Claimed) or (found is not None and found.token == claim.token):
        return Run(task, request.id or "", claim, found)
    reason = "its row is gone, so it is done, was discarded, or was rolled back"
    if found is not None:
        is_running = found.state == "running"
        reason = "another process runs it" if is_running else f"it is {found.state}"
    return copies.refuse_run(task, request, reason)


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
    run = (kept := request.safe_kept).run
    if request.is_eager or (run is not None and run.is_called):
        return part()
    if run is None:
        run = kept.run = claim_message(task, request, kept.header)
    run.is_called = is_called
    try:
        result = _call(run, request, kept.header, part)
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
    task, follow = run.task, None
    followers: list[Any] = [*(request.callbacks or ()), *(request.chain or ())[-1:]]
    if (followers or request.chord) and run.resent is None and run.follower is None:
        alias = run.claim.table.alias
        if request.chord or not all(is_carried(task.app, one, alias) for one in followers):
            if request.chord and is_carried(task.app, request.chord, alias):
                end_with_body(run, request)
            return  # Celery sends them, and then reports the success
        follow = partial(send_followers, task, request, result)
    try:
        _check_storable(task, request, result)
        run.succeed(follow)
    except (DatabaseError, ClaimLost) as error:
        raise copies.WillBeRedelivered(f"Its end is unrecorded: {describe_error(error)}") from error
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
        raise copies.WillBeRedelivered(f"Its end is unrecorded: {describe_error(error)}") from error


def _call(run: Run, request: Context, header: Header, function: Callable[[], Any]) -> Any:
    """Run the task, or return the result that it was finished with before its process died."""
    found = run.found
    if run.claim.lease is None:
        run.begin(header)
    if run.unrun or found.result:
        if run.is_called:
            reason = run.unrun or "its work was finished before, and its result is returned"
            TASK_NOT_RUN.emit(run_carried, task=run.task.name, task_id=request.id, reason=reason)
        return None if run.unrun else decode(found.result)
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
        follower = find_follower(header) if "step" in header else None
        self.follower = self.claim.follower = follower
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
            self.emit_done()

    def emit_done(self) -> None:
        """Emit that the task is done."""
        MESSAGE_DONE.emit(Run, task=self.task.name, task_id=self._task_id)

    def end(self, follow: Callable[[], object] | None = None) -> bool:
        """End the row of a task that is done, with what follows; return whether it was ours."""
        table, follower = self.claim.table, self.follower
        end_row = partial(self.claim.end_row, self.returned)

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
        return self._write_end(write, lambda: table.has_ended(self.claim.name))

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
        goes_on = isinstance(error, copies.MessageGoesOn) and not isinstance(error, HandedOver)
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
        again = isinstance(error, Retry | copies.WillBeRedelivered) or copies.is_requeued(error)
        if again or (follows and isinstance(error, copies.MessageGoesOn)):
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
                    ours = sender.rewrite(own[0], *self.held, other_work=replaced)
                else:
                    ours = self.claim.end_row()
                if ours and others:
                    sender.keep(others, goes_on=True)
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
