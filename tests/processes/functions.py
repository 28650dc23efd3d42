"""
Functions of test modules in processes of their own, with Django set up there.

Each process is a fork of a server that has imported libraries and nothing else, so
it starts in a tenth of a second and shares no connection, thread or model with the
test. It gets the settings (databases, caches, overrides) and the environment of the
test, and ends when the test process does, whatever ends that.
"""

import importlib
import multiprocessing
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from multiprocessing.synchronize import Barrier
from operator import attrgetter
from threading import BrokenBarrierError
from typing import Any, Self

import django
import psutil

from tests.processes.settings import settings_environment

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.processes.preload"])

#: In a child: its end of the pipe, and the barrier that it shares with its siblings.
_pipe: "Connection[Any, Any] | None" = None
_barrier: Barrier | None = None


class FunctionFailed(AssertionError):
    """A function in another process raised; the message holds its traceback."""


class FunctionProcess:
    """
    A function that runs in a process of its own.

    Made by ``start_in_process``, and closed with its block. The function may ``tell`` values,
    which ``receive`` returns in order; what it returns is the ``result``.
    """

    def __init__(self, process: ForkServerProcess, pipe: "Connection[Any, Any]") -> None:
        self.process = process
        self.pipe = pipe
        #: The process id.
        self.pid: Any = process.pid
        self._handle = psutil.Process(process.pid)

    @property
    def running(self) -> bool:
        """Whether the process lives; a paused one does."""
        return self.process.is_alive()

    def receive(self, timeout: float = 30) -> Any:
        """
        Return the next value that the function told.

        Raises:
            FunctionFailed: It raised, returned or was killed instead.
            TimeoutError: It told nothing in time.
        """
        return self._next("told", timeout)

    def result(self, timeout: float = 60) -> Any:
        """
        Return the function's result; values that it told and were not received are dropped.

        Raises:
            FunctionFailed: It raised, or its process was killed.
            TimeoutError: It still runs.
        """
        return self._next("returned", timeout)

    def kill(self) -> None:
        """End the process with SIGKILL and wait until it is gone."""
        self.process.kill()
        self.process.join()

    def pause(self) -> None:
        """Stop the process with SIGSTOP: it lives, but does nothing."""
        self._handle.suspend()

    def resume(self) -> None:
        """Let the process go on after ``pause``."""
        self._handle.resume()

    def close(self) -> None:
        """End the process if it still runs, and leave nothing of it."""
        if self.running:
            self.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _next(self, wanted: str, timeout: float) -> Any:
        deadline = time.monotonic() + timeout
        while True:
            if not self.pipe.poll(max(0, deadline - time.monotonic())):
                raise TimeoutError(f"Process {self.pid} {wanted} nothing for {timeout:g} s.")
            try:
                kind, value = self.pipe.recv()
            except (EOFError, ConnectionResetError):
                self.process.join()
                raise FunctionFailed(
                    f"Process {self.pid} ended with status {self.process.exitcode} "
                    f"and {wanted} nothing."
                ) from None
            if kind == wanted:
                return value
            if kind == "raised":
                raise FunctionFailed(f"In process {self.pid}:\n{value}")
            if kind == "returned":
                raise FunctionFailed(f"Process {self.pid} returned and {wanted} nothing.")


def start_in_process(
    function: Callable[..., Any],
    *args: Any,
    settings: Mapping[str, Any] | None = None,
    barrier: Barrier | None = None,
) -> FunctionProcess:
    """
    Run a function in another process; if it still runs when the block ends, it is killed.

    Args:
        function: Found there by its module and name.
        args: Pickled.
        settings: Django settings of that process on top of the test's own.
        barrier: It begins when all who share this are set up.
    """
    ours, theirs = _context.Pipe()
    name = (function.__module__, function.__qualname__)
    environment = {**os.environ, **settings_environment(settings)}
    process = _context.Process(
        target=_run, args=(environment, name, pickle.dumps(args), theirs, barrier), daemon=True
    )
    process.start()
    theirs.close()
    return FunctionProcess(process, ours)


def run_in_processes(
    function: Callable[..., Any], count: int, *args: Any, timeout: float = 110
) -> list[Any]:
    """
    Run one function in ``count`` processes at once and return their results.

    All begin together, when the last of them is set up; inside, ``meet`` brings
    them together again.

    Args:
        function: Found there by its module and name.
        args: Pickled; every process gets the same ones.
        timeout: Seconds for everything, start-up included.

    Returns:
        The result of each, in the order in which they ended.

    Raises:
        FunctionFailed: One raised, or was killed. The others are ended.
        TimeoutError: Not all returned in time. All are ended.
    """
    deadline = time.monotonic() + timeout
    barrier = _context.Barrier(count)
    results: list[Any] = []
    failures: list[FunctionFailed] = []

    def collect(ready: Iterable[object]) -> None:
        for pipe in [pipe for pipe in running if pipe in ready]:
            try:
                results.append(running.pop(pipe).result(max(0, deadline - time.monotonic())))
            except FunctionFailed as failure:
                failures.append(failure)

    with ExitStack() as stack:
        starts = (start_in_process(function, *args, barrier=barrier) for _ in range(count))
        running = {one.pipe: one for one in map(stack.enter_context, starts)}
        while running and not failures:
            ready = wait(list(running), max(0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"{len(running)} of {count} processes ran over {timeout:g} s.")
            collect(ready)
        if failures:
            # A failure breaks the barrier for the others. It is told before that, so
            # it has arrived by now even if theirs was read first.
            collect(wait(list(running), 0))
            raise min(failures, key=lambda failure: BrokenBarrierError.__name__ in str(failure))
    return results


# The code below runs in the other process.


def tell(value: Any) -> None:
    """Send a value to the test, which gets it from ``FunctionProcess.receive``."""
    assert _pipe is not None, "tell() is for functions that run in a process of their own."
    _pipe.send(("told", value))


def meet(timeout: float = 30) -> None:
    """Wait until all processes of ``run_in_processes`` are here; then all go on at once."""
    assert _barrier is not None, "meet() is for functions run by run_in_processes()."
    _barrier.wait(timeout)


def _run(
    environment: dict[str, str],
    name: tuple[str, str],
    args: bytes,
    pipe: "Connection[Any, Any]",
    barrier: Barrier | None,
) -> None:
    global _pipe, _barrier
    _pipe, _barrier = pipe, barrier
    threading.Thread(target=_end_with_tests, daemon=True).start()
    try:
        os.environ.clear()
        os.environ.update(environment)
        django.setup()
        function = attrgetter(name[1])(importlib.import_module(name[0]))
        if barrier is not None:
            barrier.wait(60)
        pipe.send(("returned", function(*pickle.loads(args))))
    except BaseException:
        # Told before the barrier breaks, so that the test sees the cause first.
        pipe.send(("raised", traceback.format_exc()))
        if barrier is not None:
            barrier.abort()


def _end_with_tests() -> None:
    parent: Any = multiprocessing.parent_process()
    wait([parent.sentinel])
    os._exit(1)
