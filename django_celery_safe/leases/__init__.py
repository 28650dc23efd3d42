"""
Leases: a holder writes its token, and a thread renews the lease until the holder is done.

Locks, records and steps use them. ``store`` is the interface of a place that keeps leases,
``lease_table`` keeps them in a database table, and ``claim`` claims one row of such a table.
"""
