"""A project whose broker and result backend are out of reach."""

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from kombu import Producer
from pytest_django import Settings

from tests.conftest import UseBroker, forget_first_use
from tests.processes import dead_port
from tests.sending.conftest import ONE_TRY
from tests.testing.tasks import effects


@pytest.fixture(autouse=True)
def no_effects() -> None:
    """Forget what tasks of another test did."""
    effects.clear()


@pytest.fixture
def unreachable(use_broker: UseBroker, settings: Settings) -> Iterator[Any]:
    """The tests' app, with a broker and a result backend where nobody listens."""
    app: Any = use_broker()
    before = {name: app.conf[name] for name in ("broker_url", "result_backend")}
    nobody = f"redis://127.0.0.1:{dead_port()}/0"
    app.conf.update(
        broker_url=nobody,
        result_backend=nobody,
        broker_transport_options=ONE_TRY,
        task_publish_retry=False,
        result_backend_transport_options={"retry_policy": {"max_retries": 0}},
    )
    # Before 5.7 Celery asks Django's settings first.
    settings.CELERY_BROKER_URL = settings.CELERY_RESULT_BACKEND = nobody
    forget_first_use()
    publish, backend = Producer.publish, Celery.backend
    yield app
    assert (Producer.publish, Celery.backend) == (publish, backend)
    # Later tests without a broker of their own must not look for one there.
    app.conf.update(before, task_publish_retry=True, result_backend_transport_options={})
    app._local.__dict__.pop("backend", None)
