"""
Tasks of which one run goes on at a time.

``decorator`` has :func:`single_instance`, ``options`` what it can be told,
``keys`` which calls are the same, and ``header`` what of that travels in a message.
``guard`` has what happens at the run, ``run_lock`` the lock of the run and ``sent``
that of the message, ``endings`` what frees them when the run can't, and
``copies`` how a message is sent again without being lost or multiplied.
"""

from .decorator import single_instance

__all__ = ["single_instance"]
