"""The demo's worker and relay: ordinary commands, in processes that end with the demo."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from django.conf import settings

#: How long a process may take to finish its work at the end, s.
ENDS_WITHIN: Final = 5
WORKER: Final = (
    *(sys.executable, "-m", "celery", "-A", "example_project", "worker"),
    *("--concurrency=4", "--loglevel=INFO", "--hostname=demo@%h"),
    # It has no other workers to talk to.
    *("--without-gossip", "--without-mingle", "--without-heartbeat"),
)
RELAY: Final = (sys.executable, "manage.py", "celery_outbox", "relay")


@contextmanager
def running(
    command: tuple[str, ...], log_path: Path, **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command for the block; if the block fails, end it without letting it finish."""
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            command,
            cwd=settings.BASE_DIR,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Ctrl-C is meant for the demo, which then ends the process.
            start_new_session=True,
        )
    try:
        yield process
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDS_WITHIN)
    finally:
        # The session was made for the process: all that is left in it are its children.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
