"""
Tasks in stages: those of one priority together, lower priorities after the higher ones.

``plan`` says what can be run, ``engine`` what happens to a run, ``running`` what a worker
does with one step, ``repairs`` what a sweep does with what a crash has left.
"""

from __future__ import annotations

from .engine import start
from .plan import Entry, Plan, make_plan
from .progress import Progress, StageProgress
from .status import Status
from .step_tasks import step

__all__ = [
    "Entry",
    "Plan",
    "Progress",
    "StageProgress",
    "Status",
    "make_plan",
    "start",
    "step",
]
