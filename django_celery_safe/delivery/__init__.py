"""
The message that a worker runs.

``header`` has our fields of the message, and ``call`` the task and arguments of a run, with the
ordered wrappers around it. ``copies`` re-sends a run's own message, and ``endings`` translates how
Celery says that a message or a run has ended, with threads of the main process for what follows.
"""
