"""A relay of the outbox, as one runs beside the workers."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from django.conf import settings

#: How long the relay may take to end, s.
ENDS_WITHIN: Final = 10.0


@contextmanager
def relaying() -> Iterator[None]:
    """Run a relay for as long as the block runs."""
    command = (sys.executable, "manage.py", "celery_outbox", "relay", "--database", "default")
    relay = subprocess.Popen(command, cwd=settings.BASE_DIR, stdout=subprocess.DEVNULL)
    try:
        yield
        relay.send_signal(signal.SIGTERM)
        relay.wait(ENDS_WITHIN)
    finally:
        relay.kill()
        relay.wait()
