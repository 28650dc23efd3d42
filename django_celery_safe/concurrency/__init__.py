"""
Tasks of which one run goes on at a time.

``decorator`` has :func:`single_instance`, ``options`` what it can be told,
``keys`` which calls are the same, ``guard`` what happens at the run, and
``copies`` how a message is sent again without being lost or multiplied.
"""

from .decorator import single_instance

__all__ = ["single_instance"]
