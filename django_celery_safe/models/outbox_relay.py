"""The relays of an outbox."""

from __future__ import annotations

from django.db import models

from .listing import ListedRow


class OutboxRelay(ListedRow):
    """The relays' heartbeat: one row that every relay updates."""

    host = models.CharField(max_length=255)
    pid = models.IntegerField()
    seen_at = models.DateTimeField()

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.host} pid {self.pid}"

    @property
    def ago_s(self) -> float:
        """Seconds since it was seen."""
        return max(0.0, self.seconds_since(self.seen_at) or 0.0)
