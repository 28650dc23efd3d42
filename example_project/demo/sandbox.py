"""
A place of its own for the demo: a folder, an environment, and a way out that leaves nothing.

:func:`enter` starts the command anew in there; :func:`opened` is the inside.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

import psutil
from django.conf import settings
from django.db import connections

from .errors import DemoError

#: Signals that end the demo early: Ctrl-C, ``kill``, a closed terminal.
ENDING_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Variables that would let the surroundings of the demo reach into it.
FOREIGN: Final = (
    "CELERY",
    "REDIS_URL",
    "DATABASE_URL",
    "EXAMPLE_",
    "FEEDS_",
    "EMAIL_",
    "DEBUG",
    "SECRET_KEY",
    "ALLOWED_HOSTS",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
)
#: Longest time that processes get to be gone once they were killed, s.
GONE_WITHIN: Final = 5.0


class Interrupted(BaseException):
    """One of :data:`ENDING_SIGNALS` arrived; on its way out it takes everything down."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Interruptions:
    """
    Turns signals into :class:`Interrupted`, though never at a moment that would leave something.

    Used in the main thread only.
    """

    def __init__(self) -> None:
        self._held_back = 0
        self._pending: int | None = None

    def install(self) -> None:
        """Listen to the signals from now on, also those that :func:`enter` kept waiting."""
        for number in ENDING_SIGNALS:
            signal.signal(number, self._receive)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Let the block end before a signal that arrives in it counts."""
        self._held_back += 1
        try:
            yield
        finally:
            self._held_back -= 1
        if self._pending is not None and not self._held_back:
            raise Interrupted(self._pending)

    def ignore(self) -> None:
        """Listen no more: the way out is not to be interrupted."""
        self._held_back += 1

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self._held_back:
            self._pending = number
        else:
            raise Interrupted(number)


#: The one of this process.
interruptions: Final = Interruptions()


def is_inside() -> bool:
    """Tell whether this process runs in a demo's folder, with its settings."""
    return find_folder() is not None


def find_folder() -> Path | None:
    """Return the demo's folder; None: these are the site's ordinary settings."""
    return getattr(settings, "DEMO_FOLDER", None)


def enter(arguments: Sequence[str]) -> NoReturn:
    """
    Replace this process by ``manage.py demo`` with settings and a folder of its own.

    Settings can't be changed once Django has read them, hence the new program.
    Signals wait meanwhile, as nobody could remove the folder yet; the wait is
    handed on to the new program and ends when :func:`opened` listens.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    with suppress(OSError):
        # Made by the site's ordinary settings; stays if there is anything in it.
        settings.DATA_DIR.rmdir()
    folder = Path(tempfile.mkdtemp(prefix="django-celery-safe-demo-"))
    program = [sys.executable, str(settings.BASE_DIR / "manage.py"), "demo", *arguments]
    try:
        (folder / "tmp").mkdir()
        os.execve(program[0], program, _environment(folder))  # noqa: S606 - our own arguments
    except BaseException:
        shutil.rmtree(folder)
        raise


@contextmanager
def opened() -> Iterator[Path]:
    """
    The demo's folder, for as long as the block runs.

    However the block ends, the processes that it started and the folder are gone.

    Raises:
        Interrupted: In the block, when a signal asks the process to end.
    """
    folder = find_folder()
    if folder is None:
        raise DemoError("The demo's folder is made by enter(), which was not called.")
    try:
        interruptions.install()
        yield folder
    finally:
        interruptions.ignore()
        _end(psutil.Process().children(recursive=True))
        connections.close_all()
        shutil.rmtree(folder)


def wait_until_gone(processes: list[psutil.Process]) -> None:
    """Wait for the end of processes that were killed, :data:`GONE_WITHIN` at most."""
    deadline = time.monotonic() + GONE_WITHIN
    while any(map(_is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.01)


def seconds_since_start() -> float:
    """Return the demo's age, the time before :func:`enter` not counted."""
    return time.time() - float(os.environ["DEMO_STARTED_AT"])


def _environment(folder: Path) -> dict[str, str]:
    ours = {
        name: value for name, value in os.environ.items() if not name.upper().startswith(FOREIGN)
    }
    return {
        **ours,
        "DJANGO_SETTINGS_MODULE": "demo.settings",
        "DEMO_FOLDER": str(folder),
        "DEMO_STARTED_AT": str(time.time()),
        # kombu's folder broker takes messages through the folder for temporary files.
        "TMPDIR": str(folder / "tmp"),
    }


def _end(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    wait_until_gone(processes)


def _is_alive(process: psutil.Process) -> bool:
    try:
        # A zombie does nothing any more; how long it is listed is its parent's matter.
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
