"""
Transactions that send tasks through the outbox while senders, relays and the broker are killed.

Processes (``sender``, ``relaying``) are killed at random (``nemesis``) and at named ``points``,
and their broker is stopped. Then a real worker runs the tasks (``work``). The oracle reads what
the worker saw, and the rows of the transactions that committed. ``broken`` holds relays and a
retry with one fault each.
"""
