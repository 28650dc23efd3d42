"""
Doing work once, no matter how many times its task is delivered.

``flags`` has :class:`IdempotentMixin`, for work that belongs to one row. ``records`` has
:func:`idempotent`, for work without its own row, or too slow to keep a row locked.
"""

from .flags import IdempotentMixin
from .records import Idempotent, forget_record, idempotent

__all__ = ["Idempotent", "IdempotentMixin", "forget_record", "idempotent"]
