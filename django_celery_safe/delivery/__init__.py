"""
The message that a worker runs.

``header`` has our fields of the message, ``call`` the task and arguments of a run, and
``wrappers`` the ordered wrappers of a run. ``copies`` re-sends a run's own message, ``deaths``
limits the processes that may die in a task, and ``endings`` translates how Celery says that a
message or a run has ended; ``worker`` has threads of the main process for what follows.
"""
