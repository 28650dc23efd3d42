"""
The message that a worker runs.

``header`` has our fields of the message, ``call`` the task and arguments of a run, and
``wrappers`` the ordered wrappers of a run. ``copies`` re-sends a run's own message, ``deaths``
counts the processes that died in a task, and ``worker`` watches messages in the main process.
Other packages declare their header fields and add their wrappers here.
"""
