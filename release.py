"""
Prepares a release: ``python release.py`` finds what is missing, builds, and writes the notes.

It publishes nothing. CONTRIBUTING.md says what follows.
"""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent
#: Where the wheel, the sdist and the notes are put.
DIST = ROOT / "dist"
#: The beginning of the addresses in pyproject.toml until the repository has one.
PLACEHOLDER = "https://example.com/"


def main() -> int:
    """Prepare the release of the version in pyproject.toml; return 1 if something is missing."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version, changelog = project["version"], (ROOT / "CHANGELOG.md").read_text("utf-8")
    missing = find_faults(project, changelog, git("status", "--porcelain"), git("tag", "--list"))
    for fault in missing:
        print(f"release.py: {fault}", file=sys.stderr)
    if missing:
        return 1
    shutil.rmtree(DIST, ignore_errors=True)
    run("hatchling", "build", "-d", str(DIST))
    run("twine", "check", "--strict", *map(str, DIST.iterdir()))
    (DIST / "notes.md").write_text(find_notes(changelog, version), "utf-8")
    print(f"dist/ has {version} and its notes. Then: git tag -s v{version} && git push --tags")
    return 0


def find_faults(project: dict[str, Any], changelog: str, status: str, tags: str) -> list[str]:
    """
    Return what keeps the version from being released.

    Args:
        status: The output of git about uncommitted changes.
        tags: The tags that are there, one a line.
    """
    version, faults = project["version"], []
    if status:
        faults.append("there are uncommitted changes")
    if f"v{version}" in tags.split():
        faults.append(f"there is a tag v{version}: raise the version in pyproject.toml")
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changelog, re.M):
        faults.append(f"CHANGELOG.md has no heading `## [{version}] - DATE`")
    elif not find_notes(changelog, version).strip():
        faults.append(f"CHANGELOG.md says nothing of {version}")
    if PLACEHOLDER in project.get("urls", {}).get("Source", PLACEHOLDER):
        faults.append("pyproject.toml has no Source in [project.urls], or only the placeholder")
    return faults


def find_notes(changelog: str, version: str) -> str:
    """Return what the changelog says of a version; empty: nothing."""
    found = re.search(rf"^## \[{re.escape(version)}\].*?\n(.*?)(?=^## |\Z)", changelog, re.M | re.S)
    return found[1].strip() + "\n" if found else ""


def git(*words: str) -> str:
    """Return what git prints."""
    return subprocess.check_output(["git", *words], cwd=ROOT, text=True).strip()


def run(module: str, *words: str) -> None:
    """Run a Python program of this environment."""
    subprocess.run([sys.executable, "-m", module, *words], cwd=ROOT, check=True)


if __name__ == "__main__":
    sys.exit(main())
