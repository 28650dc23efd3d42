"""``manage.py demo``: the site at work, with everything going wrong that can."""

import signal
import sys
import time
from typing import Any

from django.core.management import call_command
from django.core.management.base import BaseCommand
from rich.console import Console

from demo.backstage import DemoError, Promise, Show
from demo.feed_server import FeedServer
from demo.mail_server import MailServer
from demo.scenes import in_stages, on_commit, once, one_at_a_time, until_done

SCENES = (one_at_a_time.play, on_commit.play, until_done.play, once.play, in_stages.play)
#: Widest line that is printed, columns.
WIDTH = 80


class Command(BaseCommand):
    """Show what django_celery_safe promises, on a real worker, and check it."""

    help = (
        "Show each tool on a real worker, kill a process in the middle, and check that it comes "
        "out right. Needs nothing that runs already, and leaves nothing behind. Exit status 1 if "
        "a promise is broken."
    )

    def handle(self, **options: Any) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # The exception takes everything down on its way out.
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
        # A terminal without ✓ shows something else in its place.
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
        began = time.monotonic()
        console = Console(highlight=False)
        console.width = min(console.width, WIDTH)
        promises: list[Promise] = []
        with MailServer() as mail, FeedServer() as feeds:
            show = Show(console, mail, feeds)
            try:
                self.perform(show, promises)
            except DemoError as error:
                console.print(str(error), style="bold red", markup=False)
                promises.append(Promise("The demo gets to its end", "yes", "no", kept=False))
        broken = sum(not promise.kept for promise in promises)
        if broken:
            console.print(
                f"\nEnd of the worker's log:\n{show.log[-5000:]}", markup=False, soft_wrap=True
            )
            console.print(f"[bold red]{broken} of {len(promises)} promises broken.")
            sys.exit(1)
        seconds = time.monotonic() - began
        console.print(
            f"\n[bold green]All {len(promises)} promises kept[/bold green] in {seconds:.0f} s. "
            "The same in your own project: docs/start.md"
        )

    def perform(self, show: Show, promises: list[Promise]) -> None:
        """Play every scene, from an empty folder on."""
        show.begin(
            "django_celery_safe: one site, five small apps, one for each tool",
            "Each meets its trouble here: double clicks, crashes, a broker that forgets.",
        )
        call_command("migrate", run_syncdb=True, verbosity=0)
        call_command("migrate", "django_celery_safe", database="locks", verbosity=0)
        show.say("two SQLite files, a folder as broker, a mail server, a web server")
        with show.worker():
            for play in SCENES:
                seen = list(play(show))
                promises += seen
                show.print_table(seen)
