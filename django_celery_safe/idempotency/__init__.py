"""
Doing work once, no matter how many times its task is delivered.

``flags`` has :class:`IdempotentMixin`, for work that belongs to one row. ``idempotent_work``
has :func:`idempotent`, for work without its own row, or too slow to keep a row locked;
``records`` has one attempt at such work, and the table of its records.
"""

from .flags import IdempotentMixin
from .idempotent_work import Idempotent, idempotent
from .records import forget_record

__all__ = ["Idempotent", "IdempotentMixin", "forget_record", "idempotent"]
