"""Checks of a release, and its files and notes."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from release import find_faults, find_notes
from tests.docs.pages import ROOT

CHANGELOG = """# Changelog

## [1.1.0] - unreleased

- Soon.

## [1.0.1] - 2026-12-01

### Fixed

- A lock.

## [1.0.0] - 2026-11-01
"""
URLS = {"Source": "https://example.com/repository"}


@pytest.mark.parametrize(
    ("version", "urls", "status", "tags", "said"),
    [
        ("1.0.1", URLS, "", "v1.0.0", []),
        ("1.0.1", URLS, " M README.md", "v1.0.0", ["uncommitted"]),
        ("1.0.1", URLS, "", "v1.0.0\nv1.0.1", ["there is a tag v1.0.1"]),
        ("1.0.1", {}, "", "", ["no Source"]),
        ("1.1.0", URLS, "", "", ["no heading"]),
        ("1.0.0", URLS, "", "", ["says nothing"]),
        ("2.0.0", {}, "?? a", "v2.0.0", ["uncommitted", "tag", "no heading", "no Source"]),
    ],
)
def test_faults(
    version: str, urls: dict[str, str], status: str, tags: str, said: list[str]
) -> None:
    """A release is refused with a sentence for each thing that is missing."""
    project: dict[str, Any] = {"version": version, "urls": urls}
    faults = find_faults(project, CHANGELOG, status, tags)
    assert len(faults) == len(said)
    assert all(part in fault for part, fault in zip(said, faults, strict=True))


def test_notes() -> None:
    """The notes are what the changelog says of that version, and nothing of others."""
    assert find_notes(CHANGELOG, "1.0.1") == "### Fixed\n\n- A lock.\n"


@pytest.mark.parametrize(
    "name",
    [
        ".pre-commit-config.yaml",
        ".github/ISSUE_TEMPLATE/bug.md",
        ".github/workflows/landing.yml",
        ".github/workflows/nightly.yml",
    ],
)
def test_forms_can_be_read(name: str) -> None:
    """The hooks, the workflows, and the head of a form, are YAML."""
    text = (ROOT / Path(name)).read_text()
    assert yaml.safe_load(text.split("---")[1] if name.endswith(".md") else text)
