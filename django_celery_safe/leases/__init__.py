"""
Leases: a holder writes its token, and a thread renews the lease until the holder is done.

Locks, records and messages use them. ``lease`` has the clock of leases, the interface of a place
that keeps them, and a holder's view of one; ``lease_table`` keeps them in a database table, and
``renewer`` renews them. ``claim`` is a process's claim of a row of such a table, from its begin to
its end.
"""
