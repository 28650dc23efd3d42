"""
Django settings of the tests: no server, no file.

Other databases and caches come from fixtures while the tests run. Processes that
a test starts get the same ones from an environment variable, see ``overrides``.
"""

from importlib.util import find_spec
from typing import Any

from tests.overrides import read_settings

SECRET_KEY = "for tests only"
USE_TZ = True
TIME_ZONE = "UTC"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

INSTALLED_APPS = [
    "django.contrib.contenttypes",
    "django.contrib.auth",
    "django_celery_safe",
]
if find_spec("tests.app"):
    INSTALLED_APPS.append("tests.app")

DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
CACHES = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}

DJANGO_CELERY_SAFE: dict[str, Any] = {}

read_settings(into=globals())
