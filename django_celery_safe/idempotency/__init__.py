"""
Doing a thing once, however often its task is delivered.

``flags`` has :class:`IdempotentMixin`, for work that belongs to one row.
"""

from .flags import IdempotentMixin

__all__ = ["IdempotentMixin"]
