"""
Leases: a holder writes its token, and a thread renews the lease until the holder is done.

Locks, records and messages use them. ``store`` is the interface of a place that keeps leases,
and ``lease_table`` keeps them in a database table. ``renewer`` renews them, and ``reports`` says
what it could not do. ``held_row`` is a row of such a table from its claim to its end, ``claim``
what the code that works under it sees, and ``current`` finds it.
"""
