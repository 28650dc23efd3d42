"""SQLite that says to be another server."""

from django.db.backends.sqlite3 import base


class DatabaseWrapper(base.DatabaseWrapper):
    """Its vendor is one that is refused."""

    vendor = "oracle"
