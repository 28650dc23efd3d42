"""``manage.py celery_stages``: show runs of stages, resume or abort them."""

from __future__ import annotations

from typing import Any, Final

from django.core.management.base import CommandError, CommandParser
from django.db.models import Q

from ...exceptions import IllegalTransition
from ...models.stages import StageRun, StageStep
from ...stages import Status
from ...stages.engine import step_table
from ...texts import duration, printable
from ..console import ActionCommand, add_json

#: The lines of a failed step's traceback that are shown.
LAST_LINES: Final = 6


class Command(ActionCommand):
    """Parses, calls, prints."""

    help = "Show runs of stages; resume or abort some of them."
    noun = "run"

    def add_arguments(self, parser: CommandParser) -> None:
        actions = self.add_actions(parser)
        listing = self.add_action(actions, "list", "show the runs, the newest first")
        listing.add_argument("--state", choices=Status.values, help="only those in this state")
        add_json(listing)
        showing = self.add_action(actions, "show", "show a run, and the steps to be looked at")
        showing.add_argument("id", type=int, metavar="ID")
        add_json(showing)
        for action, text in (
            ("resume", "run the steps again that failed, and those that have not begun"),
            ("abort", "cancel the steps that have not begun; running steps are not stopped"),
        ):
            changing = self.add_action(actions, action, text)
            changing.add_argument("ids", nargs="+", type=int, metavar="ID")

    def _list(self, options: dict[str, Any]) -> None:
        runs = step_table().runs.listed().order_by("-pk")
        if options["state"]:
            runs = runs.filter(status=options["state"])
        headings = ("ID", "STATUS", "STAGE", "STEPS", "AGE", "RUN")
        self.write_list(options, runs.iterator(), headings, describe_run)

    def _show(self, options: dict[str, Any]) -> None:
        run = get_run(options["id"])
        stages = [stage.as_json() for stage in run.progress_by_stage()]
        waits = Q(status=Status.WAITING, stage=run.stage)
        steps = run.steps.filter(Q(status__in=[Status.RUNNING, Status.FAILED]) | waits)
        steps = steps.listed().by_urgency()
        if options["as_json"]:
            shown = [step.as_json() for step in steps]
            self.write_json({**run.as_json(), "by_stage": stages, "steps": shown})
            return
        self.write_details(run.as_json())
        self.stdout.write()
        self.write_table([*map(str.upper, stages[0])], [[*stage.values()] for stage in stages])
        self.stdout.write()
        self.write_list(options, steps, ("STATUS", "FOR", "TASK"), describe_step)

    def _change(self, options: dict[str, Any]) -> None:
        """Resume or abort each of the named runs, even if another one can't be changed."""
        faults = []
        for pk in dict.fromkeys(options["ids"]):
            try:
                run = getattr(get_run(pk), options["action"])()
            except (CommandError, IllegalTransition) as error:
                faults.append(printable(str(error)))
            else:
                done, total, stage, of_stages = run.progress
                text = f"stage {stage} of {of_stages}, {done} of {total} steps done"
                self.stdout.write(f"{printable(run.title)} is {run.status} now: {text}.")
        if faults:
            raise CommandError(" ".join(faults))

    _resume = _abort = _change


def get_run(pk: int) -> StageRun:
    """
    Return a run.

    Raises:
        CommandError: The run does not exist.
    """
    run = step_table().runs.listed().filter(pk=pk).first()
    if run is None:
        raise CommandError(f"There is no run {pk}. `manage.py celery_stages list` shows the IDs.")
    return run


def describe_run(run: Any) -> list[object]:
    """Return the columns of a run, and the lines below them."""
    stage, steps = f"{run.stage}/{run.stages}", f"{run.done}/{run.total}"
    label = run.name or run.key or "-"
    return [run.pk, run.status, stage, steps, duration(run.age_s), label, run.reason]


def describe_step(step: StageStep) -> list[object]:
    """Return the columns of a step, and the lines below them."""
    trace = step.traceback.splitlines()[:-1] if step.status == Status.FAILED else []
    spent = duration(step.duration_s if step.waits_s is None else step.waits_s)
    place = ", ".join(filter(None, [step.task_id, step.process]))
    below = [place, step.shown_arguments, step.reason, *trace[-LAST_LINES:]]
    return [step.status, spent, step.task, *below]
