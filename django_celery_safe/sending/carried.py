"""
Running a carried task, whose message stays in the outbox until the task is done.

With ``outbox="until_done"`` a run claims the row of its message under a renewed lease, and ends
the row when the run ends. If the process dies on any line, the lease expires and a relay re-sends
the message. A message whose row has ended, or is claimed by another run, does nothing.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary, ref

from celery._state import get_current_task
from celery.app.task import Context
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded, TaskPredicate
from django.db import DEFAULT_DB_ALIAS, connections
from django.db import Error as DatabaseError

from .. import conf
from ..delivery.call import Args, Function, Kwargs
from ..delivery.copies import MessageGoesOn, WillBeRedelivered, is_requeued, resend_later
from ..delivery.deaths import ends_process, refuse_after_deaths
from ..delivery.endings import Outcome
from ..delivery.header import Header, get_header
from ..events import MESSAGE_DONE, MESSAGE_FAILED, TASK_NOT_RUN, TASK_POISONED
from ..exceptions import ClaimLost, ConfigurationError, TaskPoisoned
from ..foreign_errors import describe_error, find_soft_time_limit
from ..leases.claim import Claim, working_claims
from ..leases.clock import clock
from ..resuming.handing_over import HandedOver
from ..texts import get_logger
from ..transactions import TRIES
from ..values import decode
from .capture import Captured, capture
from .followed import NOTHING, Fault, Follower, Held, fail_message, find_follower
from .followers import carried_followers, send_followers
from .going_on import ending, publish_again
from .message_table import Claimed, MessageTable, message_table
from .outbox import can_carry, name_attempt

T = TypeVar("T")

logger = get_logger(__name__)

#: Why a run that has returned is not done.
RESENT: Final = Fault(Retry.__name__, "The task has re-sent itself.")
#: Delay of a message that is re-sent because the database with its row did not answer, s.
DATABASE_AWAY: Final = 5.0


class MessageClaim(Claim):
    """
    The claim of a carried message.

    ``finish()`` writes the result into the row, which stays until the run has ended: if the
    process dies in between, the next run returns that result and does nothing else.
    """

    table: MessageTable
    is_carried = True
    #: Returns the run of this claim; not the run itself, which has the claim.
    find_run: Callable[[], Run | None]

    def __init__(self, alias: str, attempt: str, task: Any, request: Context) -> None:
        key = f"{task.name}[{request.id}]"
        super().__init__(message_table(alias), attempt, key, conf.lock_timeout())
        #: What ``finish()`` has recorded.
        self.text = ""

    def _encode(self, result: Any) -> str:
        run = self.find_run()
        follower = None if run is None else run.follower
        return super()._encode(result) if follower is None else follower.encode(result, self.key)

    def _write_done(self, text: str) -> bool:
        self.text = text or NOTHING
        ours: bool = self.table.at(self.name).finish(self.token, self.text)
        return ours


class NoAnswer(WillBeRedelivered):
    """The database did not say what follows the message, so the task was not called."""


class Run:
    """
    The run of a carried task in this process.

    Attributes:
        resent: The messages with which the task continues, such as a retry; None: it does not.
        has_followers: Whether Celery sends messages that wait for the run: the next link of a
            chain, callbacks, or the body of a chord.
        found: The row as the claim found it.
        is_called: Whether the task is being called; before, ``before_start()`` of its class runs.
        has_begun: Whether the task itself has begun, as far as is known here.
        returned: The task's return value as JSON, for a row that is kept; "": the value is not
            recorded.
        follower: What of this package follows the message; None: nothing.
        unrun: Why the follower does not let the task be called; "": it does.
    """

    def __init__(
        self,
        claim: MessageClaim,
        task: Any,
        request: Context,
        found: Claimed,
    ) -> None:
        # Not the request: as the weak key of this run, it would never be freed.
        self.claim, self.task, self._task_id = claim, task, request.id or ""
        claim.find_run = ref(self)
        self.found, self.returned, self.unrun = found, "", ""
        self.follower: Follower | None = None
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
        follower = self.follower = find_follower(header)
        if follower is None:
            return
        try:
            self.unrun = follower.begin(self._task_id)
        except DatabaseError as error:
            raise NoAnswer(f"No answer: {describe_error(error)}") from error
        if self.found.result:
            follower.finish(self.found.result)

    @property
    def held(self) -> Held:
        """What names the claim of this run in a statement."""
        return self.claim.name, self.claim.token

    def keep(self, send: Callable[[], T], *, unchanged: bool = False) -> T:
        """
        Call ``send``, and keep the messages that it sends until the run has ended.

        Args:
            unchanged: Whether the run's own message is sent again, because it did not begin.
        """
        self.has_begun = self.has_begun and not unchanged
        captured = Captured()
        try:
            result = capture(self.task.app, captured, lambda _: send())
        except Ignore:
            self._is_replaced = True
            self._add(captured)
            raise
        self._add(captured)
        return result

    def _add(self, captured: Captured) -> None:
        if self.resent is None:
            self.resent = captured
        else:  # a retry without throw came before
            self.resent.messages += captured.messages
            self.resent.chord_calls += captured.chord_calls

    def succeed(self, follow: Callable[[], object] | None = None) -> None:
        """
        Record that the task is done, or that it continues with another message.

        Args:
            follow: Sends what follows, in the transaction that ends the row.

        Raises:
            ClaimLost: Another run has claimed the message by now.
        """
        goes_on = self.resent
        try:
            self._uncount_unbegun()
            ours = self._end_well(follow) if goes_on is None else self._go_on(goes_on, RESENT)
        except SoftTimeLimitExceeded:
            if not self._is_ended():
                raise
            ours = True  # it came after the statement that ended the row
        finally:
            self.claim.end()
        if not ours:
            self.claim.raise_lost()
        if goes_on is None and self.follower is None:
            MESSAGE_DONE.emit(run_carried, task=self.task.name, task_id=self._task_id)

    def _end_well(self, follow: Callable[[], object] | None) -> bool:
        fault = None if self.follower is None else self.follower.fault
        if fault is None or self.claim.is_finished:
            return self.end(follow) or bool(self.unrun)
        return self._record_fault(fault)

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
                run_carried, task=self.task.name, task_id=self._task_id, error=describe_error(error)
            )
        return ours

    def _record_fault(self, fault: Fault) -> bool:
        """Fail the row and what follows it; return whether the claim still held the row."""
        row, token = self.claim.table.at(self.claim.name), self.claim.token
        return self.claim.end_by(
            lambda: fail_message(self.follower, self._task_id, row, token, fault),
            lambda: self.claim.table.has_ended(self.claim.name),
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
        later = 0.0 if is_handed_over else conf.resend_after()
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
        name, replaced = self.claim.name, self._is_replaced
        self.claim.stop_renewing()
        return self.claim.end_by(
            lambda: publish_again(alias, name, token, self._task_id, captured, other_work=replaced),
            lambda: self.claim.table.has_ended(name),  # no row is for this attempt any more
        )


#: The run of each carried task in this process, for as long as Celery keeps its request.
_runs: Final[WeakKeyDictionary[Context, Run]] = WeakKeyDictionary()


def find_run(task_id: str | None) -> Run | None:
    """Return the run of the carried task with this id, if this code is inside that run."""
    task = get_current_task()
    run = None if task is None else _runs.get(task.request)
    return run if run is not None and run.claim.is_held and task.request.id == task_id else None


def is_by_row(request: Context) -> bool:
    """Return whether only the row of a carried task runs it again: no run holds the row now."""
    run = _runs.get(request)
    return "attempt" in get_header(request) if run is None else not run.claim.is_held


def run_carried(
    task: Any,
    request: Context,
    function: Function,
    args: Args,
    kwargs: Kwargs,
    *,
    is_hook: bool = False,
) -> Any:
    """
    Run a carried task, unless its message has ended or another process runs it.

    Args:
        is_hook: Whether ``function`` is what the task's class does before the task is called.

    Raises:
        MessageGoesOn: The task must not run for this message.
        TaskPoisoned: So many processes died in the task that it is not run again.
        ClaimLost: When the work was done, another run had claimed the message.
    """
    run, header = _runs.get(request), get_header(request)
    if run is None and (run := _find_outer(header)) is not None:
        _runs[request] = run
    if request.is_eager or (run is not None and run.is_called):
        return function(*args, **kwargs)
    if run is None:
        begun = _begin(task, request, header)
        if isinstance(begun, str):
            _emit_not_run(task, request, begun)
            raise MessageGoesOn(f"Not run: {begun}")
        run = _runs[request] = Run(begun[0], task, request, begun[1])
    run.is_called = not is_hook
    try:
        result = _call(run, request, partial(function, *args, **kwargs))
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
            _runs.pop(request, None)
            request.safe_ended = "attempt"  # type: ignore[attr-defined]
    return result


def _find_outer(header: Header) -> Run | None:
    """Return the run inside which the task is called again: Celery then copies its request."""
    attempt = header.get("attempt")
    claims = (one for one in working_claims() if isinstance(one, MessageClaim))
    return next((one.find_run() for one in claims if one.name == attempt), None)


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
            return  # Celery sends them, and then reports the success
        follow = partial(send_followers, task, request, result)
    try:
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


def _call(run: Run, request: Context, function: Callable[[], Any]) -> Any:
    """Run the task, or return the result that it was finished with before its process died."""
    found = run.found
    if run.claim.lease is None:
        run.begin(get_header(request))
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
        refuse_after_deaths(run.task, request.id, found.deaths, found.last_death)
    with run.claim.current():
        run.has_begun = run.is_called
        return function()


def end_run(outcome: Outcome) -> None:
    """End a run whose outcome only Celery knows, such as one that ``autoretry_for`` decides."""
    is_over = outcome.kind == "over"
    run = _runs.pop(outcome.request, None) if is_over else _runs.get(outcome.request)
    if run is None or not run.claim.is_held or run.claim.is_of_parent():
        return
    if is_over:
        run.claim.end()
        run.record_failure(RuntimeError("Its result can't be stored, or what follows it be sent."))
    elif outcome.kind == "succeeded":
        run.succeed()
    else:
        run.fail(outcome.error)


def _is_for_autoretry(task: Any, error: BaseException) -> bool:
    """Return whether Celery's ``autoretry_for``, which wraps the run, may retry this error."""
    is_error = isinstance(error, Exception) and not isinstance(error, (TaskPredicate, TaskPoisoned))
    return is_error and hasattr(task, "_orig_run")


def _begin(task: Any, request: Context, header: Header) -> tuple[MessageClaim, Claimed] | str:
    """Claim the message; return the claim and its row, or why the message must not run."""
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
        for _ in range(TRIES):
            claim.asked_at = clock.now()
            claimed = table.claim(claim.name, claim.token, claim.seconds, holder)
            if claimed is not None:
                return claimed
            found = table.find(claim.name)
            if found is None or found.state not in ("pending", "sent"):
                break
            # A stricter isolation level refused the claim, because the sender changed the row.
        return found

    try:
        holder = claim.prepare(
            task, request, f"The task {task.name}", "Put atomic() inside the function."
        )
        found = claim.ask(ask)
    except DatabaseError as error:
        table.check_migrated(error)
        resend_later(task, request, DATABASE_AWAY, f"No answer: {describe_error(error)}")
    if isinstance(found, Claimed):
        return claim, found
    if found is None:
        return "its row is gone, so it is done, was discarded, or was rolled back"
    if found.token == claim.token:  # it was claimed, but the answer got lost
        return claim, Claimed(*(getattr(found, name) for name in Claimed._fields))
    return "another process runs it" if found.state == "running" else f"it is {found.state}"
