"""Messages of the outbox in a test: they are run by it, and no broker gets them."""

from contextlib import nullcontext
from typing import Any

import pytest
from celery import Celery
from django.db import transaction

from django_celery_safe.stages import Status
from django_celery_safe.testing import drain_outbox, on_commit_now, run_stages
from tests.sending.published import take_published
from tests.servers import RedisServer
from tests.stages.tasks import add as step
from tests.testing.tasks import charge, effects


@pytest.mark.parametrize("way", ["fixture", "on_commit_now", "both, and run_stages"])
@pytest.mark.parametrize("outbox", [True, "until_done"])
def test_a_broker_that_answers_gets_nothing(
    outbox: Any,
    way: str,
    any_database: str,
    broker: Celery,
    redis_server: RedisServer,
    request: pytest.FixtureRequest,
) -> None:
    """Messages of the outbox stay there until they are run, whatever the broker."""
    drain = drain_outbox if way == "on_commit_now" else request.getfixturevalue("drain_outbox")
    with nullcontext() if way == "fixture" else on_commit_now():
        with transaction.atomic():
            charge.apply_async_on_commit((1,), outbox=outbox)
        charge.apply_async((2,), outbox=outbox)
        if way == "both, and run_stages":
            assert run_stages([(step, 1)]).status == Status.SUCCEEDED
        assert [one.state for one in drain()] == ["SUCCESS", "SUCCESS"]
    assert effects == [1, 2]
    assert take_published(redis_server) == []


@pytest.mark.django_db(transaction=True)
def test_it_says_what_to_do_where_a_broker_may_have_the_messages(broker: Celery) -> None:
    """In a test that commits it is an error, because the outcome would depend on the broker."""
    with pytest.raises(AssertionError, match="on_commit_now"):
        drain_outbox()
