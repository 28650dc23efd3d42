"""Settings of a project with one neighbour, which the environment names."""

import json
import os
from typing import Any

import django

from tests.company.neighbours import NEIGHBOURS

#: Written by ``matrix``: neighbour, database, redis (the beginning of its URLs) and folder.
SCENE: dict[str, Any] = json.loads(os.environ["SAFE_COMPANY"])
HERE = NEIGHBOURS[SCENE["neighbour"]]

SECRET_KEY = "for tests only"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
ROOT_URLCONF = "tests.company.project"
DATABASES = {"default": {**SCENE["database"], **HERE.database}}
CACHES = {
    "default": {
        "BACKEND": "django.core.cache.backends.redis.RedisCache",
        "LOCATION": SCENE["redis"] + "/0",
    }
}
INSTALLED_APPS = [
    "django.contrib.contenttypes",
    "django.contrib.auth",
    "django_celery_safe",
    "tests.company.project.CompanyConfig",
    *HERE.apps,
]
CELERY_BROKER_URL = SCENE["redis"] + "/1"
CELERY_RESULT_BACKEND = SCENE["redis"] + "/2"
# A row that does not end is sent again while the flows still wait for its end.
DJANGO_CELERY_SAFE = {"LOCK_TIMEOUT": 4, "OUTBOX_RESEND_AFTER": 5}
if django.VERSION >= (6,):
    TASKS = {"default": {"BACKEND": "django_celery_safe.backends.SafeCeleryBackend"}}

globals().update(HERE.settings)
HERE.switch_on()
