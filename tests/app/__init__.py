"""A small app for the tests: rows with flags, and a Celery app with a zoo of tasks."""
