"""
Runs of stages while everything around them is killed, and what checks them.

``recorder`` starts many runs (``starter``) on real workers (``tasks``), beside a relay.
Messages arrive twice (``twice``), children and whole workers are killed, and the broker is
restarted (``nemesis``, ``brokers``); then one sweep repairs what that has left. ``checker``
says from what witnesses outside of the package's tables noted whether each stage was begun
once and each step succeeded once. ``python -m tests.runs`` does all of it.
"""
