"""
Sending tasks when their transaction is committed.

``task`` has :class:`SafeTask`. ``capture`` makes complete messages without publishing them,
``commit`` holds them back until the commit, ``outbox`` writes those that have rows, and
``publisher`` publishes them. ``canvas`` sends chains, groups and chords. ``carried_run`` runs
carried tasks.
"""

from .canvas import send_on_commit
from .task import SafeTask, SafeTaskMixin

__all__ = ["SafeTask", "SafeTaskMixin", "send_on_commit"]
