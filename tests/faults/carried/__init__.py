"""
Tasks that are carried until they are done, while everything else forgets them.

A process commits transactions that send (``sender``) to real workers (``work``), beside a
relay. A ``nemesis`` kills and pauses processes, and lets the broker lose its messages. The
oracle reads from witnesses outside of the package, and from a ``ledger`` that the database
itself fills, whether each task was brought to its end, once, and by whom.
"""
