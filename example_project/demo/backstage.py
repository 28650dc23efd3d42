"""The surroundings of each scene: servers and processes, waiting and killing, and printing."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, Final

from django.conf import settings
from django.core.management import call_command
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .feed_server import FeedServer
from .mail_server import MailServer
from .processes import RELAY, WORKER, running

#: Longest wait for anything, s: some twenty times what it takes on a quiet machine.
PATIENCE: Final = 60
#: How much later than its lease's end killed work may begin again, s: a worker or a relay has to
#: notice, and the worker to start another process, on a busy machine too.
GRACE: Final = 15


class DemoError(Exception):
    """Something did not happen, or not in time. The sentence says what."""


@dataclass(frozen=True)
class Promise:
    """What was promised, what was expected, and what was seen."""

    text: str
    expected: Any
    seen: Any
    kept: bool


def count(text: str, expected: Any, seen: Any) -> Promise:
    """Return a promise that is kept if exactly what was expected was seen."""
    return Promise(text, expected, seen, kept=expected == seen)


def soon(text: str, seconds: float) -> Promise:
    """Return a promise that is kept if killed work began again soon after its lease's end."""
    most = settings.DJANGO_CELERY_SAFE["LOCK_TIMEOUT"] + GRACE
    return Promise(text, f"within {most:g} s", f"{seconds:.1f} s", kept=seconds <= most)


class Show:
    """The surroundings of a scene."""

    def __init__(self, console: Console, mail: MailServer, feeds: FeedServer) -> None:
        self.console = console
        self.mail = mail
        self.feeds = feeds
        self._log = Path(os.environ["DEMO_FOLDER"], "log")
        self.broker = Path(str(settings.CELERY_BROKER_TRANSPORT_OPTIONS["data_folder_in"]))
        self._worker: subprocess.Popen[bytes] | None = None
        self._killed_at = 0.0

    def begin(self, title: str, problem: str) -> None:
        """Begin a scene."""
        self.console.print(f"\n[bold]{title}[/bold]\n[italic]{problem}[/italic]")

    def say(self, text: str, mark: str = "[green]✓[/green]") -> None:
        """Print what happened."""
        self.console.print(f" {mark} {text}")

    def wait(self, what: str, condition: Callable[[], Any]) -> None:
        """
        Wait until the condition is true, and print that.

        Raises:
            DemoError: It did not become true in time, or the worker ended.
        """
        began = time.monotonic()
        with self.console.status(f"[dim]{what} …"):
            while not condition():
                if self._worker is not None and self._worker.poll() is not None:
                    raise DemoError(f"The worker ended before this happened: {what}.")
                if time.monotonic() > began + PATIENCE:
                    raise DemoError(f"This did not happen within {PATIENCE} s: {what}.")
                time.sleep(0.05)
        seconds = time.monotonic() - began
        self.say(f"{what} [dim]({seconds:.1f} s)[/dim]" if seconds > 1 else what)

    def run(self, *command: str) -> str:
        """Run a command of ``manage.py`` and print what it prints; return that."""
        printed = StringIO()
        call_command(*command, stdout=printed)
        text = f"$ manage.py {' '.join(command)}\n{printed.getvalue().rstrip()}"
        self.console.print(
            f"[dim]{escape(text)}[/dim]", no_wrap=True, crop=False, overflow="ignore"
        )
        return text

    def kill(self, pid: int, which: str) -> None:
        """Kill a process of the worker's."""
        os.kill(pid, signal.SIGKILL)
        self._killed_at = time.monotonic()
        self.say_killed([pid], which)

    def since_kill(self) -> float:
        """Return how many seconds ago the last process of the worker's was killed."""
        return time.monotonic() - self._killed_at

    def say_killed(self, pids: list[int], which: str) -> None:
        """Print that processes were killed."""
        self.say(f"[bold]kill -9 {' '.join(map(str, pids))}[/bold]: {which}", "[red]✗[/red]")

    def kill_named(self, *command: str) -> None:
        """Run a command that shows what is under way, and kill the process that it names."""
        named = re.search(r"\b(?:pid|process) (\d+)\b", self.run(*command))
        if named is None:
            raise DemoError(f"{' '.join(command)} names no process.")
        self.kill(int(named[1]), f"the process that {command[0]} names")

    def kill_senders(self, *senders: tuple[str, str], when: str, which: str) -> None:
        """Let processes save something with a message, all at once, and die on the way."""
        with ExitStack() as ends:
            started = []
            for sender in senders:
                program = (sys.executable, "-m", "demo.senders", *sender, when)
                started.append(subprocess.Popen(program, cwd=settings.BASE_DIR))
                ends.callback(started[-1].kill)
            statuses = {process.wait(PATIENCE) for process in started}
        if statuses != {-signal.SIGKILL}:
            raise DemoError(f"Senders that were to be killed ended with {statuses}.")
        self.say_killed([process.pid for process in started], which)

    @contextmanager
    def worker(self) -> Iterator[None]:
        """Run a worker with four processes for the block."""
        mail = {"EMAIL_HOST": "127.0.0.1", "EMAIL_PORT": str(self.mail.port)}
        with running(WORKER, self._log, **mail) as self._worker:
            self.wait("a worker with four processes is ready", lambda: " ready." in self.log)
            yield

    @contextmanager
    def relay(self) -> Iterator[None]:
        """Run a relay of the outbox for the block."""
        with running(RELAY, self._log):
            yield

    @contextmanager
    def worker_stopped(self) -> Iterator[None]:
        """Let the worker take no message in the block."""
        assert self._worker is not None
        self._worker.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._worker.send_signal(signal.SIGCONT)

    @property
    def log(self) -> str:
        """The log of the worker and the relay."""
        return self._log.read_text(errors="replace")

    def print_table(self, promises: list[Promise]) -> None:
        """Print what a scene promised."""
        self.console.print()
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, expand=True)
        table.add_column("promise", ratio=1)
        for name in ("expected", "seen", ""):
            table.add_column(name, justify="right")
        for promise in promises:
            mark = "[green]kept[/green]" if promise.kept else "[bold red]broken[/bold red]"
            table.add_row(promise.text, str(promise.expected), str(promise.seen), mark)
        self.console.print(table)
