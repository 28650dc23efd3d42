"""The base of all servers: a folder, a port, start, stop and pause."""

import os
import shutil
import signal
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

from tests.processes.kept import KeptProcess
from tests.processes.started import Started
from tests.processes.waiting import port_is_free, reserve_port, wait_for
from tests.servers.programs import find_programs_folder, identity, make_folder


class Server(Started):
    """
    A private server of 127.0.0.1, used as a context manager or started and closed.

    ``host``, ``port`` and ``folder`` stay the same over stops and starts.

    Raises:
        ProgramNotFound: The program is not there.
    """

    #: Its name in messages.
    name: ClassVar[str]
    program: ClassVar[str]
    companions: ClassVar[tuple[str, ...]] = ()
    #: Whether the program refuses to run as root.
    refuses_root: ClassVar[bool] = False
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    host = "127.0.0.1"
    #: Seconds until it must answer.
    start_timeout: ClassVar[float] = 90

    def __init__(self) -> None:
        self.programs = find_programs_folder(self.program, *self.companions)
        self.identity: dict[str, Any] = identity() if self.refuses_root else {}
        self.folder = make_folder(f"safe-{self.name}-", self.identity)
        #: Its hold on its ports, and programs beside it: they end when it is closed.
        self._owned = ExitStack()
        self.port = self._reserve_port()
        self._prepared = False

    @abstractmethod
    def command(self) -> list[str | Path]:
        """Return the command line."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether it answers; may raise while it does not."""

    def prepare(self) -> None:
        """Do what must be done once, before the first start."""

    def environment(self) -> dict[str, str]:
        """Return the whole environment of the program."""
        path = os.environ.get("PATH", os.defpath)
        return {"PATH": path, "HOME": str(self.folder), "LC_ALL": "C", "TZ": "UTC"}

    def start(self) -> None:
        """
        Start it, if it does not run, and wait until it answers.

        Raises:
            RuntimeError: It ended by itself; the message holds what it printed.
            TimeoutError: It did not answer in time.
        """
        if self.running:
            return
        if not self._prepared:
            self.prepare()
            self._prepared = True
        wait_for(lambda: port_is_free(self.port), message=f"port {self.port} is in use")
        self._process = self.keep(self.command())
        self._process.start()
        try:
            wait_for(self._answers, self.start_timeout)
        except TimeoutError:
            raise TimeoutError(f"{self.name} does not answer:\n{self.log}") from None

    def stop(self) -> None:
        """End it in order; its folder and its port stay for the next start."""
        if self._process is not None:
            self._process.stop()

    def kill(self) -> None:
        """End it with SIGKILL; its folder and its port stay for the next start."""
        if self._process is not None:
            self._process.kill()

    def restart(self) -> None:
        """Stop and start: a cache loses its memory, a database keeps its data."""
        self.stop()
        self.start()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Have it refuse connections during the block."""
        self.stop()
        try:
            yield
        finally:
            self.start()

    @contextmanager
    def silence(self) -> Iterator[None]:
        """Have it silent during the block."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def close(self) -> None:
        """End it and remove its folder."""
        try:
            self.stop()
        finally:
            self._owned.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def keep(self, command: list[str | Path]) -> KeptProcess:
        """Return a command of this server as a process that can't outlive the tests."""
        return KeptProcess(
            command,
            folder=self.folder,
            env=self.environment(),
            identity=self.identity,
            stop_signal=self.stop_signal,
            owned_folder=self.folder,
        )

    def _reserve_port(self, distance: int = 0) -> int:
        port, reservation = reserve_port(distance)
        self._owned.enter_context(reservation)
        return port

    def _answers(self) -> bool:
        if not self.running:
            raise RuntimeError(f"{self.name} ended instead of getting ready:\n{self.log}")
        try:
            return self.is_ready()
        except Exception:
            return False
