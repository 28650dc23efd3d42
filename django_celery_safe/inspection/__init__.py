"""
Descriptions of locks, messages, records, runs and steps, shared by commands and admin.

``row`` defines a description and ``decision`` an operator's action. The commands print a row
as lines or JSON; the admin shows it in columns. ``lock_store`` asks the store of the locks for
``manage.py check`` and for ``doctor``.
"""
