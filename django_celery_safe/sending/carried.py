"""
The run of a task that is carried until done: ``outbox="until_done"``.

The row of its message is claimed under a renewed lease when the run begins, and ends with it.
Whoever dies on any line leaves a row whose lease expires: then a relay sends the message again.
A message whose row has ended, or is held by another run, does nothing.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from celery import signals
from celery._state import get_current_task
from celery.app.task import Context
from celery.exceptions import Ignore, Reject, Retry, TaskPredicate
from django.db import DEFAULT_DB_ALIAS
from django.db import Error as DatabaseError
from django.db.models import DurationField, F, Q
from django.db.models.functions import Now

from .. import conf
from ..delivery.copies import MessageGoesOn, WillBeRedelivered, is_requeued, resend_later
from ..delivery.header import declare_field, get_header, is_text
from ..delivery.wrappers import add_wrapper
from ..events import MESSAGE_FAILED, MESSAGE_LOST, MESSAGE_NOT_RUN, TASK_POISONED
from ..exceptions import MessageLost, TaskPoisoned, describe_error, find_soft_time_limit, text_of
from ..leases.holder import HeldLock, decode_holder
from ..leases.lease_table import LeaseTable
from ..leases.row_claim import RowClaim
from ..statements import Param, Statement
from ..texts import get_logger
from ..transactions import losing_a_race
from .capture import Captured, capture
from .going_on import publish_again
from .outbox import can_carry, keeps_sent, name_attempt

logger = get_logger(__name__)

#: How often a claim looks again after it lost a race; each time somebody else moved on.
TRIES: Final = 20
#: When a message comes back whose row could not be asked about, s.
DATABASE_AWAY: Final = 5.0


class Deaths(NamedTuple):
    """
    The processes that died in a task.

    Attributes:
        number: How many they were.
        last: The last one, as its holder is kept in a row.
    """

    number: int
    last: str


class MessageTable(LeaseTable):
    """The outbox of one database, as runs and the thread that renews their leases see it."""

    purpose = "hold an outbox"
    models = ("OutboxMessage",)

    def __init__(self, alias: str) -> None:
        super().__init__("messages", alias)

    def at(self, name: str) -> Any:
        """Return the message of this attempt, one or none."""
        return _rows(self.alias).filter(attempt=name)

    def find(self, name: str) -> Any:
        """Return a message, with the server's time as ``asked_at``; None: it is gone."""
        return _FIND.find(self.alias, attempt=name)

    def claim(self, name: str, token: str, seconds: float, holder: str) -> Deaths | None:
        """
        Let a message run its task, if nobody does and it has not ended.

        Returns:
            How many processes have died in it; None: it may not run.
        """
        values = {"attempt": name, "token": token, "holder": holder}
        row = _CLAIM.update_returning(self.alias, lease=timedelta(seconds=seconds), **values)
        return None if row is None else Deaths(*row)

    def delete(self, name: str, token: str) -> bool:
        """End a message that nobody keeps; return whether the claim still held it."""
        return _DELETE.execute(self.alias, attempt=name, token=token)


class Run:
    """
    The run of a carried task in this process.

    Attributes:
        resent: The messages by which the task is to go on, such as that of a retry; None: none.
        has_followers: Whether other messages wait for its end, which Celery sends after it.
    """

    def __init__(self, claim: RowClaim[MessageTable], task: Any, request: Context) -> None:
        # Not the request, which is the key of this run and would be kept by it.
        self.claim, self._task, self._task_id = claim, task, request.id or ""
        self.resent: Captured | None = None
        self.has_followers = bool(request.chain or request.callbacks or request.chord)

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep what is sent in the block, to be published when the run has ended."""
        with capture(self._task.app) as captured:
            try:
                yield
            except Ignore:  # the task was replaced
                self.resent = captured
                raise
        self.resent = captured

    def succeed(self) -> None:
        """
        Record that the task is done, or that it goes on by another message.

        Raises:
            MessageLost: Another run has it by now.
        """
        try:
            if self.resent is not None:
                ours = self._go_on(self.resent)
            else:
                ours = self.claim.ask(self._ending(), self._what)
        finally:
            self.claim.end()
        if not ours:
            raise MessageLost(self._what, self.claim.find_new_holder())

    def fail(self, error: BaseException) -> None:
        """Record what becomes of a task whose run ended in an error, and end its claim."""
        if self.claim.is_of_parent():
            return  # after a bare os.fork() the child leaves the run too
        self.claim.end()
        try:
            ours = self._record(error)
        except DatabaseError as failure:
            logger.warning(
                "How %s ended (%s) can't be recorded; a relay sends it again when its lease is "
                "over: %s",
                self._what,
                describe_error(error),
                describe_error(failure),
            )
        else:
            if not ours:
                self.claim.find_new_holder()

    def record_failure(self, error: BaseException) -> bool:
        """Keep the error with the row; return whether the claim still held it."""
        error = find_soft_time_limit(error) or error
        text = text_of(error)
        trace = "".join(traceback.format_exception(error))
        row, token = self.claim.table.at(self.claim.name), self.claim.token
        name = type(error).__name__
        tries = 0

        def fail() -> bool:
            nonlocal tries
            tries += 1
            # The answer to the one before may have got lost.
            return row.fail_task(token, name, text, trace) or (
                tries > 1 and row.failed().filter(error_type=name).exists()
            )

        ours = self.claim.ask(fail, self._what)
        if ours:
            event = TASK_POISONED if isinstance(error, TaskPoisoned) else MESSAGE_FAILED
            event.emit(
                run_carried,
                task=self._task.name,
                task_id=self._task_id,
                error=describe_error(error),
            )
        return bool(ours)

    def put_back(self, delay: float, reason: str, *, died: bool = False) -> bool:
        """Let a relay send the message again after ``delay``; return whether it was still ours."""
        row, token = self.claim.table.at(self.claim.name), self.claim.token
        wait = timedelta(seconds=delay)
        return bool(
            self.claim.ask(lambda: row.put_back(token, wait, reason, died=died), self._what)
        )

    @property
    def _what(self) -> str:
        return f"{self._task.name}[{self._task_id}]"

    def _ending(self) -> Callable[[], bool]:
        row, token, keep = self.claim.table.at(self.claim.name), self.claim.token, keeps_sent()
        tries = 0

        def end() -> bool:
            nonlocal tries
            tries += 1
            ours = row.end(token) if keep else self.claim.table.delete(self.claim.name, token)
            # The answer to the one before may have got lost.
            return ours or (tries > 1 and not row.filter(ended_at__isnull=True).exists())

        return end

    def _record(self, error: BaseException) -> bool:
        if self.resent is not None:
            return self._go_on(self.resent)
        match error:
            case Reject() if not is_requeued(error):
                return self.record_failure(error)
            case Reject() | Retry() | WillBeRedelivered():
                # The broker has the message, or will; if not, a relay sends it again.
                return self.put_back(conf.resend_after().total_seconds(), describe_error(error))
            case Ignore():
                return self.claim.ask(self._ending(), self._what)
            case Exception():
                return self.record_failure(error)
        # The process ends: it was told to, or the task did that by itself.
        return self.put_back(0.0, describe_error(error), died=not _is_told_to_end(error))

    def _go_on(self, captured: Captured) -> bool:
        """Write the messages by which the task goes on into its row, or rows, and publish them."""
        alias, token = self.claim.table.alias, self.claim.token
        for message in captured.messages:
            if can_carry(message):
                name_attempt(message, alias)
        row = self.claim.table.at(self.claim.name)
        return self.claim.ask(
            lambda: publish_again(alias, row, token, self._task_id, captured), self._what
        )


#: The run of each message of a carried task, for as long as Celery keeps its request.
_runs: Final[WeakKeyDictionary[Context, Run]] = WeakKeyDictionary()


def find_run(task_id: str | None) -> Run | None:
    """Return the run of the carried task with this id, if this code is inside it."""
    task = get_current_task()
    run = None if task is None else _runs.get(task.request)
    return run if run is not None and run.claim.is_held and task.request.id == task_id else None


def has_ended(request: Context) -> bool:
    """Return whether the row of a carried task says by now what becomes of it."""
    run = _runs.get(request)
    return run is not None and not run.claim.is_held


def run_carried(
    task: Any,
    request: Context,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """
    Run a task for its message, unless that has ended or another process runs it.

    Raises:
        MessageGoesOn: It is not to run.
        TaskPoisoned: So many processes died in it that it is not run again.
        MessageLost: Another run had it when its work was done.
    """
    if request.is_eager or request in _runs:
        return function(*args, **kwargs)
    begun = _begin(task, request)
    if isinstance(begun, str):
        MESSAGE_NOT_RUN.emit(run_carried, task=task.name, task_id=request.id, reason=begun)
        raise MessageGoesOn(f"Not run: {begun}")
    claim, deaths = begun
    run = _runs[request] = Run(claim, task, request)
    try:
        claim.begin(task, request)
        limit = _most_deaths(task)
        if limit is not None and deaths.number >= limit:
            last = decode_holder(deaths.last, HeldLock("")).holder._replace(task_id=None)
            raise TaskPoisoned(f"{task.name}[{request.id}]", deaths.number, str(last))
        result = function(*args, **kwargs)
    except BaseException as error:
        if not _is_for_autoretry(task, error):
            run.fail(error)
        raise
    # After a bare os.fork() the child leaves the function too, and must not end the claim.
    if not claim.is_of_parent() and (not run.has_followers or run.resent is not None):
        run.succeed()
    return result


def connect() -> None:
    """Listen to the ends of runs that show outside of them: followers are sent, or it retries."""
    signals.task_success.connect(_on_success, dispatch_uid=__name__)
    signals.task_failure.connect(_on_failure, dispatch_uid=__name__)
    signals.task_retry.connect(_on_retry, dispatch_uid=__name__)
    signals.task_postrun.connect(_on_postrun, dispatch_uid=__name__)


def _on_success(sender: Any, **kwargs: Any) -> None:
    if (run := _find_open(sender)) is not None:
        run.succeed()


def _on_failure(sender: Any, exception: BaseException, **kwargs: Any) -> None:
    if (run := _find_open(sender)) is not None:
        run.fail(exception)


def _on_retry(sender: Any, reason: BaseException | None = None, **kwargs: Any) -> None:
    # The main process of a worker that cancels a run gives no reason.
    if reason is not None and (run := _find_open(sender)) is not None:
        run.fail(reason)


def _on_postrun(task: Any, **kwargs: Any) -> None:
    if (run := _find_open(task)) is not None:
        run.claim.end()
        run.record_failure(RuntimeError("Its result can't be stored, or what follows it be sent."))
    _runs.pop(task.request, None)


def _find_open(task: Any) -> Run | None:
    """Return the run of a task that ends now, if nothing was recorded about its end."""
    run = _runs.get(task.request)
    return None if run is None or not run.claim.is_held or run.claim.is_of_parent() else run


def _is_told_to_end(error: BaseException) -> bool:
    """Return whether a process ends because somebody told it to, and not by its task."""
    # A pool that ends its children by a signal lets them exit with a negative code.
    return not isinstance(error, SystemExit) or (isinstance(error.code, int) and error.code < 0)


def _is_for_autoretry(task: Any, error: BaseException) -> bool:
    """Return whether Celery's ``autoretry_for``, which wraps the run, may retry after an error."""
    is_error = isinstance(error, Exception) and not isinstance(error, (TaskPredicate, TaskPoisoned))
    return is_error and hasattr(task, "_orig_run")


def _begin(task: Any, request: Context) -> tuple[RowClaim[MessageTable], Deaths] | str:
    """Claim the message; return the claim and its deaths, or why the message is not to run."""
    header = get_header(request)
    table = message_table(header.get("using", DEFAULT_DB_ALIAS))
    claim = RowClaim(table, header["attempt"], conf.lock_timeout(), _emit_lost)

    def ask() -> Any:
        for _ in range(TRIES):
            claim.asked_at = time.monotonic()
            with losing_a_race():
                deaths = table.claim(claim.name, claim.token, claim.seconds, holder)
                if deaths is not None:
                    return deaths
            found = table.find(claim.name)
            if found is None or found.token or found.due_at is None:
                break
            # Stricter isolation refused the claim, since its sender changed the row meanwhile.
        return found

    try:
        claim.prepare(f"The task {task.name}", "Put atomic() inside the function.")
        holder = claim.describe_holder(f"{task.name}[{request.id}]", task, request)
        found = claim.ask(ask, "a message")
    except DatabaseError as error:
        table.check_migrated(error)
        resend_later(task, request, DATABASE_AWAY, f"No answer: {describe_error(error)}")
    if isinstance(found, Deaths):
        return claim, found
    if found is None:
        return "its row is gone, so it is done, or was discarded"
    if found.token == claim.token:  # the answer to the claim before got lost
        return claim, Deaths(found.deaths, found.last_death)
    return "another process runs it" if found.state == "running" else f"it is {found.state}"


def _emit_lost(attempt: str, holder: str) -> None:
    MESSAGE_LOST.emit(run_carried, attempt=attempt, holder=holder)


def _most_deaths(task: Any) -> int | None:
    given: int | conf.Unset | None = getattr(task, "max_deaths", conf.UNSET)
    if isinstance(given, conf.Unset):
        return conf.max_deaths(conf.get("MAX_DEATHS"), "MAX_DEATHS")
    return given


def _rows(alias: str) -> Any:
    from ..models.outbox import OutboxMessage  # needs the app registry

    return OutboxMessage.objects.using(alias)


def _message(alias: str) -> Any:
    return _rows(alias).filter(attempt=Param("attempt"))


_FIND: Final = Statement(
    lambda alias: (_message(alias).defer("body", "properties").annotate(asked_at=Now()), None)
)

_DELETE: Final = Statement(
    lambda alias: (_message(alias).filter(token=Param("token")), None), deletes=True
)


def _claim(alias: str) -> tuple[Any, dict[str, Any]]:
    from ..models.outbox import count_death  # needs the app registry

    free = Q(token="") | Q(due_at__lt=Now())
    sets = {
        "token": Param("token"),
        "due_at": Now() + Param("lease", DurationField()),
        "holder": Param("holder"),
        "started_at": Now(),
        "starts": F("starts") + 1,
        "resent": 0,
        # The process that had it before died, and let the lease expire.
        **count_death(),
    }
    return _message(alias).filter(free, due_at__isnull=False), sets


_CLAIM: Final = Statement(_claim, lambda quote: (f"{quote('deaths')}, {quote('last_death')}", []))


@lru_cache
def message_table(alias: str) -> MessageTable:
    """Return the outbox of a database, as runs see it."""
    # The renewing thread knows stores by their identity.
    return MessageTable(alias)


#: The attempt of its task that a message is for, and the database with its row.
declare_field("using", is_text)
add_wrapper("attempt", run_carried, outermost=True)
