"""Errors that stop the demo before its table is complete."""

from __future__ import annotations


class DemoError(Exception):
    """Something did not happen, or not in time. The sentence says what."""
