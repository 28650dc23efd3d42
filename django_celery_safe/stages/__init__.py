"""
Tasks in stages: tasks of one priority run together, lower priorities after higher ones.

``plan`` checks what can be run. ``engine`` moves a run from stage to stage, and has what a step
adds to the message that carries it: see ``sending.carried_run``.
"""

from __future__ import annotations

from .engine import start
from .plan import Entry, Plan, make_plan
from .status import Progress, StageProgress, Status
from .step_tasks import step

__all__ = ["Entry", "Plan", "Progress", "StageProgress", "Status", "make_plan", "start", "step"]
