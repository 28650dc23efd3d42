"""The base of servers and workers that run while a block runs."""

from abc import ABC, abstractmethod
from typing import Self

from tests.processes.kept import KeptProcess


class Started(ABC):
    """A program that starts with a block and is closed with it; where its start fails, at once."""

    name: str
    _process: KeptProcess | None = None

    @abstractmethod
    def start(self) -> None:
        """Start it, and wait until it is ready."""

    @abstractmethod
    def close(self) -> None:
        """End what runs of it, and remove what it left."""

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def process(self) -> KeptProcess:
        """The program, whose children may do the work."""
        assert self._process is not None, f"{self.name} does not run."
        return self._process

    @property
    def pid(self) -> int:
        """The program's process id."""
        return self.process.pid

    @property
    def running(self) -> bool:
        """Whether the program lives."""
        return self._process is not None and self._process.running

    @property
    def log(self) -> str:
        """Everything that the program has printed so far, its end included."""
        return "" if self._process is None else self._process.log

    def pause(self) -> None:
        """Make it silent, with its children: it accepts connections and answers nothing."""
        self.process.pause()

    def resume(self) -> None:
        """Let it go on after ``pause``."""
        self.process.resume()
