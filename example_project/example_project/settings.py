"""
Settings of the example site. As they stand they need no server at all.

The environment switches to real ones, each by itself: ``REDIS_URL`` (the cache, and the locks
beside it), ``CELERY_BROKER_URL``, and ``EMAIL_HOST`` with ``EMAIL_PORT``. ``EXAMPLE_DATA_DIR``
moves the files.
"""

import os
from pathlib import Path
from typing import Any

BASE_DIR = Path(__file__).resolve().parent.parent

#: Where the SQLite files, the pictures and the broker's folders live.
DATA_DIR = Path(os.environ.get("EXAMPLE_DATA_DIR", BASE_DIR / "var")).resolve()
DATA_DIR.mkdir(parents=True, exist_ok=True)

# For your own machine only: a site that others can reach needs a secret key and no DEBUG.
DEBUG = True
SECRET_KEY = "insecure-and-public"

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django_celery_safe",
    "feeds",
    "accounts",
    "orders",
    "digests",
    "albums",
]

MIDDLEWARE = [
    "example_project.csp.content_security_policy",
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

ROOT_URLCONF = "example_project.urls"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
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

STATIC_URL = "static/"
STATICFILES_DIRS = [BASE_DIR / "static"]
MEDIA_URL = "media/"
MEDIA_ROOT = DATA_DIR / "media"
STORAGES: dict[str, Any] = {
    "default": {
        "BACKEND": "django.core.files.storage.FileSystemStorage",
        # A step that runs again writes the same file again, not another one beside it.
        "OPTIONS": {"allow_overwrite": True},
    },
    "staticfiles": {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"},
}

USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
AUTH_USER_MODEL = "accounts.User"

# -- The database, and the locks beside it -------------------------------------------------------


def sqlite(name: str) -> dict[str, Any]:
    """Return the entry of ``DATABASES`` for a SQLite file that several processes share."""
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": DATA_DIR / name,
        "OPTIONS": {
            # A transaction takes the write lock when it begins, so it never has
            # to give up in the middle with "database is locked".
            "transaction_mode": "IMMEDIATE",
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
            "timeout": 20,  # s
        },
    }


# Locks need a connection of their own: a lock taken inside a transaction of the data would be
# invisible to others until its commit. With SQLite that means a second file.
DATABASES = {"default": sqlite("site.sqlite3"), "locks": sqlite("locks.sqlite3")}
DJANGO_CELERY_SAFE: dict[str, Any] = {"LOCK_DATABASE": "locks"}

if "REDIS_URL" in os.environ:
    CACHES = {
        "default": {
            "BACKEND": "django_redis.cache.RedisCache",
            "LOCATION": os.environ["REDIS_URL"],
        },
        "locks": {
            "BACKEND": "django_redis.cache.RedisCache",
            # Its own database number, because cache.clear() empties a whole number.
            "LOCATION": f"{os.environ['REDIS_URL']}?db=15",
            # A server that stays silent is an error after that time, s.
            "OPTIONS": {"SOCKET_CONNECT_TIMEOUT": 2, "SOCKET_TIMEOUT": 2},
        },
    }
    DJANGO_CELERY_SAFE = {"LOCK_CACHE": "locks"}

# -- Celery --------------------------------------------------------------------------------------
CELERY_TASK_IGNORE_RESULT = True
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True

if "CELERY_BROKER_URL" in os.environ:
    CELERY_BROKER_URL = os.environ["CELERY_BROKER_URL"]
    # For Redis: a server that stays silent is an error after that time, s.
    CELERY_BROKER_TRANSPORT_OPTIONS = {"socket_timeout": 10, "socket_connect_timeout": 5}
else:
    CELERY_BROKER_URL = "filesystem://"
    CELERY_BROKER_TRANSPORT = "example_project.broker:Transport"
    CELERY_BROKER_TRANSPORT_OPTIONS = {
        # The same folder in and out: sites and workers on this machine share it.
        "data_folder_in": str(DATA_DIR / "broker" / "messages"),
        "data_folder_out": str(DATA_DIR / "broker" / "messages"),
        "control_folder": str(DATA_DIR / "broker" / "control"),
        "polling_interval": 0.05,  # s
    }

# -- E-mail --------------------------------------------------------------------------------------
DEFAULT_FROM_EMAIL = "Example site <hello@example.com>"
EMAIL_BACKEND = "django.core.mail.backends.console.EmailBackend"
if "EMAIL_HOST" in os.environ:
    EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
    EMAIL_HOST = os.environ["EMAIL_HOST"]
    EMAIL_PORT = int(os.environ.get("EMAIL_PORT", "25"))
    #: Longest wait for the mail server, s; the welcome e-mail is sent under a row lock.
    EMAIL_TIMEOUT = 10
#: Pause before an e-mail is tried again, s.
MAIL_RETRY_DELAY = 60
