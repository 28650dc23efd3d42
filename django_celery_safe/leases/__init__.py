"""
Leases: a holder writes its token, and a thread renews the lease until the holder is done.

Locks, records and messages use them. ``store`` is the interface of a place that keeps leases,
and ``lease_table`` keeps them in a database table; ``renewer`` renews them. ``claim`` is a
process's claim of a row of such a table, from its begin to its end, and ``current`` finds it.
"""
