"""The surroundings of a scene."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from django.conf import settings

from .display import Display
from .feed_server import FeedServer
from .journal import Journal
from .mail_server import MailServer
from .worker import Worker


@dataclass(frozen=True)
class Surroundings:
    """The running parts of the demo."""

    worker: Worker
    mail: MailServer
    feeds: FeedServer
    journal: Journal
    display: Display


def undelivered() -> int:
    """Return how many messages lie in the broker's folder, taken by no worker yet."""
    return sum(1 for _ in _folder().iterdir())


def forget_messages() -> int:
    """Let the broker lose what lies in its folder; return how many messages that were."""
    messages = list(_folder().iterdir())
    for message in messages:
        message.unlink()
    return len(messages)


def _folder() -> Path:
    return Path(str(settings.CELERY_BROKER_TRANSPORT_OPTIONS["data_folder_in"]))
