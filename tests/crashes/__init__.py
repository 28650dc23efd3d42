"""
Transactions that send tasks while everything around them is killed, and what checks them.

``recorder`` lets processes (``sender``, ``relaying``) send through the outbox while they are
killed, at random (``nemesis``) and at named ``points``, and their broker is stopped. Then a
real worker runs the ``tasks``. ``checker`` says what went wrong, from what the worker saw and
from the rows of the transactions that committed. ``broken`` holds senders, relays and retries
with one fault each. ``python -m tests.crashes`` does all of it.
"""
