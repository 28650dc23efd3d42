"""
Each thing that can be seen or found out, described once.

Locks, messages, records, runs and steps: ``row`` says what a description is, ``decision`` what
an operator may do. The commands print a row as lines or JSON, the admin shows it in columns.
``findings`` are faults of a project, said by ``manage.py check`` and by ``doctor`` alike.
"""
