"""Does what a page tells its reader to do: writes its files, and runs its commands."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import celery

from tests.commands import run_python
from tests.docs.pages import ROOT, Block, Page
from tests.processes import KeptProcess, wait_for

#: The servers of the page's reader.
REDIS = "127.0.0.1:6379"
#: The process that the page names in place of the one that its reader sees.
PID = "27773"
#: How the reader installs the package, from a clone beside the folder.
INSTALL = re.compile(r"pip install -q '\.\./django_celery_safe\[redis\]'.*")
#: Programs that only an installation brings, and the modules behind them.
PROGRAMS = {"celery": "celery", "django-admin": "django"}
#: Whatever else a page says of the output of the commands right above.
PROMISE = re.compile(r"(?:prints|ends? with|logs|shows) `([^`]+)`")
#: Parts of an output that differ from run to run.
CHANGING = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|\S+ pid \d+|\d+(\.\d+)?s?")
#: Longest run of one block, and longest wait for a promise of the page, seconds.
PATIENCE = 150


class Walk:
    """
    A reader of one page, in an empty folder with an environment of its own.

    A comment above a block says what the reader does with it: ``file: PATH``, ``append: PATH``,
    ``run``, ``background: NAME``; ``prints`` is what the commands above it have printed.

    Args:
        folder: An empty one.
        wheel: The package as it is installed; the packages that it needs are those of the tests.
        redis: The host and port of a Redis that is empty.
    """

    def __init__(self, folder: Path, wheel: Path, redis: str) -> None:
        self._folder = folder
        self._wheel = wheel
        self._redis = redis
        #: The output of the commands, block by block.
        self.printed: list[str] = []
        self.background: dict[str, KeptProcess] = {}

    def read(self, page: Page) -> None:
        """Do all that the page says; its background processes end with it."""
        lines = page.text.split("\n")
        blocks = list(page.blocks())
        with ExitStack() as stack:
            for block, following in zip(blocks, [*blocks[1:], None], strict=True):
                self._do(block, stack)
                if block.marker == "run" or block.marker.startswith("background"):
                    end = block.line + block.code.count("\n")
                    until = following.line - 2 if following else None
                    self._keep_promises("\n".join(lines[end:until]), block)

    def _do(self, block: Block, stack: ExitStack) -> None:
        action, _, name = block.marker.partition(": ")
        code = self._own(block.code)
        if action == "file":
            (self._home / name).write_text(code)
        elif action == "append":
            with (self._home / name).open("a") as file:
                file.write("\n" + code)
        elif action == "run":
            self.printed.append(self._run(code, block.line))
        elif action == "background":
            log = self._folder / f"{name}.log"
            command = ["bash", "-c", f"exec {code}"]
            process = KeptProcess(command, folder=self._home, log_path=log, env=self._environment())
            self.background[name] = stack.enter_context(process)
        elif action == "prints":
            printed = _constant(self.printed[-1])
            for line in block.code.splitlines():
                assert _constant(line) in printed, (line, self.printed[-1])

    def _keep_promises(self, text: str, block: Block) -> None:
        for promised in PROMISE.findall(text):
            wait_for(
                lambda: any(promised in one for one in self._seen()),  # noqa: B023
                PATIENCE,
                f"line {block.line} promises {promised!r}",
            )

    def _seen(self) -> Iterator[str]:
        yield from self.printed[-1:]
        yield from (process.log for process in self.background.values())

    def _own(self, code: str) -> str:
        """Return a block with the test's own servers, package and process ids."""
        code = code.replace(REDIS, self._redis).replace(
            "python3 -m venv", f"{sys.executable} -m venv"
        )
        if PID in code:
            code = code.replace(PID, re.findall(r"pid (\d+)", self.printed[-1])[-1])
        for program, module in PROGRAMS.items():
            code = re.sub(rf"^{program}\b", f"python -m {module}", code, flags=re.MULTILINE)
        shared = Path(celery.__file__).parents[1]
        install = (
            f"echo '{shared}' > $(python -c 'import site; print(site.getsitepackages()[0])')"
            f"/shared.pth && pip install -q --no-deps --no-index '{self._wheel}'"
        )
        return INSTALL.sub(lambda found: install, code)

    def _run(self, code: str, line: int) -> str:
        # GNU's timeout ends the commands of the block, too, and its status is told like theirs.
        done = subprocess.run(
            ["timeout", str(PATIENCE), "bash", "-e", "-o", "pipefail", "-c", code],
            cwd=self._home,
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        logs = "\n".join(f"--- {n}\n{one.log}" for n, one in self.background.items())
        assert done.returncode == 0, f"line {line}:\n{code}\n{done.stdout}\n{logs}"
        return done.stdout

    @property
    def _home(self) -> Path:
        folders = [path for path in self._folder.iterdir() if (path / ".venv").is_dir()]
        return folders[0] if folders else self._folder

    def _environment(self) -> dict[str, str]:
        foreign = ("DJANGO", "CELERY", "PYTEST", "PYTHON", "VIRTUAL_ENV", "REDIS", "SAFE", "COV")
        ours = {name: one for name, one in os.environ.items() if not name.startswith(foreign)}
        binaries = self._home / ".venv" / "bin"
        return {**ours, "PATH": f"{binaries}{os.pathsep}{ours['PATH']}", "PYTHONUNBUFFERED": "1"}


def _constant(text: str) -> str:
    """Return what is the same in each run."""
    return " ".join(CHANGING.sub("…", text).split())


def build_wheel(folder: Path, source: Path = ROOT) -> Path:
    """Build the package as it would be published; return the wheel."""
    build("wheel", folder, source)
    (wheel,) = folder.glob("*.whl")
    return wheel


def build(target: str, folder: Path, source: Path = ROOT) -> None:
    """Build a ``wheel`` or an ``sdist`` of the files of a source into a folder."""
    run_python("-m", "hatchling", "build", "-t", target, "-d", str(folder), cwd=source)
