"""
Settings of the example site. As they stand they need no server at all.

The environment switches to real ones, each by itself: ``DATABASE_URL``,
``REDIS_URL`` (the cache, and the locks beside it), ``CELERY_BROKER_URL``,
``EMAIL_HOST`` with ``EMAIL_PORT`` and ``EMAIL_TIMEOUT``. ``EXAMPLE_DATA_DIR`` moves the files.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

BASE_DIR = Path(__file__).resolve().parent.parent

#: Where the SQLite files and the broker's folders live.
DATA_DIR = Path(os.environ.get("EXAMPLE_DATA_DIR", BASE_DIR / "var")).resolve()
DATA_DIR.mkdir(parents=True, exist_ok=True)


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


DEBUG = os.environ.get("DEBUG", "1") == "1"
# Public, so good for trying the site on your own machine only: see SECRET_KEY in Django's manual.
SECRET_KEY = os.environ.get("SECRET_KEY", "insecure-and-public" if DEBUG else "")
ALLOWED_HOSTS = os.environ.get("ALLOWED_HOSTS", "").split(",") if not DEBUG else []

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django_celery_safe",
    "accounts",
    "feeds",
    "albums",
    "demo",
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
WSGI_APPLICATION = "example_project.wsgi.application"

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
            ],
        },
    },
]

STATIC_URL = "static/"
STATICFILES_DIRS = [BASE_DIR / "static"]

MEDIA_URL = "media/"
MEDIA_ROOT = DATA_DIR / "media"
STORAGES: dict[str, Any] = {
    "default": {
        "BACKEND": "django.core.files.storage.FileSystemStorage",
        # A step that is done again writes the same file again, not one beside it.
        "OPTIONS": {"allow_overwrite": True},
    },
    "staticfiles": {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"},
}

LANGUAGE_CODE = "en"
TIME_ZONE = "UTC"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

AUTH_USER_MODEL = "accounts.User"
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator"},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]

# -- The database, and the locks beside it -------------------------------------------------------
# Locks need a connection of their own: taken inside a transaction of the data
# they would be invisible until its commit. With SQLite that means a second file,
# elsewhere a second connection to the same database.
DATABASES: dict[str, Any] = {
    "default": sqlite("site.sqlite3"),
    "locks": sqlite("locks.sqlite3"),
}
if os.environ.get("DATABASE_URL"):
    import dj_database_url

    DATABASES["default"] = dj_database_url.config()
    if DATABASES["default"]["ENGINE"] != "django.db.backends.sqlite3":
        DATABASES["locks"] = dj_database_url.config()

DJANGO_CELERY_SAFE: dict[str, Any] = {"LOCK_DATABASE": "locks"}

if os.environ.get("REDIS_URL"):
    from redis.connection import parse_url

    # A database number of their own, the next one: cache.clear() empties a whole number.
    number = parse_url(os.environ["REDIS_URL"]).get("db", 0) + 1
    server, _, options = os.environ["REDIS_URL"].partition("?")
    CACHES = {
        "default": {
            "BACKEND": "django_redis.cache.RedisCache",
            "LOCATION": os.environ["REDIS_URL"],
        },
        "locks": {
            "BACKEND": "django_redis.cache.RedisCache",
            "LOCATION": f"{server}?db={number}&{options}",
            # A server that stays silent is to be an error, not a wait.
            "OPTIONS": {"SOCKET_CONNECT_TIMEOUT": 2, "SOCKET_TIMEOUT": 2},  # s
        },
    }
    DJANGO_CELERY_SAFE = {"LOCK_CACHE": "locks"}

# -- Celery --------------------------------------------------------------------------------------
CELERY_TASK_IGNORE_RESULT = True
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BEAT_SCHEDULE = {
    # Where no `celery_outbox relay` runs: sends what is left in the outbox, repairs runs that a
    # crash has stopped, and deletes records of mailed digests and runs after a week.
    "relay": {
        "task": "django_celery_safe.tasks.relay_outbox",
        "schedule": 60,  # s
    },
}

if os.environ.get("CELERY_BROKER_URL"):
    CELERY_BROKER_URL = os.environ["CELERY_BROKER_URL"]
    if CELERY_BROKER_URL.startswith(("redis", "rediss")):
        # A server that accepts and stays silent is to be an error, not a wait.
        CELERY_BROKER_TRANSPORT_OPTIONS = {"socket_timeout": 10, "socket_connect_timeout": 5}  # s
    elif CELERY_BROKER_URL.startswith("amqp"):
        CELERY_BROKER_TRANSPORT_OPTIONS = {"confirm_publish": True}
    # For workers with REMAP_SIGTERM=SIGQUIT in their environment: what they can't finish in
    # that time goes back to the broker, before the deployment's SIGKILL.
    CELERY_WORKER_SOFT_SHUTDOWN_TIMEOUT = 8  # s
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
#: Longest wait for the mail server, s; a row lock is held while the welcome e-mail is sent.
EMAIL_TIMEOUT = int(os.environ.get("EMAIL_TIMEOUT", "10"))
if os.environ.get("EMAIL_HOST"):
    EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
    EMAIL_HOST = os.environ["EMAIL_HOST"]
    EMAIL_PORT = int(os.environ.get("EMAIL_PORT", "25"))

#: Pause before an e-mail is tried again, s.
MAIL_RETRY_DELAY = 60

# -- Feeds ---------------------------------------------------------------------------------------
#: Longest silence of a feed's server, and longest time for a whole feed, s.
FEEDS_TIMEOUT = float(os.environ.get("FEEDS_TIMEOUT", "10"))
#: Largest feed that is read, bytes.
FEEDS_MAX_BYTES = int(os.environ.get("FEEDS_MAX_BYTES", 5 * 1024 * 1024))
