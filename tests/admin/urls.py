"""The URLs of the first page and of the lists."""

from typing import Final

FIRST: Final = "/admin/django_celery_safe/"
LOCKS: Final = f"{FIRST}lock/"
OUTBOX: Final = f"{FIRST}outboxmessage/"
RECORDS: Final = f"{FIRST}idempotencyrecord/"
RUNS: Final = f"{FIRST}stagerun/"
STEPS: Final = f"{FIRST}stagestep/"
