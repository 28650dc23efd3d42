"""Records the history of locks that several processes use while things go wrong."""

import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.histories.holders import use_locks
from tests.histories.nemesis import Troublemaker
from tests.histories.plan import Board, Plan
from tests.histories.records import History, iter_records
from tests.processes import FunctionProcess, start_in_process
from tests.servers import Server

#: How late a renewal that is under way may be sent on a busy machine, s.
SLOWNESS = 0.5


def record(
    plan: Plan,
    server: Server | None = None,
    folder: Path | None = None,
    settings: Mapping[str, Any] | None = None,
) -> History:
    """
    Let processes use locks of the store that the settings name; return what they did.

    Args:
        server: What holds the locks, to be restarted by the nemesis ``restart``.
        folder: Where the records are written and stay; None: they do not stay.
        settings: Django settings of the processes on top of those of this one.

    Raises:
        FunctionFailed: A process met an error that is no LockError.
        TimeoutError: The run took too long.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="history-") as name:
            return record(plan, server, Path(name), settings)
    if plan.nemesis == "restart" and server is None:
        raise ValueError("The nemesis 'restart' needs a server that it may restart.")
    Board(folder, plan.processes)
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                start_in_process(use_locks, plan, number, folder, settings=settings)
            )
            for number in range(plan.processes)
        ]
        restarted = server if plan.nemesis == "restart" else None
        trouble = Troublemaker(plan, folder, processes, restarted)
        _run(plan, folder, processes, trouble)
    return History(
        records=list(iter_records(folder)),
        processes=plan.processes,
        fences=plan.fences,
        nemesis=plan.nemesis,
        grace=plan.longest_pause + SLOWNESS,
        pauses=trouble.pauses,
        losses=trouble.losses,
    )


def _run(plan: Plan, folder: Path, processes: list[FunctionProcess], trouble: Troublemaker) -> None:
    for process in processes:
        assert process.receive() == "ready"
    (folder / "go").touch()
    deadline = time.monotonic() + plan.at_most
    while alive := [number for number, one in enumerate(processes) if not one.pipe.poll()]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"The history is not complete after {plan.at_most:g} s.")
        trouble.strike(alive)
    for process in processes:
        process.result(timeout=10)
