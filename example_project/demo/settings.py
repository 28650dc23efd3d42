"""
The site's settings for ``manage.py demo``: the same site, in a folder of its own, in a hurry.

Chosen by :mod:`demo.sandbox`, in the demo's process and in its worker.
"""

import os
from pathlib import Path

DEMO_FOLDER = Path(os.environ["DEMO_FOLDER"])
os.environ["EXAMPLE_DATA_DIR"] = str(DEMO_FOLDER)

from example_project.settings import *  # noqa: E402, F403
from example_project.settings import DJANGO_CELERY_SAFE, STORAGES  # noqa: E402

DEBUG = False
# The clicks of the demo go through Django's test client, which calls the site so.
ALLOWED_HOSTS = ["testserver"]

#: Short, so that the demo does not wait long for the lock of a killed child, the messages of a
#: killed sender, or messages that the broker forgot.
DJANGO_CELERY_SAFE = {
    **DJANGO_CELERY_SAFE,
    "LOCK_TIMEOUT": 5.0,
    "OUTBOX_SEND_TIMEOUT": 1.0,
    "OUTBOX_RESEND_AFTER": 3.0,
}
#: After how long a worker gives up on a child that is gone; Celery's own is 10 s.
CELERY_WORKER_LOST_WAIT = 0.5
MAIL_RETRY_DELAY = 1
FEEDS_TIMEOUT = 60.0
# Fifty sign-ups are not to spend half a minute on hashing.
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
STORAGES = {**STORAGES, "default": {**STORAGES["default"], "BACKEND": "demo.storage.Storage"}}
