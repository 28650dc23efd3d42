"""
Imports of the server behind ``functions`` before it forks, to save each fork the time.

Only libraries: Django is set up, and our own modules are imported, after the fork.
"""

import gc
from importlib import import_module

LIBRARIES = (
    "celery.app.task",
    "celery.app.trace",
    "celery.contrib.django.task",
    "celery.schedules",
    "django.contrib.auth.hashers",
    "django.contrib.auth.password_validation",
    "django.core.cache.backends.locmem",
    "django.core.management",
    "django.db.backends.sqlite3.base",
    "django.db.models",
    "django.test",
    "kombu.transport.redis",
    "psycopg",
    "pytest",
    "redis",
)

for library in LIBRARIES:
    import_module(library)

gc.freeze()
