"""
Single-instance tasks in disorder, and what checks that they kept their promises.

``recorder`` lets two processes (``sender``) send every task twice at once to real workers
(``tasks``), while a ``nemesis`` kills their processes. What really happened is written to
files outside of the locks. ``checker`` says from those alone what went wrong.
``python -m tests.chaos`` does all of it.
"""
