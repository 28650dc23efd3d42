"""The checks of tasks that are done once: messages that come too often, or never; flags."""

import re
import socket
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any, Final

import pytest
from celery import Celery, Task, schedules
from celery.beat import ScheduleEntry
from django.contrib import admin
from django.core import checks

from django_celery_safe import SafeTask, idempotent, single_instance
from django_celery_safe.checks import check_workers
from django_celery_safe.delivery.copies import visibility_timeout
from tests import checking
from tests.app.models import Person
from tests.checking import TRANSPORT_OPTIONS, no_faults
from tests.test_task_checks import (
    HOUR,
    NAME,
    RABBITMQ_BROKER,
    REDIS_BROKER,
    MakeApp,
    make_app,
)

__all__ = ["make_app", "no_faults"]

pytestmark = [
    pytest.mark.usefixtures("no_faults"),
    pytest.mark.filterwarnings("ignore:Overriding setting DATABASES"),
]

#: Options with which a task's message is redelivered if its worker dies.
SURE: dict[str, Any] = {"acks_late": True, "reject_on_worker_lost": True}
#: Lets Celery retry a task.
RETRIED: dict[str, Any] = {"autoretry_for": (OSError,)}
#: Lets a worker that is stopped give back what it was at.
SOFT: dict[str, Any] = {"worker_soft_shutdown_timeout": 10.0}


def said() -> list[tuple[str, str, str]]:
    """Return what our checks say, those of a deployment too: number, text and hint."""
    messages = checking.find_messages()
    assert all(message.level == checks.WARNING for message in messages)
    assert "django_celery_safe.W021" not in {message.id for message in messages}
    messages += check_workers()
    return [(str(m.id).rpartition(".")[2], m.msg, str(m.hint)) for m in messages]


def numbers() -> list[str]:
    """Return the numbers of what our checks say, one for each message."""
    return sorted(number for number, _, _ in said())


def by_task() -> dict[str, tuple[str, str]]:
    """Return the number and text of what our checks say by task, if that is one thing of each."""
    messages = said()
    told = {text.split()[1]: (number, text) for number, text, _ in messages}
    assert len(told) == len(messages)
    return told


def patient(timeout: object) -> dict[str, Any]:
    """Return the configuration of a broker that waits so long for an acknowledgement."""
    return {"broker_transport_options": {**TRANSPORT_OPTIONS, "visibility_timeout": timeout}}


def welcome(pk: int) -> None:
    """Do a thing once by a flag."""
    with Person.do_once(pk, "is_welcome_email_sent") as person:
        if person:
            print("Welcome")


def charge(pk: int) -> None:
    """Do a thing once by a record, in a block."""
    with idempotent(f"charge:{pk}") as claim:
        if claim:
            print("charging")


def reindex(pk: int) -> None:
    """Do a thing as often as asked to."""
    print(pk)


def reindex_later(pk: int) -> None:
    """Ask for another run."""
    raise task_of(reindex_later).retry()


def task_of(function: object) -> Any:
    """Stand for what finds a task."""
    return function


def add_task(app: Celery, function: Callable[..., Any] = welcome, **options: Any) -> Any:
    """Give the app one task."""
    return app.task(function, **{"name": NAME, "base": SafeTask, "shared": False, **options})


def logged(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Decorate as a project does, or as some libraries do."""

    @wraps(function, **options)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


class WelcomeTask(SafeTask):
    """A task as a class, which does a thing once."""

    name = f"{NAME}_class"

    def run(self, pk: int) -> None:
        """Do a thing once."""
        Person.do_once(pk, "is_welcome_email_sent")


# W018, W019: whose worker dies.


#: What the app says of acknowledgement, a task's base and options, and what is told of it.
NeverDone = tuple[dict[str, Any], type | None, dict[str, Any], str | None]
NEVER_DONE: Final[list[NeverDone]] = [
    ({}, SafeTask, {}, "W018"),
    ({}, None, {"acks_late": True}, "W019"),
    ({}, SafeTask, SURE, None),
    ({"task_acks_late": True}, Task, {}, "W019"),
    ({"task_acks_late": True}, SafeTask, {"acks_late": False}, "W018"),
    ({"task_acks_late": True, "task_reject_on_worker_lost": True}, SafeTask, {}, None),
    ({"task_annotations": {NAME: SURE}}, SafeTask, {}, None),
    ({"task_annotations": {"*": {"acks_late": True}}}, SafeTask, {}, "W019"),
]


@pytest.mark.parametrize("case", NEVER_DONE)
def test_a_task_that_is_never_done(make_app: MakeApp, case: NeverDone) -> None:
    """W018 tells of an early acknowledgement, W019 of one for a killed run; of any task base."""
    conf, base, options, number = case
    add_task(make_app(**conf), base=base, **options)
    messages = said()
    assert [each for each, _, _ in messages] == ([number] if number else [])
    for _, text, hint in messages:
        assert {"W018": "acks_late is off", "W019": "reject_on_worker_lost is off"}[number] in text
        assert "reject_on_worker_lost=True" in hint
        assert ("acks_late=True" in hint) is (number == "W018")


#: Functions that do something once, and options of their tasks.
ONCE: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "with_idempotent": (charge, {}),
    "idempotent": (idempotent(reindex), {}),
    "in_single_instance": (single_instance(idempotent(reindex)), {}),
    "decorated": (logged(logged(welcome)), {}),
    "decorated_barely": (logged(idempotent(reindex), updated=()), {}),
    "autoretry": (welcome, RETRIED),
}


def test_what_is_done_once(make_app: MakeApp) -> None:
    """A task that names do_once or idempotent is one, behind whatever wraps its function."""
    app = make_app()
    for name, (function, options) in ONCE.items():
        add_task(app, function, name=name, **options)
    app.register_task(WelcomeTask())
    for place, function in enumerate((reindex, single_instance(reindex), logged(reindex))):
        add_task(app, function, name=f"other_{place}")
    wanted = {*ONCE, WelcomeTask.name}
    assert {name: number for name, (number, _) in by_task().items()} == dict.fromkeys(
        wanted, "W018"
    )


# W020: tasks that wait, or run, for longer than the broker.


#: Options of a task, and what is longer than the 60 s after which the broker delivers it again.
DELIVERED_AGAIN: Final[list[tuple[dict[str, Any], str | None]]] = [
    ({"time_limit": 60, "soft_time_limit": 90}, None),
    ({"time_limit": 61}, "a time_limit of 61"),
    ({"time_limit": timedelta(seconds=1234567)}, "a time_limit of 1234567"),
    ({"time_limit": 90, "acks_late": False}, None),
    (RETRIED, "a default_retry_delay of 180"),
    ({**RETRIED, "default_retry_delay": 60}, None),
    # A backoff doubles from one retry to the next, up to retry_backoff_max; the first is single.
    ({**RETRIED, "retry_backoff": 400, "retry_backoff_max": 50}, None),
    ({**RETRIED, "retry_backoff": 40.9, "max_retries": 3}, "a longest retry_backoff of 160"),
    ({**RETRIED, "retry_backoff": 1, "max_retries": None}, "a longest retry_backoff of 600"),
    ({**RETRIED, "retry_backoff": 10, "retry_kwargs": {"countdown": 90, "max_retries": 3}}, None),
    # Without it each retry waits the same.
    ({**RETRIED, "retry_kwargs": {"countdown": 90}}, "in retry_kwargs a countdown of 90"),
    # A task that is never retried waits for nothing.
    ({**RETRIED, "retry_kwargs": {"max_retries": 0, "countdown": 90}}, None),
]


@pytest.mark.parametrize(("options", "told"), DELIVERED_AGAIN)
def test_a_message_that_is_delivered_again(
    make_app: MakeApp, options: dict[str, Any], told: str | None
) -> None:
    """W020: an idempotent task of any base may run longer than the visibility timeout."""
    app = make_app(REDIS_BROKER, **SOFT, **patient(60))
    for base in (SafeTask, Task):
        add_task(app, base=base, name=base.__name__, **{**SURE, **options})
    messages = [message for message in said() if message[0] != "W018"]
    assert len(messages) == (2 if told else 0)
    for number, text, hint in messages:
        assert number == "W020"
        assert f" has {told} s, but after a visibility_timeout of 60 s" in text
        suggested = re.search(r'"visibility_timeout": (\d+)', hint)
        assert suggested is not None
        app.conf.update(patient(float(suggested[1])))
        assert "W020" not in numbers()


def test_whose_business_it_is(make_app: MakeApp) -> None:
    """W020 is about limits and delays of safe tasks, also those that only the app has."""
    conf = {"task_time_limit": 90, "task_acks_late": True}
    app = make_app(REDIS_BROKER, **conf, **patient(60))
    for name, function, options in (
        ("long", reindex, {}),
        ("early", reindex, {"acks_late": False}),
        ("celerys", reindex, {"base": Task}),
        # Without autoretry_for a delay counts where the function names retry.
        ("retried", reindex_later, {"time_limit": 30, "default_retry_delay": 90}),
        ("as_it_always_is", reindex_later, {"time_limit": 30, "default_retry_delay": 180}),
        ("not_named", reindex, {"time_limit": 30, "default_retry_delay": 90}),
    ):
        add_task(app, function, name=name, **options)
    told = by_task()
    assert set(told) == {"long", "retried"}
    assert "a time_limit of 90 s" in told["long"][1]
    assert "a default_retry_delay of 90 s" in told["retried"][1]


def test_the_limit_of_a_single_instance_task_is_told_once(make_app: MakeApp) -> None:
    """W011 tells it, and W020 what else is too long."""
    app = make_app(REDIS_BROKER, **patient(60), **SOFT)
    add_task(app, single_instance(idempotent(reindex)), time_limit=90, **RETRIED, **SURE)
    assert numbers() == ["W011", "W020"]
    app.tasks.clear()
    add_task(app, time_limit=90, **RETRIED, **SURE)
    assert numbers() == ["W020", "W020"]


def test_a_countdown_of_beat(make_app: MakeApp) -> None:
    """W020 names beat's entry, of any form, that sends a task later than the broker waits."""
    app = make_app(REDIS_BROKER, **patient(60))
    add_task(app, reindex)
    every, late = schedules.schedule(60), {"countdown": 90.5}
    app.conf.beat_schedule = {
        "soon": {"task": NAME, "schedule": 60, "options": {"countdown": 60}},
        "nothing": {"task": NAME, "schedule": 60, "options": None},
        "other": {"task": "shop.tasks.other", "schedule": 60, "options": late},
        "late": ScheduleEntry("late", NAME, schedule=every, options=late, app=app),
        7: {"task": NAME, "schedule": 60, "options": late},
    }
    for (number, text, _), entry in zip(said(), ("late", "7"), strict=True):
        assert number == "W020"
        assert f"in beat's entry {entry!r} a countdown of 90.5 s" in text
    for schedule in (None, ["nightly"], "shop.schedule"):
        app.conf.beat_schedule = schedule
        assert (schedule, said()) == (schedule, [])


def test_brokers_that_wait(make_app: MakeApp) -> None:
    """W020 and W021 are about brokers that deliver again by time, W018 about all brokers."""
    assert visibility_timeout(make_app("sqs://key:secret@")) == 3600 / 2
    for broker, conf in (
        (RABBITMQ_BROKER, {}),
        ("memory://", {}),
        ("no-such-broker://", {}),
        (REDIS_BROKER, patient("an hour")),
    ):
        app = make_app(broker, **conf)
        add_task(app, reindex, time_limit=2 * HOUR, **SURE)
        assert (broker, said()) == (broker, [])
        add_task(app, name="early", time_limit=2 * HOUR)
        assert "W018" in numbers()


# W021: a worker that is stopped.


def test_a_worker_that_is_stopped(make_app: MakeApp) -> None:
    """W021 names, once, a task that waits for the broker's patience; a soft shutdown ends it."""
    app = make_app(REDIS_BROKER, **patient(7200))
    for number in range(3):
        add_task(app, name=f"{NAME}_{number}", **SURE)
    add_task(app, reindex, name=f"{NAME}_other", **SURE)
    ((number, text, hint),) = said()
    assert (number, NAME in text) == ("W021", True)
    assert "a visibility_timeout of 7200 s" in text
    app.conf.update(dict.fromkeys(re.findall(r"Set (worker_\w+) ", hint), 10.0))
    assert said() == []


def test_no_connection_is_opened(make_app: MakeApp) -> None:
    """The checks learn from its URL what the broker is, and do not ask it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        app = make_app(f"redis://127.0.0.1:{listener.getsockname()[1]}/0")
        add_task(app, time_limit=2 * HOUR, **SURE)
        assert numbers() == ["W020", "W021"]
        with pytest.raises(BlockingIOError):
            listener.accept()


# W023: pages of the admin that take flags back.


def reset(pk: int) -> None:
    """Name the flag, and do nothing once."""
    print(pk, "is_welcome_email_sent")


def by_user(request: Any, obj: Any = None) -> tuple[str, ...]:
    """Let superusers alone write the flag."""
    return () if request.user.is_superuser else ("is_welcome_email_sent",)


def ask_for_what_is_not_there(request: Any, obj: Any = None) -> tuple[str, ...]:
    """Need a request of a middleware."""
    return (str(request.tenant),)


def test_a_page_that_writes_the_flag(make_app: MakeApp) -> None:
    """W023 names the page, the flag and the task, if the page's form has the flag."""
    app = make_app()
    app.task(reset, name="shop.reset", base=SafeTask, shared=False)
    admin.site.register(Person, type("Page", (admin.ModelAdmin,), {}))
    page: Any = admin.site.get_model_admin(Person)
    try:
        assert said() == []  # no task does anything by a flag
        app.task(welcome, name="shop.welcome", base=SafeTask, shared=False, **SURE)
        ((number, text, hint),) = said()
        # What a page shows may depend on who asks, or need more of a request than a check has.
        for fields, is_told in ((by_user, True), (ask_for_what_is_not_there, False)):
            page.get_readonly_fields = fields
            assert bool(said()) is is_told
        del page.get_readonly_fields
        page.readonly_fields = ["is_welcome_email_sent"]
        assert said() == []
    finally:
        admin.site.unregister(Person)
    assert number == "W023"
    assert "Page lets users edit app.Person.is_welcome_email_sent" in text
    assert "task shop.welcome" in text
    assert 'Add "is_welcome_email_sent" to its readonly_fields' in hint
