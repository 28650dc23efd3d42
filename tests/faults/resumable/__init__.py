"""
Resumable tasks that walk a table while their children are killed and their workers shut down.

Each task writes to each row of its part once, and deletes rows behind its place. The oracle reads
from the rows themselves whether some row was written to twice or never.
"""
