"""
Makes the screenshots of the docs: ``python -m tests.browser.screenshots``.

The browser tests take pictures of every page that they visit, with real rows on it. This runs
those tests, and keeps the pictures that the docs show.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.example.site import EXAMPLE

PICTURES = EXAMPLE.parent / "docs" / "pictures"
#: Tests that visit the pages, by pytest's ``-k``.
TESTS = "the_first_page or running_import_is_seen or messages_are_seen or runs_are_seen"
#: Pictures of the tests, and their names in the docs.
KEPT = {
    "admin-first-desktop-light": "admin-first-page",
    "admin-locks-desktop-light": "admin-locks",
    "admin-outbox-desktop-light": "admin-outbox",
    "admin-runs-desktop-light": "admin-runs",
}


def main() -> int:
    """Run the tests, copy the pictures, and return the status of the tests."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "long",
            "tests/browser/test_admin.py",
        ]
        done = subprocess.run(
            [*command, "-k", TESTS],
            cwd=EXAMPLE.parent,
            env={**os.environ, "SAFE_TEST_SCREENSHOTS": folder},
            check=False,
        )
        for taken, name in KEPT.items() if done.returncode == 0 else ():
            shutil.copy(Path(folder) / f"{taken}.png", PICTURES / f"{name}.png")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
