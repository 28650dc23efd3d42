"""Workers of all pools of Celery, one of each kind."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

from tests.processes import CeleryWorker

#: Each pool, and how many tasks run in it at once.
POOLS = {"prefork": 2, "threads": 4, "solo": 1, "gevent": 20}

Workers = dict[str, CeleryWorker]


@contextmanager
def workers_of_all_pools(
    include: str, prefork_env: Mapping[str, str] | None = None
) -> Iterator[Workers]:
    """
    Run a worker of each pool, each with the queue that is called like its pool.

    Args:
        include: The module with their tasks.
        prefork_env: Environment variables of the prefork worker alone.
    """
    workers = {
        pool: CeleryWorker(
            "tests.app",
            pool=pool,
            concurrency=size,
            arguments=["--include", include, "--queues", pool],
            env=prefork_env if pool == "prefork" else None,
        )
        for pool, size in POOLS.items()
    }
    with ExitStack() as stack:
        for worker in workers.values():
            stack.push(worker)
        with ThreadPoolExecutor(len(workers)) as starters:
            list(starters.map(CeleryWorker.start, workers.values()))
        yield workers
