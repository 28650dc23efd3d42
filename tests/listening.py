"""Receivers of signals and handlers of logs, for the length of a block."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def receiving(signal: Any, receive: Callable[..., Any]) -> Iterator[None]:
    """Connect a receiver to a signal of Django or Celery."""
    signal.connect(receive, weak=False)
    try:
        yield
    finally:
        signal.disconnect(receive)


@contextmanager
def handling(handler: logging.Handler, name: str = "django_celery_safe") -> Iterator[None]:
    """Add a handler for all levels."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
