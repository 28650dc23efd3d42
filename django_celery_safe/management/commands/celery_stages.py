"""``manage.py celery_stages``: how far runs of stages are, and what to do with those that stand."""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any, Final

from django.core.management.base import CommandError, CommandParser
from django.db import Error as DatabaseError
from django.db import connections, transaction
from django.db.models import F, Q
from django.db.models.functions import Coalesce, Now

from ...exceptions import IllegalTransition, describe_error
from ...locks.stores.rows import read_holder
from ...models import OutboxMessage, StageRun, StageStep
from ...stages import Progress, StageProgress, Status
from ...stages.engine import Fault
from ...stages.repairs import PATIENCE, find_prunable, sweep
from ...stages.rows import StepStore, step_store
from ...texts import printable
from ..console import (
    REDRAW,
    TableCommand,
    age,
    count,
    crop,
    duration,
    shorten,
    wrapped,
)

#: Rows that lists show if nothing else is said.
LIMIT: Final = 50
#: Characters of a bar.
BAR: Final = 20
#: How often --watch looks, s.
LOOK: Final = 0.5


class Command(TableCommand):
    """Parses, calls, prints."""

    help = "Show runs of stages, let them go on, stop them, repair or delete what is left of them."
    models = (StageRun, StageStep, OutboxMessage)
    subject = "runs of stages"
    database_help = "the runs in this database (default: where the router writes them)"

    def add_arguments(self, parser: CommandParser) -> None:
        self.add_database(parser)
        actions = parser.add_subparsers(
            dest="action",
            title="actions",
            metavar="{list,show,resume,abort,sweep,prune}",
            required=True,
        )
        listing = self.add_action(actions, "list", "show the runs, the newest first")
        self.add_json(listing)
        listing.add_argument("--state", choices=Status.values, help="only those in this state")
        self.add_limit(listing)
        showing = self.add_action(
            actions, "show", "show a run, its stages, and the steps to be looked at"
        )
        form = showing.add_mutually_exclusive_group()
        self.add_json(form)
        form.add_argument("--watch", action="store_true", help="show it anew until it has ended")
        self.add_limit(showing)
        showing.add_argument("id", type=count, metavar="RUN", help="as the list shows it")
        resuming = self.add_action(
            actions, "resume", "run again what failed and what was not begun"
        )
        self._add_choice(resuming)
        aborting = self.add_action(
            actions, "abort", "stop what has not begun; running steps end as they will"
        )
        self._add_choice(aborting)
        sweeping = self.add_action(actions, "sweep", "repair what a crash has left")
        sweeping.add_argument(
            "--unstarted-after",
            type=age,
            metavar="AGE",
            default=PATIENCE,
            help="for how long a step may wait to be begun: 90s, 15m, 12h "
            f"({duration(PATIENCE.total_seconds())})",
        )
        pruning = self.add_action(actions, "prune", "delete runs that ended long ago")
        self.add_pruning(
            pruning, "how long ago, such as 90s, 12h or 7d (default: STAGES_RETENTION)"
        )

    def _add_choice(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "ids", nargs="+", type=count, metavar="RUN", help="as the list shows it"
        )
        parser.add_argument("--dry-run", action="store_true", help="only say what would be")

    def find_databases(self) -> Iterable[str]:
        return [step_store().alias]

    # list, show

    def _list(self, aliases: list[str], options: dict[str, Any]) -> None:
        limit = options["limit"]
        found: list[dict[str, Any]] = []
        for alias in aliases:
            rows = runs_in(alias).order_by("-pk")
            if options["state"]:
                rows = rows.filter(status=options["state"])
            # One more, to know whether there is more.
            end = limit + 1 - len(found) if limit else None
            found += [as_row(run) for run in rows[:end]]
        shown = found[: limit or None]
        if options["as_json"]:
            self.stdout.write(json.dumps(shown, indent=2))
            return
        before = None
        for row in shown:
            if len(aliases) > 1 and row["database"] != before:
                before = row["database"]
                self.stdout.write(before)
            self.stdout.write(as_lines(row))
        if not shown:
            self.stdout.write("No such run." if options["state"] else "There is no run.")
        elif len(found) > limit > 0:
            self.stdout.write(f"There are more: --limit is {limit}.")

    def _show(self, aliases: list[str], options: dict[str, Any]) -> None:
        alias, limit = only(aliases), options["limit"]
        run = get_run(alias, options["id"])
        if options["watch"]:
            with suppress(KeyboardInterrupt):
                self._watch(run, limit)
        elif options["as_json"]:
            known = {
                **as_row(run),
                "by_stage": [as_stage(stage) for stage in run.progress_by_stage()],
                "steps": [as_step(step) for step in steps_of(run, limit)[0]],
            }
            self.stdout.write(json.dumps(known, indent=2))
        else:
            self.stdout.write(as_page(run, limit))

    def _watch(self, run: Any, limit: int) -> None:
        """Show a run until it has ended: in its place on a terminal, else each change below."""
        on_screen, before, alias = self.stdout.isatty(), "", str(run._state.db)
        while True:
            try:
                run = get_run(alias, run.pk)
                text = as_page(run, limit) if on_screen else as_heading(as_row(run))
            except DatabaseError as error:
                if not before:
                    raise
                connections[alias].close_if_unusable_or_obsolete()
                said = describe_error(error).splitlines()[0]
                text = wrapped(f"The database can't be asked, of {alias}: {said}")
            if text != before:
                self.stdout.write(f"{REDRAW}{crop(text)}" if on_screen else text)
                self.stdout.flush()
                before = text
            if run.status in Status.STOPPED:
                break
            time.sleep(LOOK)
        if not on_screen:
            self.stdout.write(as_page(run, limit))

    # resume, abort

    def _resume(self, aliases: list[str], options: dict[str, Any]) -> None:
        self._change(aliases, options, StageRun.resume, ("goes on", "would go on"))

    def _abort(self, aliases: list[str], options: dict[str, Any]) -> None:
        self._change(aliases, options, StageRun.abort, ("was aborted", "would be aborted"))

    def _change(
        self,
        aliases: list[str],
        options: dict[str, Any],
        change: Callable[[StageRun], StageRun],
        said: tuple[str, str],
    ) -> None:
        """Change each of the runs that were named, also if another one can't be."""
        alias, dry_run = only(aliases), options["dry_run"]
        faults = []
        for pk in dict.fromkeys(options["ids"]):
            try:
                run = get_run(alias, pk)
                told = rehearse(change, run) if dry_run else progress_of(change(run))
            except (CommandError, IllegalTransition) as error:
                faults.append(str(error))
            else:
                self.stdout.write(f"Run {pk} {said[dry_run]}: {told}.")
        if faults:
            raise CommandError(" ".join(faults))

    # sweep, prune

    def _sweep(self, aliases: list[str], options: dict[str, Any]) -> None:
        total = 0
        for alias in aliases:
            for repair in sweep(StepStore(alias), options["unstarted_after"]):
                what = f", {repair.step}" if repair.step else ""
                self.stdout.write(wrapped(f"Run {repair.run}{what}: {repair.reason}."))
                total += 1
        self.stdout.write(f"{total} repair(s).")

    def _prune(self, aliases: list[str], options: dict[str, Any]) -> None:
        chosen = [find_prunable(StepStore(alias), options["older_than"]) for alias in aliases]
        total = sum(rows.count() if options["dry_run"] else rows.prune() for rows in chosen)
        would = "would be" if options["dry_run"] else "were"
        self.stdout.write(f"{total} run(s) {would} deleted.")


def only(aliases: list[str]) -> str:
    """Return the alias that is meant, if there is one."""
    if len(aliases) > 1:
        raise CommandError(
            f"There are runs in {', '.join(aliases)}, each with IDs of its own: say whose, by "
            f"--database."
        )
    return aliases[0]


def runs_in(alias: str) -> Any:
    """Return the runs in a database, with the server's time and how many of their steps are."""
    return StepStore(alias).runs().defer("params_text").annotate(asked_at=Now()).counted()


def get_run(alias: str, pk: int) -> Any:
    """
    Return a run of :func:`runs_in`.

    Raises:
        CommandError: There is none.
    """
    run = runs_in(alias).filter(pk=pk).first()
    if run is None:
        raise CommandError(f"There is no run {pk}. `manage.py celery_stages list` shows the IDs.")
    return run


def steps_of(run: StageRun, limit: int) -> tuple[list[Any], bool]:
    """Return the steps that run, failed or wait for long; and whether there are more of them."""
    waits = Q(status=Status.WAITING, stage=run.stage)
    late = Q(pk__in=run.steps.overdue(PATIENCE).order_by().values("pk"))
    failed_before = ~Q(note="") | ~Q(error="") | ~Q(error_type="")
    chosen = Q(status__in=[Status.RUNNING, Status.FAILED]) | late | (waits & failed_before)
    rows = run.steps.filter(chosen).defer("params_text", "arguments_text")
    # One more, to know whether there is more.
    found = list(
        rows.annotate(asked_at=Now(), since=Coalesce("due_at", F("run__stage_at")))[
            : limit + 1 if limit else None
        ]
    )
    return found[: limit or None], len(found) > limit > 0


def rehearse(change: Callable[[StageRun], StageRun], run: StageRun) -> str:
    """Return how far a run would be after a change, which is taken back."""
    alias = run._state.db
    with transaction.atomic(using=alias):
        told = progress_of(change(run))
        transaction.set_rollback(True, using=alias)
    return told


def progress_of(run: StageRun) -> str:
    """Return how far a run is, as a clause."""
    progress = run.progress
    running = run.steps.running().count()
    text = describe(progress)
    return f"{text}, {running} still running" if running else text


def describe(progress: Progress) -> str:
    """Return it as a clause."""
    done = f"{progress.done} of {progress.total} steps done ({progress.percent} %)"
    return f"stage {progress.stage} of {progress.stages}, {done}"


def as_row(run: Any) -> dict[str, Any]:
    """Return a run as ``--json`` shows it; neither its params nor any argument is in it."""
    progress = Progress(run.done, run.total, run.stage + 1, run.stages)
    step = run.error_step if run.status == Status.FAILED else None
    return {
        "id": run.pk,
        "database": run._state.db,
        "status": str(run.status),
        **progress._asdict(),
        "percent": progress.percent,
        "created_at": run.created_at.isoformat(),
        "ended_at": None if run.ended_at is None else run.ended_at.isoformat(),
        "age_s": seconds_from(run.created_at, run.asked_at),
        "ended_s": None if run.ended_at is None else seconds_from(run.ended_at, run.asked_at),
        "error_step": None if step is None else str(step),
        "error": run.error if step is None else fault_of(step),
        "note": run.note,
    }


def as_stage(stage: StageProgress) -> dict[str, Any]:
    """Return a stage as ``show --json`` shows it."""
    counts = {str(status): stage.counts.get(status, 0) for status in Status}
    return {
        "stage": stage.stage, "priority": stage.priority, "total": stage.total, **counts
    }  # fmt: skip


def as_step(step: Any) -> dict[str, Any]:
    """Return a step as ``show --json`` shows it."""
    runs = step.status == Status.RUNNING
    held = read_holder("", step) if step.ends_at else None
    return {
        "task": step.task,
        "task_id": step.task_id,
        "status": str(step.status),
        "stage": step.stage + 1,
        "host": (held and held.holder.host) or None,
        "pid": (held and held.holder.pid) or None,
        "started_at": None if step.started_at is None else step.started_at.isoformat(),
        "ended_at": None if step.ended_at is None else step.ended_at.isoformat(),
        "waits_s": seconds_from(step.since, step.asked_at)
        if step.status == Status.WAITING
        else None,
        "remaining_s": round(held.remaining or 0.0, 3) if held and runs else None,
        "starts": step.starts,
        "deaths": step.deaths,
        "resent": step.resent,
        "error": fault_of(step),
        "note": step.note,
    }


def fault_of(step: StageStep) -> str:
    """Return the error of a step as a line."""
    return str(Fault(step.error_type, step.error))


def seconds_from(begin: datetime, end: datetime) -> float:
    """Return the time from one moment to another, s; 0 if that is not later."""
    return round(max(0.0, (end - begin).total_seconds()), 3)


def as_heading(row: dict[str, Any]) -> str:
    """Return a run's state as a line."""
    fields = {name: row[name] for name in Progress._fields}
    return f"Run {row['id']}: {row['status']}, {describe(Progress(**fields))}"


def as_lines(row: dict[str, Any]) -> str:
    """Return a run as a line with its state and some with what is known, for 80 columns."""
    told = f"started {duration(row['age_s'])} ago"
    if row["ended_s"] is not None:
        told += f", ended {duration(row['ended_s'])} ago"
    lines = [as_heading(row), f"    {told}"]
    if row["error_step"]:
        lines.append(wrapped(f"{row['error_step']} failed: {row['error']}", 4))
    elif row["error"]:
        lines.append(wrapped(row["error"], 4))
    if row["note"]:
        lines.append(wrapped(f"sweep: {row['note']}", 4))
    return "\n".join(lines)


def as_page(run: Any, limit: int) -> str:
    """Return a run with a bar for each stage, and the steps to be looked at."""
    steps, more = steps_of(run, limit)
    lines = [as_lines(as_row(run)), "", *as_bars(run.progress_by_stage())]
    if steps:
        lines += ["", *map(as_paragraph, steps)]
    if more:
        lines.append(f"There are more steps: --limit is {limit}.")
    return "\n".join(lines)


def as_bars(stages: list[StageProgress]) -> Iterator[str]:
    """Yield a line with a bar for each stage; it is full when all of its steps are done."""
    names = [f"Stage {stage.stage}" for stage in stages]
    figures = [f"{stage.done}/{stage.total}" for stage in stages]
    first, second = (max(map(len, texts), default=0) for texts in (names, figures))
    for stage, name, figure in zip(stages, names, figures, strict=True):
        bar = "#" * (BAR * stage.done // stage.total)
        shown = (Status.RUNNING, Status.FAILED, Status.ABORTED)
        told = ", ".join(f"{stage.counts[one]} {one}" for one in shown if one in stage.counts)
        yield f"{name:<{first}}  [{bar:.<{BAR}}]  {figure:>{second}}  {told}".rstrip()


def as_paragraph(step: Any) -> str:
    """Return a step as a line with its task and some with what is known, for 80 columns."""
    row = as_step(step)
    told = [f"stage {row['stage']}", row["task_id"]]
    if row["status"] == Status.RUNNING:
        told.append(f"for {duration(seconds_from(step.started_at, step.asked_at))}")
        told.append(f"pid {row['pid']} on {row['host']}" if row["host"] else "by someone unknown")
        if not row["remaining_s"]:
            told.append("which is gone")
    elif row["status"] == Status.WAITING:
        told.append(f"for {duration(row['waits_s'])}")
    if row["starts"] > 1:
        told.append(f"begun {row['starts']} times")
    if row["resent"]:
        told.append(f"sent again {row['resent']} time(s)")
    lines = [
        f"{row['status']:<9} {shorten(printable(step.task))}",
        wrapped(", ".join(told), 10),
    ]
    if row["error"]:
        lines.append(wrapped(row["error"], 10))
    if row["note"]:
        lines.append(wrapped(f"sweep: {row['note']}", 10))
    return "\n".join(lines)
