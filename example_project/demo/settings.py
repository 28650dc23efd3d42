"""
The site's settings for ``manage.py demo``: the same site, in a folder of its own, in a hurry.

The demo's process makes the folder and removes it at its end; the processes that it starts
inherit it, and nothing else of their surroundings.
"""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

if "DEMO_FOLDER" not in os.environ:
    os.environ["DEMO_FOLDER"] = tempfile.mkdtemp(prefix="django-celery-safe-demo-")
    atexit.register(shutil.rmtree, os.environ["DEMO_FOLDER"])
    for _name in [name for name in os.environ if name.startswith(("CELERY", "EMAIL_", "REDIS_"))]:
        del os.environ[_name]
os.environ["EXAMPLE_DATA_DIR"] = os.environ["DEMO_FOLDER"]
# No proxy stands between the worker and the web server of the demo.
os.environ["no_proxy"] = "*"
# kombu's folder broker takes a message by moving its file there.
tempfile.tempdir = str(Path(os.environ["DEMO_FOLDER"], "taken"))
Path(tempfile.tempdir).mkdir(exist_ok=True)

from example_project.settings import *  # noqa: E402, F403
from example_project.settings import DJANGO_CELERY_SAFE, INSTALLED_APPS, STORAGES  # noqa: E402

DEBUG = False
INSTALLED_APPS = [*INSTALLED_APPS, "demo"]
# Django's test client, which clicks on the site's buttons, calls the site so.
ALLOWED_HOSTS = ["testserver"]
#: Short, so that the demo does not wait long for the lock of a killed process, the messages of a
#: killed sender, or messages that the broker forgot; s.
DJANGO_CELERY_SAFE = {
    **DJANGO_CELERY_SAFE,
    "LOCK_TIMEOUT": 5.0,
    "OUTBOX_SEND_TIMEOUT": 1.0,
    "OUTBOX_RESEND_AFTER": 3.0,
}
#: After how long a worker gives up on a child that is gone, s; Celery's own is 10 s.
CELERY_WORKER_LOST_WAIT = 0.5
MAIL_RETRY_DELAY = 1
# The sign-ups are not to spend their time on hashing.
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
STORAGES = {**STORAGES, "default": {**STORAGES["default"], "BACKEND": "demo.storage.Storage"}}
