"""``manage.py celery_stages``: show runs of stages, resume or abort them, and repair them."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any, Final

from django.core.management.base import CommandError, CommandParser
from django.db import transaction

from ...exceptions import IllegalTransition
from ...inspection.decision import Decision
from ...inspection.row import duration
from ...inspection.runs import (
    ABORT,
    RESUME,
    RunRow,
    StepRow,
    describe_progress,
    runs_in,
    stage_as_json,
    steps_to_look_at,
)
from ...models.outbox import OutboxMessage
from ...models.stages import StageRun, StageRuns, StageStep
from ...stages import StageProgress, Status
from ...stages.repairs import UNSTARTED_AFTER, get_prunable, sweep
from ...stages.step_table import StepTable, step_table
from ..console import TableCommand, add_json, age, as_text, count, typed, wrapped

#: Width of a full bar, in characters.
BAR: Final = 20


class Command(TableCommand):
    """Parses, calls, prints."""

    help = "Show, resume, abort or repair runs of stages, or delete old ones."
    models = (StageRun, StageStep, OutboxMessage)
    subject = "runs of stages"
    database_help = "the runs in this database (default: where the router writes them)"

    def add_arguments(self, parser: CommandParser) -> None:
        actions = self.add_actions(parser, "{list,show,resume,abort,sweep,prune}")
        listing = self.add_listing(actions, "show the runs, the newest first", Status.values)
        listing.add_argument(
            "--search", type=typed, metavar="TEXT", help="only those with this in their key or name"
        )
        listing.add_argument(
            "--task", type=typed, metavar="NAME", help="only those with a step of this task"
        )
        self.add_limit(listing)
        showing = self.add_action(
            actions, "show", "show a run, its stages, and the steps to be looked at"
        )
        add_json(showing)
        self.add_limit(showing)
        showing.add_argument("id", type=count, metavar="RUN", help="as the list shows it")
        resuming = self.add_action(
            actions, "resume", "re-run the steps that failed, and run those that have not begun"
        )
        self._add_choice(resuming)
        aborting = self.add_action(
            actions, "abort", "cancel the steps that have not begun; running steps are not stopped"
        )
        self._add_choice(aborting)
        sweeping = self.add_action(actions, "sweep", "repair what a crash has left")
        sweeping.add_argument(
            "--unstarted-after",
            type=age,
            metavar="AGE",
            default=UNSTARTED_AFTER,
            help="for how long a step may wait to be begun: 90s, 15m, 12h "
            f"({duration(UNSTARTED_AFTER.total_seconds())})",
        )
        pruning = self.add_action(actions, "prune", "delete runs that ended long ago")
        self.add_pruning(pruning, "how long ago, such as 90s, 12h or 7d (default: RETENTION)")

    def _add_choice(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "ids", nargs="+", type=count, metavar="RUN", help="as the list shows it"
        )
        parser.add_argument("--dry-run", action="store_true", help="only say what would be")

    def get_databases(self) -> Iterable[str]:
        return [step_table().alias]

    # list, show

    def _list(self, aliases: list[str], options: dict[str, Any]) -> None:
        state, text, task = options["state"], options["search"], options["task"]

        def read(alias: str, most: int | None) -> Iterable[RunRow]:
            runs = runs_in(alias)
            runs = runs.filter(status=state) if state else runs
            runs = runs.search(text) if text else runs
            return map(RunRow, (runs.having(task) if task else runs)[:most])

        is_narrowed = state or text or task
        self.list_rows(
            aliases, options, read, "No such run." if is_narrowed else "There is no run."
        )

    def _show(self, aliases: list[str], options: dict[str, Any]) -> None:
        run, limit = get_run(self.get_single(aliases), options["id"]), options["limit"]
        # Read one row more, to know whether there are more.
        rows = [StepRow(step) for step in steps_to_look_at(run)[: limit + 1 if limit else None]]
        steps, stages, row = rows[: limit or None], run.progress_by_stage(), RunRow(run)
        if options["as_json"]:
            known = {
                **row.as_json(),
                "by_stage": list(map(stage_as_json, stages)),
                "steps": [step.as_json() for step in steps],
            }
            self.stdout.write(json.dumps(known, indent=2))
            return
        lines = [as_text(row), "", *as_bars(stages)]
        if steps:
            lines += ["", *map(as_text, steps)]
        if len(rows) > len(steps):
            lines.append(f"There are more steps: --limit is {limit}.")
        self.stdout.write("\n".join(lines))

    # resume, abort

    def _resume(self, aliases: list[str], options: dict[str, Any]) -> None:
        self._change(aliases, options, RESUME, ("goes on", "would go on"))

    def _abort(self, aliases: list[str], options: dict[str, Any]) -> None:
        self._change(aliases, options, ABORT, ("was aborted", "would be aborted"))

    def _change(
        self, aliases: list[str], options: dict[str, Any], decision: Decision, said: tuple[str, str]
    ) -> None:
        """Change each of the named runs, even if another one can't be changed."""
        alias, dry_run = self.get_single(aliases), options["dry_run"]
        faults = []
        for pk in dict.fromkeys(options["ids"]):
            try:
                run = get_run(alias, pk)
                far = change(decision, run, dry_run=dry_run)
            except (CommandError, IllegalTransition) as error:
                faults.append(str(error))
            else:
                self.stdout.write(wrapped(f"{run.title} {said[dry_run]}: {far}."))
        if faults:
            raise CommandError(" ".join(faults))

    # sweep, prune

    def _sweep(self, aliases: list[str], options: dict[str, Any]) -> None:
        total = 0
        for alias in aliases:
            for repair in sweep(StepTable(alias), options["unstarted_after"]):
                what = f", {repair.step}" if repair.step else ""
                self.stdout.write(wrapped(f"Run {repair.run}{what}: {repair.reason}."))
                total += 1
        self.stdout.write(f"{total} repair(s).")

    def _prune(self, aliases: list[str], options: dict[str, Any]) -> None:
        chosen = (get_prunable(StepTable(alias), options["older_than"]) for alias in aliases)
        self.prune_rows("run", chosen, StageRuns.prune, options)


def get_run(alias: str, pk: int) -> Any:
    """
    Return a run.

    Raises:
        CommandError: The run does not exist.
    """
    run = runs_in(alias).filter(pk=pk).first()
    if run is None:
        raise CommandError(f"There is no run {pk}. `manage.py celery_stages list` shows the IDs.")
    return run


def change(decision: Decision, run: StageRun, *, dry_run: bool) -> str:
    """Apply a decision to a run, roll back if ``dry_run``; return how far the run then is."""
    alias = run._state.db
    with transaction.atomic(using=alias) if dry_run else nullcontext():
        decision.take(run)
        far = describe_progress(run.progress)
        if running := run.steps.running().count():
            far += f", {running} still running"
        if dry_run:
            transaction.set_rollback(True, using=alias)
    return far


def as_bars(stages: list[StageProgress]) -> Iterator[str]:
    """Yield a line with a bar for each stage; the bar is full when all its steps are done."""
    figures = [f"{stage.done}/{stage.total}" for stage in stages]
    digits, width = len(str(len(stages))), max(map(len, figures), default=0)
    for stage, figure in zip(stages, figures, strict=True):
        bar = "#" * (BAR * stage.done // stage.total)
        shown = (Status.RUNNING, Status.FAILED, Status.ABORTED)
        counts = ", ".join(f"{stage.counts[each]} {each}" for each in shown if each in stage.counts)
        name = f"Stage {stage.stage:<{digits}}"
        yield f"{name}  [{bar:.<{BAR}}]  {figure:>{width}}  {counts}".rstrip()
