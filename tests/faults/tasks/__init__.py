"""
Single-instance tasks, each sent twice at once, while children and whole workers are killed.

Two processes (``sender``) send every task (``work``) to real workers, and a ``nemesis`` kills
their processes. Each task writes what really happened to files outside of the locks.
"""
