"""The driver of MySQL and MariaDB that the tests use; workers import this with their settings."""

import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def load_driver() -> Any:
    """Return mysqlclient, or PyMySQL by its name; ``SAFE_TEST_MYSQL=pymysql`` insists on that."""
    if os.environ.get("SAFE_TEST_MYSQL") == "pymysql" or not find_spec("MySQLdb"):
        import_module("pymysql").install_as_MySQLdb()
    return import_module("MySQLdb")
