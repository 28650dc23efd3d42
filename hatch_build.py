"""
Makes the README of the package's page on PyPI, where relative links lead nowhere.

With ``[project.urls] Source`` they lead to that repository; without it they become plain text.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

#: A link to a file of the repository: its text and its target.
RELATIVE = re.compile(r"\[([^\]]+)\]\((?![a-z]+:|#)([^)]+)\)")


class ReadmeHook(MetadataHookInterface):
    """Gives the package its README."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the README; hatchling calls it for each wheel and sdist."""
        source = metadata.get("urls", {}).get("Source", "")
        target = rf"[\1]({source.rstrip('/')}/blob/main/\2)" if source else r"\1"
        text = (Path(self.root) / "README.md").read_text("utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": RELATIVE.sub(target, text),
        }
