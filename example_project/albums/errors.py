"""Errors of albums. Each sentence names the picture or the album, and the reason."""

from __future__ import annotations


class AlbumError(Exception):
    """An album could not be made."""

    def __init__(self, name: str, reason: str) -> None:
        # Both go up as they are, so that the error survives pickling on its way out of a worker.
        super().__init__(name, reason)
        self.name = name
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


class UnreadablePicture(AlbumError):
    """A file is no picture, or not all of one."""


class EmptyAlbum(AlbumError):
    """All its pictures were taken out."""
