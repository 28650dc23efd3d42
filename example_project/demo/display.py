"""Showing the demo while it runs: bars on a terminal, lines elsewhere, nothing for machines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.progress import TaskID as BarID

#: Width of what is not shown on a terminal, columns.
PLAIN_WIDTH = 100


class Display:
    """Shows nothing: ``--json`` uses it, and it is the base of the others."""

    @contextmanager
    def running(self) -> Iterator[Display]:
        """Show for as long as the block runs."""
        yield self

    def scene(self, title: str) -> None:
        """Begin a scene."""

    def note(self, text: RenderableType) -> None:
        """Say something that stays."""

    def progress(self, what: str, done: int, total: int) -> None:
        """Show how far something has come; called as often as one likes."""


class Lines(Display):
    """One line for everything that begins and ends."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: dict[str, int] = {}

    def scene(self, title: str) -> None:
        self._console.print(f"\n[bold]{title}[/bold]")

    def note(self, text: RenderableType) -> None:
        self._console.print(text, highlight=False)

    def progress(self, what: str, done: int, total: int) -> None:
        if self._shown.get(what) != done and done == total:
            self._console.print(f"  {what}: {done} of {total}", highlight=False)
        self._shown[what] = done


class Bars(Lines):
    """A bar for each thing that takes its time."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._bars: dict[str, BarID] = {}
        self._progress = _make_progress(console)

    @contextmanager
    def running(self) -> Iterator[Display]:
        try:
            yield self
        finally:
            self._progress.stop()

    def scene(self, title: str) -> None:
        # The bars of the last scene stay where they are, above the new title.
        self._progress.stop()
        super().scene(title)
        self._bars = {}
        self._progress = _make_progress(self._console)
        self._progress.start()

    def progress(self, what: str, done: int, total: int) -> None:
        if what not in self._bars:
            self._bars[what] = self._progress.add_task(what, total=total)
        self._progress.update(self._bars[what], completed=done)


def _make_progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(finished_text="[green]✓"),
        TextColumn("{task.description}"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        console=console,
    )


def make_console() -> Console:
    """Return the console on the standard output, wide enough for a table in a log file too."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, PLAIN_WIDTH))


def make_display(console: Console) -> Display:
    """Return the display that suits the console."""
    return Bars(console) if console.is_terminal else Lines(console)
