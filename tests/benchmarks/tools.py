"""What several benchmarks need: databases, a worker's settings, deliveries and their queries."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from celery.app.trace import build_tracer
from django.conf import settings
from django.db import connections
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from tests.benchmarks.report import Sample
from tests.processes import start_in_process
from tests.servers import RedisServer, ServerPool
from tests.servers.databases import Databases

#: Seconds until a process has measured all, at the most.
LONGEST = 900

BACKENDS = {
    "django-redis": "django_redis.cache.RedisCache",
    "Django's RedisCache": "django.core.cache.backends.redis.RedisCache",
}

#: No relay runs here: a commit of thousands of sends has to publish all of them itself, however
#: busy the machine is.
PATIENT = {"OUTBOX_SEND_TIMEOUT": 30}


def in_process(function: Callable[..., Sample], *args: Any, **more: Any) -> Sample:
    """Return the result of a function in a process of its own, whose Celery app is new."""
    with start_in_process(function, *args, **more) as measuring:
        sample: Sample = measuring.result(LONGEST)
        return sample


def caches_on(server: RedisServer) -> override_settings:
    """Return the settings with one cache for each of Django's ways to Redis."""
    entries = {
        alias: {"BACKEND": backend, "LOCATION": server.url} for alias, backend in BACKENDS.items()
    }
    return override_settings(
        CACHES={"default": entries["django-redis"], **entries}, DJANGO_CELERY_SAFE={}
    )


def keep_locks_in(alias: str) -> None:
    """Take locks in this cache from now on, at the cost of one assignment."""
    settings.DJANGO_CELERY_SAFE["LOCK_CACHE"] = alias


@contextmanager
def databases(servers: ServerPool, *aliases: str | None) -> Iterator[list[str]]:
    """Have a database of the chosen kind for each alias (None: a new one) during the block."""
    with TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        made = Databases(servers, folder)
        yield [stack.enter_context(made.alias("postgres", folder, alias)) for alias in aliases]


def worker_settings(alias: str, redis: RedisServer) -> dict[str, Any]:
    """Return the settings of a worker with a default database, broker and results."""
    given = connections.settings[alias]
    database = {name: given[name] for name in ("ENGINE", "NAME", "USER", "HOST", "PORT")}
    return {
        "DATABASES": {"default": {**database, "CONN_MAX_AGE": None}},
        "CELERY_BROKER_URL": redis.database_url(1),
        "CELERY_RESULT_BACKEND": redis.database_url(2),
        # Without it Celery closes the connection after each task, whatever CONN_MAX_AGE is.
        "CELERY_DB_REUSE_MAX": 1_000_000,
        "DJANGO_CELERY_SAFE": PATIENT,
    }


def use_app(given: dict[str, Any], **more: Any) -> None:
    """Let this process, whose app is to be a new one, send as the worker does."""
    from tests.stages.worker_app import app  # it becomes the current one of who imports it

    app.conf.update(
        broker_url=given["CELERY_BROKER_URL"], result_backend=given["CELERY_RESULT_BACKEND"], **more
    )


def deliver(task: Any, argument: Any, request: dict[str, Any]) -> None:
    """Run a task for a message, as a worker does."""
    trace = build_tracer(task.name, task, app=task.app, propagate=True)
    trace(request["id"], [argument], {}, {"delivery_info": {}, **request})


def count_queries(alias: str, call: Callable[[], object], *without: str) -> int:
    """Return how many queries a call makes, without those that begin with these words."""
    with CaptureQueriesContext(connections[alias]) as queries:
        call()
    return sum(not (without and query["sql"].startswith(without)) for query in queries)


def insert_copies(
    alias: str, model: Any, row: Mapping[str, Any], changes: Mapping[str, str], numbers: str
) -> None:
    """
    Write copies of a row.

    Args:
        changes: More columns, as SQL of the number of a copy.
        numbers: SQL for where the numbers come from.
    """
    table = model._meta.db_table
    values = [*["%s"] * len(row), *changes.values()]
    with connections[alias].cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {table} ({', '.join([*row, *changes])}) "
            f"SELECT {', '.join(values)} FROM {numbers}",
            list(row.values()),
        )
    analyze(alias, table)


def analyze(alias: str, table: str) -> None:
    """Do what autovacuum would do."""
    with connections[alias].cursor() as cursor:
        cursor.execute(f"ANALYZE {table}")
