"""
Tasks that have one run at a time.

A send:
    ``sending.task`` → ``keys`` (which calls are the same) → ``delivery.header`` (what travels)
    → ``sending.deduplicate`` → ``sent`` (takes the message's lock)

A run:
    ``guard`` → ``keys`` → ``locks`` (takes the run's lock)
    → ``sent`` (renews the message's lock too) → the function → ``locks`` (frees the run's lock)
    → ``delivery.copies`` (marks the end for a waiting copy) → ``sent`` (frees the message's lock)

A run that finds the lock held does what ``options`` say, or is re-sent by
``delivery.copies``. If something else ends a message or a run, ``message_endings`` frees
their locks.
"""

from .guard import single_instance

__all__ = ["single_instance"]
