"""What the renewing threads report: another thread emits it, because a log handler may be slow."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ..emitting import emit_in_background
from ..events import LEASES_NOT_RENEWED, LEASES_NOT_RENEWED_BY_A_BUG
from ..exceptions import LockBackendError
from ..texts import get_logger
from .lease import Lease

logger = get_logger(__name__)


def report_owner(lease: Lease[Any], end: str) -> None:
    """Warn that a lease is not renewed any more; ``end`` says which owner has ended."""
    text = "Stopped renewing %r, whose lease ends in %.3g s: %s."
    emit_in_background(logger.warning, text, lease.name, lease.remaining, end)


def report_lost(lease: Lease[Any]) -> None:
    """Report a lease that the store says is not ours, and who holds it now."""
    try:
        now_held = lease.store.peek(lease.name)
    except Exception:  # noqa: BLE001 - only to name the new holder
        now_held = None
    emit_in_background(lease.on_lost, lease, now_held)


def report_failed(
    sender: type, names: Sequence[str], reason: str, error: Exception | None = None
) -> None:
    """Report leases that could not be renewed, because of an ``error`` or of a silent store."""
    foreseen = error is None or isinstance(error, LockBackendError)
    event = LEASES_NOT_RENEWED if foreseen else LEASES_NOT_RENEWED_BY_A_BUG
    emit = partial(event.emit, sender, exc_info=None if foreseen else error)
    emit_in_background(partial(emit, name=names[0], reason=reason, leases=len(names)))
