"""Tasks of a project that is tested: some right, and some wrong in the usual ways."""

from typing import Any

from celery import shared_task
from celery.exceptions import Ignore, Reject
from django.db import transaction

from django_celery_safe import SafeTask, idempotent, resumable, single_instance, stages
from tests.app.models import Person

#: Effects of the tasks, emptied before each test.
effects: list[Any] = []


class AppTask(SafeTask):
    """The class of a project, which looks at its calls."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Go on as Celery does."""
        return super().__call__(*args, **kwargs)


@shared_task(base=SafeTask)
def greet(name: object) -> None:
    """Greet somebody."""
    effects.append(name)


@shared_task(base=SafeTask)
@single_instance(key="{url}", unique_until="end")
def visit(url: str) -> None:
    """Be sent once for each URL."""
    effects.append(url)


@shared_task(base=SafeTask, bind=True)
@single_instance(key=["url"], limit=2)
def import_feed(self: Any, url: str, full: bool = False) -> str:
    """Import a feed, two runs at a time."""
    return f"imported {url}"


@shared_task(base=SafeTask)
def charge(order: int) -> str:
    """Charge twice when it is delivered twice."""
    effects.append(order)
    return f"receipt {len(effects)}"


@shared_task(base=SafeTask)
@idempotent(key="charge:{order}")
def charge_once(order: int) -> str:
    """Charge once."""
    effects.append(order)
    return f"receipt {len(effects)}"


@shared_task(base=SafeTask, outbox="until_done")
def pay(order: int) -> None:
    """Be carried until it is done."""
    effects.append(order)


@shared_task(base=SafeTask, outbox="until_done")
def print_badges() -> None:
    """Print the badge of each person once, two in a chunk."""
    for person in resumable(Person.everyone.all(), every=2):
        effects.append(person.pk)
        person.is_badge_printed = True
        person.save()


@shared_task(base=SafeTask)
def welcome(pk: int) -> None:
    """Welcome a person once."""
    with Person.do_once(pk, "is_welcome_email_sent") as person:
        if person:
            effects.append(pk)


@shared_task(base=AppTask, bind=True, acks_late=True)
def look_around(self: Any, things: list[Any]) -> dict[str, Any]:
    """Return what a worker's task sees, and spoil what it was given."""
    request = self.request
    effects.append((request.id, request.delivery_info["redelivered"], list(things)))
    things.append("spoilt")
    request.delivery_info["redelivered"] = "spoilt"
    return {"eager": request.is_eager, "direct": request.called_directly}


@shared_task(base=SafeTask, bind=True, max_retries=3)
def stumble(self: Any) -> None:
    """Be retried."""
    effects.append(self.request.retries)
    raise self.retry(exc=ValueError("it does not work"), countdown=60)


@shared_task
def fail() -> None:
    """Fail."""
    raise ValueError("it does not work")


@shared_task
def ignore() -> None:
    """End without a result."""
    raise Ignore


@shared_task
def reject() -> None:
    """Refuse the message."""
    raise Reject("not wanted", requeue=False)


@shared_task(base=SafeTask)
def count_down(number: int) -> int:
    """Send itself through the outbox until nothing is left to count; send others directly."""
    effects.append(number)
    with transaction.atomic():
        if number:
            count_down.apply_async_on_commit((number - 1,), outbox=True)
        transaction.on_commit(lambda: greet.delay(number))
    return number


@shared_task(base=SafeTask)
def go_on_for_ever() -> None:
    """Send itself again and again."""
    go_on_for_ever.apply_async_on_commit(outbox=True)


@shared_task(base=SafeTask, bind=True, max_retries=None)
@stages.step
def never_well(self: Any, params: dict[str, Any]) -> None:
    """Be retried for ever."""
    raise self.retry(countdown=60)


@shared_task(base=SafeTask)
@stages.step
def step_that_sends(params: dict[str, Any], step: Any) -> dict[str, Any]:
    """Record what it sees; send something besides."""
    effects.append((step.status, sorted(params)))
    greet.delay_on_commit("step")
    return {"sent": params.get("sent", 0) + 1}
