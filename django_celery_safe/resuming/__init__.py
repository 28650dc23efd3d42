"""
Work that goes on after a kill, behind its last checkpoint.

``loop`` has :func:`resumable`, a loop whose chunks each commit together with their cursor.
``checkpoints`` has the cursors that a task sets itself, what a row keeps of them all, and how a
task ends at a checkpoint when its worker shuts down.
"""

from .checkpoints import checkpoint, resumed_at
from .loop import resumable

__all__ = ["checkpoint", "resumable", "resumed_at"]
