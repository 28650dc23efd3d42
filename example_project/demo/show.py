"""The demo itself: everything is set up, then one scene after the other, then the report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from django.core.management import call_command

from . import sandbox
from .display import Display
from .errors import DemoError
from .feed_server import FeedServer
from .journal import Journal
from .mail_server import MailServer
from .promises import Promise, Report
from .scenes import albums, clicks, cut_off, digests, forgotten, imports, killed, sign_ups
from .surroundings import Surroundings
from .worker import Worker

SCENES: Final = (
    imports.play,
    clicks.play,
    sign_ups.play,
    cut_off.play,
    forgotten.play,
    digests.play,
    killed.play,
    albums.play,
)
#: Longest start of the worker, s.
READY_WITHIN: Final = 40.0


def perform(folder: Path, display: Display) -> Report:
    """
    Show every scene, from an empty folder on.

    All errors end up in the report; only a signal leaves this function.
    """
    promises: list[Promise] = []
    error = None
    mail = MailServer()
    worker = Worker(folder, {"EMAIL_HOST": "127.0.0.1", "EMAIL_PORT": str(mail.port)})
    try:
        with display.running(), _surroundings(folder, display, mail, worker) as around:
            for scene in SCENES:
                promises.extend(scene(around))
    except DemoError as failure:
        error = str(failure)
    except Exception as failure:  # noqa: BLE001 - reported with its type
        error = f"{type(failure).__name__}: {failure}"
    return Report(promises, sandbox.seconds_since_start(), error, worker.log_tail())


@contextmanager
def _surroundings(
    folder: Path, display: Display, mail: MailServer, worker: Worker
) -> Iterator[Surroundings]:
    display.scene("A site, a worker, a mail server and a web server, all of them real")
    journal = Journal(folder)
    display.progress("tables created in the two databases", 0, 2)
    call_command("migrate", verbosity=0)
    display.progress("tables created in the two databases", 1, 2)
    call_command("migrate", "django_celery_safe", database="locks", verbosity=0)
    display.progress("tables created in the two databases", 2, 2)
    with mail.running(), FeedServer().running() as feeds, worker.running():
        display.progress("worker with four child processes", 0, 1)
        worker.wait_until(
            lambda: journal.worker_is_ready, "the worker was ready", seconds=READY_WITHIN
        )
        display.progress("worker with four child processes", 1, 1)
        yield Surroundings(worker, mail, feeds, journal, display)
