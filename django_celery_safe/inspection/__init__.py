"""
Descriptions of locks, messages, records, runs and steps, shared by commands and admin.

``row`` defines a description and ``decision`` an operator's action. The commands print a row
as lines or JSON; the admin shows it in columns. ``findings`` are faults of a project, which
both ``manage.py check`` and ``doctor`` report.
"""
