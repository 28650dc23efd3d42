"""
E-mails that are to be sent once, through a server that misbehaves, and what checks them.

``recorder`` sends every user's task several times to real workers (``tasks``), whose
children are killed, while ``server`` refuses, hangs and drops connections by a ``plan``.
``checker`` says from what the server, the tasks and the killer noted whether ``do_once``
kept its promise, and finds the cause of each double. ``python -m tests.mails`` does all of it.
"""
