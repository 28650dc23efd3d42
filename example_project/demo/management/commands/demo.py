"""``manage.py demo``: the site at work, with everything going wrong that can."""

from __future__ import annotations

import json
import sys
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from demo import sandbox
from demo.display import Display, make_console, make_display
from demo.promises import Report
from demo.show import perform


class Command(BaseCommand):
    """Show what django_celery_safe promises, on a real worker, and check it."""

    help = (
        "Show imports that overlap, buttons pressed at once, sign-ups that roll back, digests "
        "asked for again and again, senders and a worker that are killed, an album in stages that "
        "goes on all the same, on a real worker with real servers in a temporary folder. Needs "
        "nothing that runs already, and leaves nothing behind. Exit status 1 if a promise is "
        "broken."
    )
    # They run on the ordinary site; the demo has settings of its own.
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--json", action="store_true", dest="as_json", help="Print one JSON object, no more."
        )

    def handle(self, *, as_json: bool, **options: Any) -> None:
        if not sandbox.is_inside():
            sandbox.enter(["--json"] if as_json else [])
        console = make_console()
        try:
            with sandbox.opened() as folder:
                report = perform(folder, Display() if as_json else make_display(console))
        except sandbox.Interrupted as interrupted:
            self.stderr.write("Interrupted; everything is cleaned up.")
            sys.exit(128 + interrupted.number)
        if as_json:
            self.stdout.write(json.dumps(report.as_json(), indent=2))
        else:
            console.print(report.as_table())
            console.print(f"{_verdict(report)} ({report.seconds:.0f} s)")
        if not report.kept:
            self.stderr.write(f"{report.error or ''}\n\nEnd of the worker's log:\n{report.log}")
            sys.exit(1)


def _verdict(report: Report) -> str:
    if report.error is not None:
        return "[bold red]The demo did not get to its end."
    broken = sum(not promise.kept for promise in report.promises)
    if broken:
        return f"[bold red]{broken} of {len(report.promises)} promises broken."
    return f"[bold green]All {len(report.promises)} promises kept."
