"""Checks of a release, and its files and notes."""

from typing import Any

from release import find_faults, find_notes

CHANGELOG = """# Changelog
## [1.1.0] - unreleased
- Soon.
## [1.0.1] - 2026-12-01
### Fixed
- A lock.
## [1.0.0] - 2026-11-01
"""
URLS = {"Source": "https://git.example.org/repository"}
PLACEHOLDERS = {"Source": "https://example.com/repository"}


def test_faults() -> None:
    """A release is refused with a sentence for each thing that is missing."""
    for version, urls, status, tags, said in [
        ("1.0.1", URLS, "", "v1.0.0", []),
        ("1.0.1", PLACEHOLDERS, "", "v1.0.1", ["there is a tag v1.0.1", "placeholder"]),
        ("1.0.0", URLS, "", "", ["says nothing"]),
        ("2.0.0", {}, "?? a", "v2.0.0", ["uncommitted", "tag", "no heading", "placeholder"]),
    ]:
        project: dict[str, Any] = {"version": version, "urls": urls}
        faults = find_faults(project, CHANGELOG, status, tags)
        assert all(part in fault for part, fault in zip(said, faults, strict=True))


def test_notes() -> None:
    """The notes are what the changelog says of that version, and nothing of others."""
    assert find_notes(CHANGELOG, "1.0.1") == "### Fixed\n- A lock.\n"
