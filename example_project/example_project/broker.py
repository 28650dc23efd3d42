"""
A broker in a folder, so that the site needs no server: kombu's, with whole messages only.

Used while no ``CELERY_BROKER_URL`` is given. It is for one machine and for
trying things out: a worker that is killed loses the messages it had taken.
"""

from __future__ import annotations

import uuid
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from kombu.transport import filesystem
from kombu.utils.json import dumps


class Channel(filesystem.Channel):
    """
    A channel whose files appear in the folder complete or not at all.

    kombu (5.7) creates a file first and fills it afterwards. A worker that looks in between
    takes an empty message or an empty table of queues, fails to decode it and ends with an
    error; with four busy senders on two cores that was one message in 26.
    """

    def __init__(self, connection: Any, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        for folder in (self.data_folder_in, self.data_folder_out, self.control_folder):
            Path(folder).mkdir(parents=True, exist_ok=True)

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str, queue: str) -> None:
        table = Path(self.control_folder, f"{exchange}.exchange")
        if not table.exists():
            unfinished = table.with_name(f"{uuid.uuid4()}.unfinished")
            unfinished.write_text("[]")
            with suppress(FileExistsError):
                table.hardlink_to(unfinished)
            unfinished.unlink()
        super()._queue_bind(exchange, routing_key, pattern, queue)

    def _put(self, queue: str, payload: Any, **kwargs: Any) -> None:  # type: ignore[override]
        # The reader takes the oldest name first, and only names that end in ".<queue>.msg".
        name = f"{round(monotonic() * 1000)}_{uuid.uuid4()}.{queue}.msg"
        unfinished = Path(self.data_folder_out, f"{name}.unfinished")
        unfinished.write_text(dumps(payload))
        unfinished.rename(unfinished.with_suffix(""))


class Transport(filesystem.Transport):
    """The transport that the setting ``CELERY_BROKER_TRANSPORT`` names."""

    Channel = Channel
