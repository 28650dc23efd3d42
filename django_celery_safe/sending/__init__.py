"""
Sending tasks when their transaction is committed.

``task`` has :class:`SafeTask`. ``commit`` holds messages back until the commit,
``outbox`` writes those that have rows, and ``sender`` sends them. ``capture`` makes complete
messages without publishing them, and ``arguments`` refuses values that can't travel in a message.
``carried`` runs carried tasks: ``carried_run`` claims their messages, and ends them.
"""

from .commit import send_on_commit
from .task import SafeTask, SafeTaskMixin

__all__ = ["SafeTask", "SafeTaskMixin", "send_on_commit"]
