"""
What is found out about a project: its figures, and the behaviour of its lock store.

``overview`` has the figures of the admin's first page, of the commands and of metrics;
``lock_store`` asks the store of the locks for ``manage.py check`` and for ``doctor``.
"""
