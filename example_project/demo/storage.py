"""The place for pictures, which can let the writing of one wait."""

from pathlib import Path
from time import sleep
from typing import IO, Any

from django.core.files.storage import FileSystemStorage


class Storage(FileSystemStorage):
    """Files like the site's, but a file is not written while its hold is there."""

    def hold(self, name: str) -> Path:
        """Let the writing of a file wait until the returned path is removed."""
        hold = Path(self.path(f"{name}.hold"))
        hold.parent.mkdir(parents=True, exist_ok=True)
        hold.touch()
        return hold

    def _save(self, name: str, content: IO[Any]) -> str:
        while Path(self.path(f"{name}.hold")).exists():
            sleep(0.02)
        return str(super()._save(name, content))  # type: ignore[misc] # not in the stubs
