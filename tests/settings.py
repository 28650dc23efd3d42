"""
Django settings of the tests: no server, no file.

Other databases and caches come from fixtures while the tests run. Processes that
a test starts get the same ones from an environment variable, see ``overrides``.
"""

import faulthandler
import signal
import sys
from importlib.util import find_spec
from typing import Any

from tests.overrides import read_settings

# A process that does not go on shows where it is, see CeleryWorker.show_stacks.
if sys.stderr is not None:
    faulthandler.register(signal.SIGUSR2)

SECRET_KEY = "for tests only"
USE_TZ = True
TIME_ZONE = "UTC"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.contenttypes",
    "django.contrib.auth",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django_celery_safe",
]
if find_spec("tests.app"):
    INSTALLED_APPS.append("tests.app")

ROOT_URLCONF = "tests.urls"
STATIC_URL = "static/"
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]

DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
CACHES = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}

# Where no broker is chosen, none of the machine's own gets a message.
CELERY_BROKER_URL = "memory://"

# Django 6.0 defines tasks for the backend that is set when their module is imported.
TASKS = {"default": {"BACKEND": "django_celery_safe.backends.SafeCeleryBackend", "QUEUES": []}}

DJANGO_CELERY_SAFE: dict[str, Any] = {}

read_settings(into=globals())

if any(database["ENGINE"].endswith(".mysql") for database in DATABASES.values()):
    from tests.mysql_driver import load_driver

    load_driver()
