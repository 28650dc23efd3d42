"""The place of one run: its folder, servers and databases, and the processes that it starts."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from django.db import DEFAULT_DB_ALIAS, connections

from tests.faults.brokers import Broker, LastingRedis, RabbitMQBroker, RedisBroker
from tests.processes import CeleryWorker, FunctionProcess, start_in_process
from tests.processes.worker import start_together
from tests.servers import RabbitMQServer, RedisServer, Server

#: Messages for each child that a worker may hold: so many that it always waits for one more,
#: also while the broker has yet to redeliver those of killed children.
PREFETCH = 16


#: How long a publication right after a commit may take, s.
SEND_TIMEOUT = 0.5

#: How long a worker waits until it takes a child for dead, s.
LOST_WAIT = 1.0

#: The backend of the cache with the locks.
DJANGO_REDIS = "django_redis.cache.RedisCache"

#: The variable of the environment with the fault that a worker is to have.
BROKEN = "SAFE_TESTS_BROKEN"


class Lab(ExitStack):
    """
    Starts what a run needs, and ends it with the block, or when it is closed.

    Args:
        folder: Where the witnesses write; new.
        find_server: Returns a running server of a class, which only this run uses.
        make_database: Returns the alias of a database, migrated and empty.
    """

    def __init__(
        self,
        folder: Path,
        find_server: Callable[[type[Server]], Any],
        make_database: Callable[[Any], str],
    ) -> None:
        super().__init__()
        self.folder = folder
        self.server = find_server
        self.database = make_database
        #: Django settings of all processes of the run, on top of those of this one.
        self.settings: dict[str, Any] = {"TEST_WITNESS": str(folder)}

    def make_broker(
        self, name: str, *, lasting: bool = False, visibility_timeout: float | None = None
    ) -> Broker:
        """Return a broker, empty; a Redis that is not ``lasting`` keeps nothing on the disk."""
        if name == "rabbitmq":
            return RabbitMQBroker(self.server(RabbitMQServer))
        server = self.server(LastingRedis if lasting else RedisServer)
        return RedisBroker(server, visibility_timeout)

    def configure(self, alias: str, broker: Broker, ours: Mapping[str, Any]) -> None:
        """
        Set the Django settings of all processes.

        Args:
            alias: Their default database.
            ours: The setting DJANGO_CELERY_SAFE.
        """
        self.use_database(alias, CONN_MAX_AGE=None)
        self.settings |= {
            "CELERY_TASK_IGNORE_RESULT": True,
            "CELERY_WORKER_LOST_WAIT": LOST_WAIT,
            "DJANGO_CELERY_SAFE": dict(ours),
            **broker.settings(),
        }

    def use_database(self, alias: str, **more: Any) -> None:
        """Let this be the default database of all processes; ``more`` goes into its entry."""
        known = connections.settings[alias]
        names = ("ENGINE", "NAME", "USER", "HOST", "PORT", "OPTIONS")
        entry = {name: known[name] for name in names}
        self.settings["DATABASES"] = {DEFAULT_DB_ALIAS: {**entry, **more}}

    def use_store(self, server: RedisServer, backend: str = DJANGO_REDIS) -> None:
        """Let this be the place of all processes' locks, and of results."""
        self.settings["CACHES"] = {"default": {"BACKEND": backend, "LOCATION": server.url}}
        self.settings["CELERY_RESULT_BACKEND"] = server.database_url(2)

    def start(self, function: Callable[..., Any], *args: Any) -> FunctionProcess:
        """Run a function in a process of its own."""
        return self.enter_context(start_in_process(function, *args, settings=self.settings))

    def start_workers(self, plan: Any, include: str, prefetch: int = 4) -> list[CeleryWorker]:
        """
        Start a plan's workers at once and return them when all are ready.

        Args:
            include: The module of their tasks.
            prefetch: Messages for each child that a worker may hold; 4 is Celery's default.
        """
        workers = [
            CeleryWorker(
                "tests.app",
                concurrency=plan.concurrency,
                arguments=["--include", include, "--prefetch-multiplier", str(prefetch)],
                settings=self.settings,
                env={BROKEN: plan.broken},
            )
            for _ in range(plan.workers)
        ]
        for worker in workers:
            self.push(worker)
        start_together(workers)
        return workers
