"""
Frees the locks of runs that can't free them themselves, and of messages that never run.

A killed process frees nothing, and a revoked or unknown message never runs. ``delivery.endings``
reports most of these cases. The locks of a message and of its run are freed when the process of
the run has really ended.
"""

from __future__ import annotations

import os
import time
from functools import partial

from ..delivery.copies import mark_end
from ..delivery.endings import DEATHS, Outcome, in_background, is_dead_soon
from ..leases.holder import place_names
from ..locks import HeldLock
from ..locks.stores import get_store
from .guard import find_guarded_as_asked, get_lock_name
from .options import Guarded
from .sent import SentLock, find_sent


def settle(outcome: Outcome) -> None:
    """Free the locks of a message that has ended, or whose run has, as far as nobody else can."""
    sent, task, is_death = find_sent(outcome.request), outcome.task, outcome.kind in DEATHS
    if outcome.kind == "over":
        # Its run ended outside its guard, for example in a hook.
        if sent is not None and not outcome.comes_again:
            sent.end_run(task, None)
        return
    guarded = None if task is None else find_guarded_as_asked(task, outcome.header)
    if is_death and guarded is not None and outcome.pid not in (None, os.getpid()):
        free = partial(_free_after_death, outcome, guarded, sent)
    elif not is_death and sent is not None:
        free = partial(_free_unless_running, outcome, guarded, sent)
    else:
        return
    in_background(free, "A dead run's locks could not be freed and end by their leases.")


def _free_unless_running(outcome: Outcome, guarded: Guarded | None, sent: SentLock) -> None:
    # The message may have been delivered twice and refused the second time, while the first
    # delivery still runs.
    if guarded is None or _find_run(outcome, guarded) is None:
        sent.move(0)


def _free_after_death(outcome: Outcome, guarded: Guarded, sent: SentLock | None) -> None:
    task, request, store = outcome.task, outcome.request, get_store()
    held = _find_run(outcome, guarded)
    if held is not None and not outcome.ended(held.holder):
        held = None
    if held is None and sent is None:
        return

    # A carried message comes again by its row.
    comes_again = outcome.comes_again or (outcome.kind == "lost" and "attempt" in outcome.header)
    # As a run does at its own end; first, because its lease may expire right after its death.
    ended, done = not comes_again and outcome.when is None, False
    if held is not None and ended and task.acks_late:
        done = mark_end(task, request, store, time.time() - held.holder.since)
    if not is_dead_soon(outcome.pid or 0):
        return  # its locks end by their leases
    if held is not None:
        store.release(held.name, held.token, held.remaining)
    # If the message was delivered twice, the other delivery keeps its lock.
    if sent is not None and not comes_again and (outcome.is_only or done):
        sent.move(0.0 if ended else sent.lease(outcome.when, request.expires))


def _find_run(outcome: Outcome, guarded: Guarded) -> HeldLock | None:
    """Return the lock that a run of this message holds; None: no run holds it."""
    name = get_lock_name(outcome.task, outcome.request, guarded, outcome.header, None, {})
    for place in place_names(name, guarded.options.limit):
        held = get_store().peek(place)
        if held is not None and held.holder.task_id == outcome.request.id:
            return held._replace(name=place)
    return None
