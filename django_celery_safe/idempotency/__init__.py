"""
Doing a thing once, however often its task is delivered.

``flags`` has :class:`IdempotentMixin`, for work that belongs to one row. ``decorator``
has :func:`idempotent`, for work without a row of its own or too slow to lock one;
``claim`` is one attempt at it and ``records`` its table.
"""

from .claim import Claim, current_claim
from .flags import IdempotentMixin
from .idempotent_work import Idempotent, idempotent

__all__ = ["Claim", "Idempotent", "IdempotentMixin", "current_claim", "idempotent"]
