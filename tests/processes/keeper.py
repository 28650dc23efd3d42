"""
Stands between the tests and one program, and ends the program when the tests end.

Run as a script by ``kept``, with a pipe from the test process as its input. The
pipe closes however that process ends, SIGKILL included; then the program, all
its children and its folder go.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from typing import Any

import psutil

#: Seconds that a program gets to end in order before it is killed.
GRACE = 5.0


def main(plan: dict[str, Any]) -> int:
    """Run the planned command until it ends or the tests do; return its exit status."""
    with open(plan["log"], "ab") as log:
        program = subprocess.Popen(
            plan["command"],
            cwd=plan["folder"],
            env=plan["env"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **plan["identity"],
        )
    print(program.pid, flush=True)
    ended = threading.Event()
    watcher = threading.Thread(target=end_with_tests, args=(program, plan, ended))
    watcher.daemon = True
    watcher.start()
    status = program.wait()
    if ended.is_set():
        watcher.join()
    kill_group(program.pid)
    return status if status >= 0 else 128 - status


def end_with_tests(
    program: subprocess.Popen[bytes], plan: dict[str, Any], ended: threading.Event
) -> None:
    """Wait until the test process is gone, then leave nothing of the program."""
    # Not sys.stdin: a thread inside its lock is a fatal error when Python ends.
    os.read(0, 1)
    ended.set()
    family = find_family(program.pid)
    program.send_signal(plan["stop_signal"])
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()
    _, alive = psutil.wait_procs(family, timeout=GRACE)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    kill_group(program.pid)
    if plan["owned_folder"]:
        shutil.rmtree(plan["owned_folder"], ignore_errors=True)


def find_family(pid: int) -> list[psutil.Process]:
    """Return the process and all its descendants, as far as they live."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill_group(group: int) -> None:
    """Kill what is left of the program's own process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
