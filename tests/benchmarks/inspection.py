"""Seeing many locks: ``manage.py celery_locks list`` and the admin's page on Redis."""

import io
import statistics
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress

from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.test import Client
from django.urls import reverse

from django_celery_safe.admin.locks import PAGE
from tests.benchmarks.listing import fill
from tests.benchmarks.locks import caches_on
from tests.benchmarks.report import Figure
from tests.servers import RedisServer, ServerPool

LOCKS, ROUNDS = 100_000, 5


class Enough(Exception):
    """The row that was waited for was written."""


class FirstRow(io.StringIO):
    """Ends the command when the row of a lock is written."""

    def write(self, text: str) -> int:
        """Look at what is written."""
        if "shop.tasks.import_feed:" in text:
            raise Enough
        return len(text)


class Nowhere(io.StringIO):
    """Keeps nothing of what is written but how many rows of locks there were."""

    rows = 0

    def write(self, text: str) -> int:
        """Count."""
        self.rows += text.count("shop.tasks.import_feed:")
        return len(text)


def run(servers: ServerPool) -> list[Figure]:
    """Fill a Redis of its own, and look at what it holds."""
    with RedisServer() as server, caches_on(server):
        fill(server, LOCKS, 0)
        return measure(LOCKS)


def measure(locks: int) -> list[Figure]:
    """Measure each way to see so many locks."""
    call_command("migrate", verbosity=0)
    return [
        *measure_list(locks, "list"),
        *measure_list(locks, "list", "--json"),
        *measure_page(locks),
    ]


def measure_list(locks: int, *arguments: str) -> list[Figure]:
    """Measure the command, in this process: the start of an interpreter is left out."""
    name = " ".join(arguments)
    first = statistics.median(seconds_of(lambda: first_row(*arguments)) for _ in range(ROUNDS))
    out = Nowhere()
    whole = seconds_of(lambda: call_command("celery_locks", *arguments, stdout=out))
    tracemalloc.start()
    try:
        call_command("celery_locks", *arguments, stdout=Nowhere())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return [
        Figure(f"{name}: first row, s", first, note=f"median of {ROUNDS}"),
        Figure(f"{name}: Python peak, MB", peak / 1e6, note="tracemalloc, in another pass"),
        Figure(f"{name}: all, s", whole, note=f"{out.rows:,} rows"),
        Figure(f"{name}: rows missed", locks - out.rows),
    ]


def first_row(*arguments: str) -> None:
    """Run the command until the first lock is written."""
    with suppress(Enough):
        call_command("celery_locks", *arguments, stdout=FirstRow())


def measure_page(locks: int) -> list[Figure]:
    """Measure the admin's first page, as a superuser gets it."""
    client = Client()
    client.force_login(get_user_model().objects.create_superuser("root"))
    url = reverse("admin:django_celery_safe_lock_changelist")

    def show() -> None:
        page = client.get(url).content.decode()
        assert page.count("shop.tasks.import_feed:") >= min(locks, PAGE), page

    first = seconds_of(show)
    later = statistics.median(seconds_of(show) for _ in range(ROUNDS))
    return [
        Figure("admin: first page, s", first, note="templates not yet read"),
        Figure("admin: first page again, s", later, note=f"median of {ROUNDS}"),
    ]


def seconds_of(do: Callable[[], object]) -> float:
    """Return how long a call takes, s."""
    begin = time.perf_counter()
    do()
    return time.perf_counter() - begin
