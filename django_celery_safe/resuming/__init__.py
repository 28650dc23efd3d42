"""
Work that goes on after a kill, behind its last checkpoint.

``loop`` has :func:`resumable`, a loop whose chunks each commit together with their cursor;
``walks`` the querysets and lists that it walks, and ``chunks`` the transaction of one chunk.
``checkpoints`` has the cursors that a task sets itself, and ``cursor`` what a row keeps of them
all. ``handing_over`` ends a task at a checkpoint when its worker shuts down.
"""

from .checkpoints import checkpoint, resumed_at
from .loop import resumable

__all__ = ["checkpoint", "resumable", "resumed_at"]
