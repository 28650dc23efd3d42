"""
Recorded histories of locks, and what checks them.

``recorder`` lets processes (``holders``) use locks while a ``nemesis`` stops them and
restarts the server, and reads what they wrote down (``records``). ``checker`` says,
from the records alone, whether the locks kept their promises. ``broken`` holds stores
and locks that do not. ``python -m tests.histories`` does all of it.
"""
