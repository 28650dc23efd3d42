"""
Locks whose holders stand still for longer than their leases, in stores that lose their memory.

Processes (``holders``) use locks while a ``nemesis`` stops them and restarts the server, and
write down each operation (``records``). The oracle says from the records alone whether the
locks kept their promises.
"""
