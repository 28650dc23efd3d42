"""A project that ``django-admin startproject`` has made runs a task of Django through Celery."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes import Journal, KeptProcess, wait_for
from tests.servers import RedisServer

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60

SETTINGS = """
from datetime import timedelta

INSTALLED_APPS += ["django_celery_safe", "news"]
DATABASES["default"]["OPTIONS"] = {
    "transaction_mode": "IMMEDIATE",
    "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
}
CACHES = {
    "default": {
        "BACKEND": "django.core.cache.backends.redis.RedisCache",
        "LOCATION": "REDIS/0",
    }
}
TASKS = {"default": {"BACKEND": "django_celery_safe.backends.SafeCeleryBackend"}}
CELERY_BROKER_URL = "REDIS/1"
DJANGO_CELERY_SAFE = {"OUTBOX_RETENTION": timedelta(days=1), "LOCK_TIMEOUT": 5}
"""
CELERY = """
import os

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")

app = Celery("shop")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
"""
TASKS = """
import json
import os
import time
from pathlib import Path

from django.tasks import task


@task(takes_context=True)
def send_news(context, folder, reader):
    with (Path(folder) / "journal").open("a") as file:
        file.write(json.dumps({"effect": "began", "attempt": context.attempt}) + "\\n")
    while not (Path(folder) / "gate").exists():
        time.sleep(0.05)
    return f"sent to {reader}"
"""
#: Its own callback of the commit runs before the one that publishes.
ENQUEUE = """
import os
import signal
import sys
from pathlib import Path

from django.db import transaction
from news.tasks import send_news

folder = Path(os.environ["NEWS_FOLDER"])
with transaction.atomic():
    transaction.on_commit(lambda: os.kill(os.getpid(), signal.SIGKILL))
    result = send_news.enqueue(str(folder), reader="ann@example.com")
    (folder / "id").write_text(result.id)
"""
ASK = """
import json
import os
from pathlib import Path

from news.tasks import send_news

result = send_news.get_result((Path(os.environ["NEWS_FOLDER"]) / "id").read_text())
print(json.dumps({
    "status": result.status,
    "attempts": result.attempts,
    "value": result.return_value if result.status == "SUCCESSFUL" else None,
}))
"""


class Project:
    """A new project in a folder, and the programs that belong to it."""

    def __init__(self, folder: Path, redis: str) -> None:
        self.folder, self.redis = folder, redis
        foreign = ("DJANGO", "CELERY", "PYTEST", "SAFE", "COV")
        ours = {name: one for name, one in os.environ.items() if not name.startswith(foreign)}
        self.environment = {**ours, "PYTHONPATH": str(ROOT), "NEWS_FOLDER": str(folder)}

    def create(self) -> None:
        """Do what a user of Django does first."""
        self.run("-m", "django", "startproject", "shop", ".")
        self.manage("startapp", "news")
        (self.folder / "news" / "tasks.py").write_text(TASKS)
        # A task may be defined before all models are there.
        (self.folder / "news" / "models.py").write_text("from news.tasks import send_news\n")
        with (self.folder / "shop" / "settings.py").open("a") as file:
            file.write(SETTINGS.replace("REDIS", self.redis))

    def add_celery(self) -> None:
        """Do what a user of Celery does first."""
        (self.folder / "shop" / "celery.py").write_text(CELERY)
        (self.folder / "shop" / "__init__.py").write_text("from .celery import app as celery_app\n")

    def run(self, *command: str) -> str:
        """Run Python in the project; return its output."""
        done = self.try_run(*command)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def try_run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run Python in the project, however it ends."""
        return subprocess.run(
            [sys.executable, *command],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE,
        )

    def manage(self, *command: str) -> str:
        """Run a command of manage.py; return its output."""
        return self.run("manage.py", *command)

    def ask(self) -> dict[str, Any]:
        """Return what ``get_result`` says."""
        answer: dict[str, Any] = json.loads(self.manage("shell", "-v0", "-c", ASK))
        return answer

    def program(self, name: str, *command: str) -> KeptProcess:
        """Return a program that runs beside the test, not yet started."""
        return KeptProcess(
            [sys.executable, *command],
            folder=self.folder,
            log_path=self.folder / f"{name}.log",
            env=self.environment,
        )

    def worker(self, name: str) -> KeptProcess:
        """Return a worker."""
        return self.program(name, "-m", "celery", "-A", "shop", "worker", "--concurrency", "1")


@pytest.mark.timeout(300)
def test_a_task_survives_its_sender_and_its_worker(tmp_path: Path) -> None:
    """
    Its sender is killed after the commit and before the publication, its worker in the task.

    The relay sends it, and sends it again, and the result says that it succeeded.
    """
    with RedisServer() as redis:
        project = Project(tmp_path, f"redis://{redis.host}:{redis.port}")
        project.create()
        assert "django_celery_safe.E010" in project.try_run("manage.py", "check").stdout
        project.add_celery()
        assert "no issues" in project.manage("check")
        project.manage("migrate", "-v0")
        assert project.try_run("manage.py", "shell", "-v0", "-c", ENQUEUE).returncode == (
            -signal.SIGKILL
        )
        with redis.client(db=1) as client:
            assert client.keys() == []
        assert project.ask() == {"status": "READY", "attempts": 0, "value": None}
        journal = Journal(tmp_path / "journal")
        with project.program("relay", "manage.py", "celery_outbox", "relay"):
            with project.worker("first") as worker:
                wait_for(journal.entries, PATIENCE, "it was not begun")
                assert project.ask()["status"] == "RUNNING"
                worker.kill()
            with project.worker("second"):
                wait_for(lambda: len(journal.entries()) == 2, PATIENCE, "it was not begun again")
                (tmp_path / "gate").touch()
                wait_for(lambda: project.ask()["status"] == "SUCCESSFUL", PATIENCE, "no result")
        assert project.ask() == {
            "status": "SUCCESSFUL",
            "attempts": 2,
            "value": "sent to ann@example.com",
        }
        assert [entry["attempt"] for entry in journal.entries()] == [1, 2]
