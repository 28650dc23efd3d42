"""
The follower of a step's message: what a run of the message means for the step and its run.

A step is recorded first, then its stage is looked at, and its message ends last: in the
transaction that begins the next stage, if the stage is complete. So whoever dies in between
leaves a message that comes back, finds its step succeeded, and goes on without calling anything.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from .. import queries
from ..exceptions import InvalidResult
from ..sending.followed import NOTHING, Fault, Held
from ..values import NotPlain, decode
from . import engine
from .entries import encode_named, read_entry
from .status import Status
from .step_table import FOUND, Found, table_in

if TYPE_CHECKING:
    from ..models.stage_states import StageSteps
    from ..models.stages import StageStep

#: The error type of a step that failed without an exception, so that lists can filter by it.
RETURNED_FALSE: Final = "ReturnedFalse"
#: Advice on the value that a step returns.
STEP_RESULT: Final = (
    "Return a dict of plain data for the next stages, None, True, False, or (success, dict)."
)
NOT_CALLED: Final = Fault(
    InvalidResult.__name__,
    "Its function was not called: what is above @stages.step returned something instead.",
)
#: Why a step whose message comes back after the end of its run is aborted.
DIED: Final = Fault("", "Its process died before the run ended.")


class Outcome(NamedTuple):
    """
    The outcome of a step's function.

    Attributes:
        result: The value that the function returned.
        success: Whether the step succeeded.
        params: The part of the result for the next stages, not yet checked.
        error: The text to record if the step did not succeed.
    """

    result: Any
    success: bool
    params: Any
    error: str


class StepFollower:
    """
    The step of one message, or of one eager call.

    Args:
        pk: The step.
        alias: The database with its row and that of its message.
    """

    def __init__(self, pk: int, alias: str) -> None:
        self.pk, self.table = pk, table_in(alias)
        #: The step as it was begun; None: it was not, or there is none.
        self.found: Found | None = None
        #: The run's params, for the step's function.
        self.params: dict[str, Any] = {}
        #: Whether the success is recorded, so that nothing later changes it.
        self.is_recorded = False
        #: Why a run that has returned is no success; None: it is one.
        self.fault: Fault | None = NOT_CALLED
        #: Where the step's function was called: the messages of the next stage bring along what
        #: was set there, such as the acting user of a project's task class.
        self.context = copy_context()
        #: What it returned for the next stages, as JSON; "": nothing.
        self._params = self._task_id = ""

    def begin(self, task_id: str) -> str:
        """Set the step to running; return why its function must not be called, or ""."""
        self._task_id = task_id
        rows: Any = queries.fetch(self.table.alias, "begin_step", pk=self.pk, task_id=task_id)
        rows = rows or self._row().values_list(*FOUND)
        if not rows:
            return self._go_without("its step is gone, or has another message")
        self.found = found = Found(*rows[0])
        if found.status != Status.RUNNING:
            return self._go_without(f"its step is {found.status}")
        if found.run_status in Status.STOPPED:
            engine.put_back(self.table, self._row(), found.run, DIED)
            return self._go_without(f"its run is {found.run_status}")
        self.params = decode(found.params)
        if found.run_status == Status.WAITING:
            queries.execute(self.table.alias, "begin_run", pk=found.run)
        return ""

    def _go_without(self, why: str) -> str:
        self.is_recorded, self.fault = True, None
        return why

    @property
    def options(self) -> dict[str, Any]:
        """The options of the plan's entry."""
        return read_entry("" if self.found is None else self.found.arguments).options

    def read(self) -> StageStep:
        """Return the row of the step, with its run; one query."""
        return self._row().select_related("run").get()

    def take(self, outcome: Outcome, task: str) -> None:
        """
        Take what the step's function returned.

        Raises:
            InvalidResult: It can't be kept for the next stages.
        """
        self._params = self.encode(outcome.params, task)
        self.fault = None if outcome.success else Fault(RETURNED_FALSE, outcome.error)

    def encode(self, result: Any, work: str) -> str:
        """
        Return the text that is stored for a step's params.

        Raises:
            InvalidResult: They are no dict of plain data, or too long.
        """
        try:
            return "" if result is None else encode_named(result)
        except NotPlain as error:
            raise InvalidResult(work, str(error), STEP_RESULT) from error

    def finish(self, text: str) -> None:
        """Take the argument of ``finish()``, as the message has it."""
        self._params, self.fault = "" if text == NOTHING else text, None

    def end(self, held: Held | None, write: Callable[[], bool]) -> bool:
        """Record the success, and end the message together with what follows in the run."""
        if not self.is_recorded:
            # If the claim was lost, this changes nothing, and write() says so.
            engine.succeed(self.table, self.pk, self._task_id, self._params, held)
            self.is_recorded = True
        if self.found is None or self._is_stage_open(self.found):
            return write()
        return self.context.run(engine.leave, self.table, self.found.run, write)

    def end_eagerly(self) -> None:
        """Record the outcome of an eager run, which has no message."""
        if self.fault is None:
            self.end(None, lambda: True)
        else:
            self.fail(self._task_id, lambda: True, self.fault)

    def _is_stage_open(self, found: Found) -> bool:
        place = {"run": found.run, "stage": found.stage}
        return bool(queries.fetch(self.table.alias, "find_unfinished_step", **place))

    def wait(self, held: Held, fault: Fault) -> None:
        """Let the step wait for the message that is sent again, unless its run has stopped."""
        if self.found is not None:
            engine.put_back(self.table, self._row().held(*held), self.found.run, fault)

    def fail(self, task_id: str, write: Callable[[], bool], fault: Fault) -> bool:
        """Fail the step together with its message, and stop its run; see ``engine.fail``."""
        return engine.fail(self.table, self.table.at(self.pk, task_id), write, fault)

    def note(self, task_id: str, fault: Fault) -> None:
        """Show why a worker did not take the message of a step that waits."""
        self.table.at(self.pk, task_id).waiting().record(Status.WAITING, fault)

    def _row(self) -> StageSteps:
        return self.table.at(self.pk, self._task_id)
