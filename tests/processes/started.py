"""The base of servers and workers that run while a block runs."""

from abc import ABC, abstractmethod
from typing import Self


class Started(ABC):
    """Starts with a block and is closed with it; where its start fails, at once."""

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
