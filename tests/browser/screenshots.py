"""
Makes the screenshots of the docs: ``python -m tests.browser.screenshots``.

The story in the admin takes pictures of the pages that it visits, with real rows on them. This
runs it, and keeps the pictures that the docs show.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.example.site import EXAMPLE

PICTURES = EXAMPLE.parent / "docs" / "pictures"
#: Pictures of the story, and their names in the docs.
KEPT = {
    "admin-first-desktop-light": "admin-first-page",
    "admin-locks-desktop-light": "admin-locks",
    "admin-outbox-desktop-light": "admin-outbox",
    "admin-runs-desktop-light": "admin-runs",
}


def main() -> int:
    """Run the story, copy the pictures, and return the status of the test."""
    with tempfile.TemporaryDirectory() as folder:
        story = "tests/browser/test_stories.py::test_lock_of_a_killed_process_is_released"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", story],
            cwd=EXAMPLE.parent,
            env={**os.environ, "SAFE_TEST_SCREENSHOTS": folder},
            check=False,
        )
        for taken, name in KEPT.items() if done.returncode == 0 else ():
            shutil.copy(Path(folder) / f"{taken}.png", PICTURES / f"{name}.png")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
