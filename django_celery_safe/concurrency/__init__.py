"""
Tasks of which one run goes on at a time.

A send:
    ``sending.task`` → ``keys`` (which calls are the same) → ``delivery.header`` (what travels)
    → ``sending.deduplicate`` → ``sent`` (takes the message's lock)

A run:
    ``decorator`` → ``guard`` → ``keys`` → ``locks`` (takes the run's lock)
    → ``sent`` (renews the message's along) → the function → ``locks`` (frees the run's)
    → ``delivery.copies`` (marks the end for a copy that waits) → ``sent`` (frees the message's)

A run that meets the lock does what ``options`` say, or sends itself again by
``delivery.copies``; what ends a message or a run from outside frees their locks in
``message_endings``.
"""

from .decorator import single_instance

__all__ = ["single_instance"]
