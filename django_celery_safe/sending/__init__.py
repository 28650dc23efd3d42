"""
Sending tasks when the transaction they belong to is committed.

``task`` has :class:`SafeTask`, ``commit`` what is held back until the commit,
``departure`` what all sends of a commit share, ``capture`` how a message is made
complete without being published, ``eager`` the same for tasks that run eagerly, and
``arguments`` what can't travel in a message.
"""

from .commit import send_on_commit
from .task import SafeTask, SafeTaskMixin

__all__ = ["SafeTask", "SafeTaskMixin", "send_on_commit"]
