"""Our app on either broker, for the tests that need to know what each one does."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.test import override_settings

from tests.app.celery import app
from tests.conftest import REDIS_BACKENDS, forget_first_use
from tests.servers import RabbitMQServer, RedisServer, Server


@contextmanager
def app_on_broker(broker: Server, redis: RedisServer, **ours: Any) -> Iterator[None]:
    """
    Have our app and its workers on a broker, with locks and results in a Redis.

    Args:
        redis: It is emptied before; its database 1 is the broker if that is a Redis.
        ours: Settings of this package.
    """
    redis.flush()
    url = broker.url if isinstance(broker, RabbitMQServer) else redis.database_url(1)
    chosen = {"broker_url": url, "result_backend": redis.database_url(2)}
    settings: dict[str, Any] = {f"CELERY_{name.upper()}": chosen[name] for name in chosen}
    backend = REDIS_BACKENDS["django-redis"]
    settings["CACHES"] = {"default": {"BACKEND": backend, "LOCATION": redis.url}}
    with override_settings(**settings, DJANGO_CELERY_SAFE=ours):
        forget_first_use()
        app.conf.update(chosen)
        yield
        forget_first_use()


def result_state(task_id: str) -> str:
    """Return what the result backend says of a task."""
    state: str = app.AsyncResult(task_id).state
    return state
