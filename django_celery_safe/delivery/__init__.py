"""
The message that a worker runs.

``header`` has this package's fields of the message, ``call`` the task and arguments of the
run, ``wrappers`` the ordered wrappers of a run, ``copies`` re-sends a run's own message, and
``worker`` watches messages in the main process. Higher rooms declare their header fields and
add their wrappers here.
"""
