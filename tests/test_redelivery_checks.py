"""The checks of tasks that are done once: messages that come too often, or never again."""

import math
import re
import socket
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from itertools import product
from pathlib import Path
from typing import Any, Final

import pytest
from celery import Celery, Task, schedules
from celery.beat import ScheduleEntry
from celery.contrib.django.task import DjangoTask
from celery.utils.time import get_exponential_backoff_interval
from django.core import checks
from pydantic import BaseModel
from pytest_django import Settings

from django_celery_safe import SafeTask, SafeTaskMixin, idempotent, single_instance
from django_celery_safe.checks import check_workers
from django_celery_safe.delivery.copies import visibility_timeout
from tests import checking
from tests.app.models import Person
from tests.checking import TRANSPORT_OPTIONS
from tests.servers import RedisServer
from tests.test_checks import IN_MEMORY, REDIS
from tests.test_task_checks import (
    HOUR,
    NAME,
    RABBITMQ_BROKER,
    REDIS_BROKER,
    MakeApp,
    log_of_worker_with,
    make_app,
)

__all__ = ["make_app"]

pytestmark = pytest.mark.filterwarnings("ignore:Overriding setting DATABASES")

#: Options with which a task's message is redelivered if its worker dies.
SURE: dict[str, Any] = {"acks_late": True, "reject_on_worker_lost": True}
#: Lets Celery retry a task, and what W020 says of how long that may wait.
RETRIED: dict[str, Any] = {"autoretry_for": (OSError,)}
KWARGS_90 = ("in retry_kwargs a countdown", 90)
BACKOFF_90, BACKOFF_160, BACKOFF_600 = (("a longest retry_backoff", s) for s in (90, 160, 600))
#: Lets a worker that is stopped give back what it was at.
SOFT: dict[str, Any] = {"worker_soft_shutdown_timeout": 10.0}
#: Brokers that deliver nothing again by time, and one that nobody knows.
OTHER_BROKERS = [RABBITMQ_BROKER, "memory://", "filesystem://", "no-such-broker://"]


@pytest.fixture(autouse=True)
def _no_faults(settings: Settings) -> None:
    """Begin with settings that no check complains of, in a form that needs no server."""
    settings.CACHES = {"default": REDIS}
    settings.DATABASES = {"default": {"ENGINE": "django.db.backends.postgresql", "NAME": "data"}}
    settings.DJANGO_CELERY_SAFE = {}


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


def by_task() -> dict[str, tuple[str, str, str]]:
    """Return what our checks say by task, if that is one thing of each."""
    messages = [(text.split()[1], number, text, hint) for number, text, hint in said()]
    assert len({name for name, *_ in messages}) == len(messages)
    return {name: (number, text, hint) for name, number, text, hint in messages}


def only() -> tuple[str, str, str]:
    """Return what our checks say, if that is one thing."""
    (message,) = said()
    return message


def patient(timeout: float | None) -> dict[str, Any]:
    """Return the configuration of a broker that waits so long for an acknowledgement."""
    if timeout is None:
        return {}
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


class Order(BaseModel):
    """The argument of a pydantic task."""

    pk: int


def take(order: Order) -> None:
    """Do a thing once, for a model."""
    with Person.do_once(order.pk, "is_welcome_email_sent") as person:
        assert person


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate as a project does."""

    @wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


def logged_barely(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate as some libraries do, without the attributes of what they wrap."""

    @wraps(function, updated=())
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


class Greeter:
    """A class with methods that is no task."""

    def greet(self, pk: int) -> None:
        """Do a thing once."""
        welcome_again(pk)
        Person.do_once(pk, "is_welcome_email_sent")


def welcome_again(pk: int) -> None:
    """Stand for other work."""


# W018, W019: whose worker dies.


#: What the app says of acknowledgement, and its tasks: base, options, and what is told of it.
NEVER_DONE: Final[list[tuple[dict[str, Any], list[tuple[type | None, dict[str, Any], Any]]]]] = [
    (
        {},
        [
            (SafeTask, {}, "W018"),
            (Task, {}, "W018"),
            (None, {}, "W018"),
            (SafeTask, {"reject_on_worker_lost": True}, "W018"),
            (SafeTask, {"acks_late": True}, "W019"),
            (Task, {"acks_late": True}, "W019"),
            (None, {"acks_late": True}, "W019"),
            (SafeTask, SURE, None),
            (Task, SURE, None),
            (None, SURE, None),
        ],
    ),
    (
        {"task_acks_late": True},
        [(SafeTask, {}, "W019"), (Task, {}, "W019"), (SafeTask, {"acks_late": False}, "W018")],
    ),
    (
        {"task_acks_late": True, "task_reject_on_worker_lost": True},
        [
            (SafeTask, {}, None),
            (Task, {}, None),
            (SafeTask, {"reject_on_worker_lost": False}, "W019"),
        ],
    ),
    ({"task_reject_on_worker_lost": True}, [(SafeTask, {"acks_late": True}, None)]),
    ({"task_annotations": {f"{NAME}_0": SURE}}, [(SafeTask, {}, None), (SafeTask, {}, "W018")]),
    ({"task_annotations": {"*": {"acks_late": True}}}, [(SafeTask, {}, "W019")]),
]


@pytest.mark.parametrize(("conf", "tasks"), NEVER_DONE, ids=[str(conf) for conf, _ in NEVER_DONE])
def test_a_task_that_is_never_done(
    make_app: MakeApp, conf: dict[str, Any], tasks: list[tuple[type | None, dict[str, Any], Any]]
) -> None:
    """W018 tells of an early acknowledgement, W019 of one for a killed run; of any task base."""
    app = make_app(**conf)
    for place, (base, options, _) in enumerate(tasks):
        add_task(app, base=base, name=f"{NAME}_{place}", **options)
    told = by_task()
    assert {name: number for name, (number, _, _) in told.items()} == {
        f"{NAME}_{place}": number for place, (_, _, number) in enumerate(tasks) if number
    }
    for number, text, hint in told.values():
        assert {"W018": "acks_late is off", "W019": "reject_on_worker_lost is off"}[number] in text
        assert "reject_on_worker_lost=True" in hint
        assert "max_deaths" in hint
        assert ("acks_late=True" in hint) is (number == "W018")
        assert ("is repeated at each delivery" in hint) is (number == "W018")


@pytest.mark.parametrize("options", [{}, {"acks_late": True}])
def test_the_hints_about_acknowledgement_can_be_followed(
    make_app: MakeApp, options: dict[str, Any]
) -> None:
    """Who sets on the task what the hint of W018 or W019 says hears no more."""
    app = make_app()
    add_task(app, **options)
    _, _, hint = only()
    app.tasks.clear()
    follow = dict.fromkeys(re.findall(r"(\w+)=True", hint), True)
    add_task(app, **{**options, **follow})
    assert said() == []


def test_whichever_the_broker(make_app: MakeApp) -> None:
    """W018 and W019 are about the worker: they come with every broker."""
    app = make_app(**SOFT)
    add_task(app)
    add_task(app, name=f"{NAME}_late", acks_late=True)
    for broker in (REDIS_BROKER, *OTHER_BROKERS):
        app.conf.update(broker_url=broker)
        assert (broker, numbers()) == (broker, ["W018", "W019"])


#: Functions that do something once, and options of their tasks.
ONCE: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "do_once": (welcome, {}),
    "with idempotent": (charge, {}),
    "@idempotent": (idempotent(reindex), {}),
    "@idempotent with a key": (idempotent("{pk}")(reindex), {}),
    "@idempotent in @single_instance": (single_instance(idempotent(reindex)), {}),
    "@single_instance": (single_instance(welcome), {}),
    "decorated": (logged(logged(welcome)), {}),
    "decorated @idempotent": (logged(idempotent(reindex)), {}),
    "decorated barely": (logged_barely(idempotent(reindex)), {}),
    "autoretry": (welcome, {"autoretry_for": (OSError,)}),
    "@idempotent, autoretry": (idempotent(reindex), {"autoretry_for": (OSError,)}),
    "pydantic": (take, {"pydantic": True}),
    "pydantic, autoretry": (take, {"pydantic": True, "autoretry_for": (OSError,)}),
    "a method": (Greeter().greet, {}),
}


def test_what_is_done_once(make_app: MakeApp) -> None:
    """A task that names do_once or idempotent is one, behind whatever wraps its function."""
    app, wanted = make_app(), set()
    for base in (SafeTask, Task):
        for what, (function, options) in ONCE.items():
            name = f"{base.__name__}:{what.replace(' ', '_')}"
            add_task(app, function, base=base, name=name, **options)
            wanted.add(name)
    assert {name: number for name, (number, _, _) in by_task().items()} == dict.fromkeys(
        wanted, "W018"
    )


class WelcomeTask(SafeTask):
    """A task as a class, which does a thing once."""

    name = NAME

    def run(self, pk: int) -> None:
        """Do a thing once."""
        welcome_again(pk)
        Person.do_once(pk, "is_welcome_email_sent")


class ChargeTask(DjangoTask):  # type: ignore[type-arg]
    """A task as a class of Celery's, decorated."""

    name = NAME

    @idempotent(key="{pk}")
    def run(self, pk: int) -> None:
        """Charge."""


class PrintTask(SafeTask):
    """A task without code of Python's."""

    name = f"{NAME}_print"
    run = staticmethod(print)


class LateWelcomeTask(WelcomeTask):
    """A task that inherits its work, and is sure."""

    acks_late = True
    reject_on_worker_lost = True


class RetriedWelcomeTask(WelcomeTask):
    """A task as a class, which Celery retries."""

    autoretry_for = (OSError,)


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (WelcomeTask, ["W018"]),
        (ChargeTask, ["W018"]),
        (RetriedWelcomeTask, ["W018"]),
        (LateWelcomeTask, []),
    ],
)
def test_a_task_that_is_a_class(
    make_app: MakeApp, cls: type[SafeTask], expected: list[str]
) -> None:
    """A class' run is looked at, an inherited one too, and its attributes count."""
    make_app().register_task(cls())
    assert numbers() == expected


def test_what_is_not_done_once(make_app: MakeApp) -> None:
    """W018, W019 and W021 are silent about other tasks, which Celery may lose as it does."""
    app = make_app(REDIS_BROKER)
    for place, function in enumerate((reindex, single_instance(reindex), logged(reindex))):
        add_task(app, function, name=f"{NAME}_{place}")
        add_task(app, function, acks_late=True, name=f"{NAME}_{place}_late")
    app.register_task(PrintTask())
    assert said() == []


# W020: tasks that wait, or run, for longer than the broker.


#: A task's options, and what W020 tells of it: what is too long, and how long it is, s.
Row = tuple[dict[str, Any], tuple[str, float] | None]
#: By the broker's patience (s; None: its default), in an app that adds nothing to its tasks.
DELIVERED_AGAIN: Final[dict[float | None, list[Row]]] = {
    None: [
        ({"time_limit": HOUR}, None),
        ({"time_limit": HOUR + 1}, ("a time_limit", 3601)),
        (
            {"autoretry_for": (OSError,), "default_retry_delay": 2 * HOUR},
            ("a default_retry_delay", 7200),
        ),
        ({"time_limit": 1234567}, ("a time_limit", 1234567)),
    ],
    60: [
        ({"time_limit": 61}, ("a time_limit", 61)),
        ({"time_limit": timedelta(seconds=90)}, ("a time_limit", 90)),
        ({"time_limit": 90, "acks_late": False}, None),
        ({"soft_time_limit": 90}, None),
        ({"autoretry_for": (OSError,)}, ("a default_retry_delay", 180)),
        ({"autoretry_for": (OSError,), "default_retry_delay": 60}, None),
        ({"default_retry_delay": 180}, None),
        # It doubles from one retry to the next, up to retry_backoff_max, and the first is single.
        ({**RETRIED, "retry_backoff": 400, "retry_backoff_max": 50}, None),
        ({**RETRIED, "retry_backoff": 10, "max_retries": 5}, BACKOFF_160),
        ({**RETRIED, "retry_backoff": 90, "max_retries": 1}, BACKOFF_90),
        (
            {**RETRIED, "retry_backoff": 10, "max_retries": 1, "retry_kwargs": {"max_retries": 5}},
            BACKOFF_160,
        ),
        ({**RETRIED, "retry_backoff": 10, "retry_kwargs": {"countdown": 90}}, None),
        # Without it each retry waits the same.
        ({**RETRIED, "retry_kwargs": {"countdown": 90}}, KWARGS_90),
        ({**RETRIED, "retry_kwargs": {"countdown": 30}}, None),
        ({**RETRIED, "retry_kwargs": {"max_retries": 9}}, ("a default_retry_delay", 180)),
        # A task that is never retried waits for nothing.
        ({**RETRIED, "max_retries": 0}, None),
        ({**RETRIED, "retry_kwargs": {"max_retries": 0, "countdown": 90}}, None),
        ({**RETRIED, "retry_backoff": 400, "max_retries": 0}, None),
        ({"retry_backoff": 400, "retry_kwargs": {"countdown": 90}}, None),
    ],
    60.5: [({"time_limit": 60}, None)],
    2 * HOUR: [({"time_limit": 2 * HOUR}, None)],
    1234567: [({"time_limit": 1234568}, ("a time_limit", 1234568))],
    3: [({**RETRIED, "retry_backoff": True}, ("a longest retry_backoff", 4))],
    4: [({**RETRIED, "retry_backoff": True}, None)],
    160: [({**RETRIED, "retry_backoff": 10, "max_retries": 5}, None)],
    180: [({"autoretry_for": (OSError,)}, None)],
    300: [
        ({**RETRIED, "retry_backoff_max": 600}, None),
        ({**RETRIED, "retry_backoff": 400, "retry_backoff_max": 600}, BACKOFF_600),
    ],
    599: [
        ({**RETRIED, "retry_backoff": 10, "max_retries": 50}, BACKOFF_600),
        ({**RETRIED, "retry_backoff": 1, "max_retries": None}, BACKOFF_600),
    ],
    600: [
        ({**RETRIED, "retry_backoff": 400, "retry_backoff_max": 600}, None),
        ({**RETRIED, "retry_backoff": 10, "max_retries": 50}, None),
        ({**RETRIED, "retry_backoff": 1, "max_retries": 10**6}, None),
    ],
}


def assert_delivered_again(
    make_app: MakeApp, timeout: float | None, tasks: list[Row], **conf: Any
) -> None:
    """Assert what W020 says of tasks of any base, and that its longest suggestion ends it."""
    app, wanted = make_app(REDIS_BROKER, **SOFT, **conf, **patient(timeout)), {}
    for place, (options, told) in enumerate(tasks):
        for base in (SafeTask, Task):
            name = f"{NAME}_{place}_{base.__name__}"
            given = {**SURE, **options}
            if given["acks_late"] is None:
                del given["acks_late"]
            add_task(app, base=base, name=name, **given)
            if told:
                wanted[name] = told
    found = {name: message for name, message in by_task().items() if message[0] != "W018"}
    assert found.keys() == wanted.keys()
    longest = 0
    for name, (what, seconds) in wanted.items():
        number, text, hint = found[name]
        assert number == "W020"
        assert text.startswith(f"Task {name} has {what} of {seconds} s, but after ")
        assert f"a visibility_timeout of {timeout or HOUR} s the broker delivers it again" in text
        assert "RabbitMQ with a consumer_timeout above that" in hint
        suggested = re.search(r'"visibility_timeout": (\d+)', hint)
        assert suggested is not None
        assert int(suggested[1]) > seconds
        longest = max(longest, int(suggested[1]))
    if longest:
        app.conf.update(patient(longest))
        assert "W020" not in numbers()


@pytest.mark.parametrize("timeout", DELIVERED_AGAIN)
def test_a_message_that_is_delivered_again(make_app: MakeApp, timeout: float | None) -> None:
    """W020 tells what lasts longer than a Redis waits, of a task that is done once, of any base."""
    assert_delivered_again(make_app, timeout, DELIVERED_AGAIN[timeout])


@pytest.mark.parametrize(
    ("conf", "tasks"),
    [
        ({"task_time_limit": 90}, [({}, ("a time_limit", 90)), ({"time_limit": 30}, None)]),
        ({"task_acks_late": True}, [({"time_limit": 90, "acks_late": None}, ("a time_limit", 90))]),
    ],
)
def test_what_the_app_says_counts_for_its_tasks(
    make_app: MakeApp, conf: dict[str, Any], tasks: list[Row]
) -> None:
    """W020 goes by the time limit and the acknowledgement of the app, where a task has none."""
    assert_delivered_again(make_app, 60, tasks, **conf)


def test_whose_business_it_is(make_app: MakeApp) -> None:
    """W020 is about safe tasks and those that are done once; others are Celery's business."""
    app = make_app(REDIS_BROKER, **patient(60))
    for base in (SafeTask, Task):
        name = base.__name__
        add_task(app, reindex, base=base, name=name, time_limit=90, **SURE)
        add_task(app, reindex_later, base=base, name=f"{name}_later", default_retry_delay=90)
    assert {name: number for name, (number, _, _) in by_task().items()} == {
        "SafeTask": "W020",
        "SafeTask_later": "W020",
    }


class AppTask(SafeTaskMixin):
    """A safe task of a project."""

    abstract = True


def test_a_task_that_asks_for_its_retry(make_app: MakeApp) -> None:
    """Without autoretry_for a delay of the task's own counts where its function names retry."""
    app = make_app(REDIS_BROKER, **patient(60))
    for name, function, options in (
        ("told", reindex_later, {"default_retry_delay": 90}),
        ("told_with_backoff", reindex_later, {"default_retry_delay": 90, "retry_backoff": 400}),
        ("short", reindex_later, {"default_retry_delay": 60}),
        ("as_it_always_is", reindex_later, {"default_retry_delay": 180}),
        ("without", reindex_later, {}),
        ("not_named", reindex, {"default_retry_delay": 90}),
    ):
        add_task(app, function, base=AppTask, name=name, **options)
    told = by_task()
    assert set(told) == {"told", "told_with_backoff"}
    for number, text, _ in told.values():
        assert number == "W020"
        assert "a default_retry_delay of 90 s" in text


def test_the_longest_retry_is_that_of_celery(make_app: MakeApp) -> None:
    """W020 shows the longest backoff that Celery computes for any of the retries."""
    app, wanted = make_app(REDIS_BROKER, **patient(0.5)), {}
    for backoff, count, longest in product((1, 2.9, 7, True, 1000), (1, 2, 3, 8), (1, 50, 3000)):
        name = f"{NAME}_{backoff}_{count}_{longest}"
        options = {"retry_backoff": backoff, "max_retries": count, "retry_backoff_max": longest}
        add_task(app, reindex, name=name, **RETRIED, **options)
        waits = [
            get_exponential_backoff_interval(int(max(1.0, backoff)), retries, longest)
            for retries in range(count)
        ]
        wanted[name] = f"a longest retry_backoff of {max(waits)} s"
    told = by_task().items()
    assert {name: text.split(" has ")[1].split(",")[0] for name, (_, text, _) in told} == wanted


def test_several_waits_are_several_messages(make_app: MakeApp) -> None:
    """A time limit, and a retry's delay, that are too long are told one by one."""
    app = make_app(REDIS_BROKER, **patient(60), **SOFT)
    add_task(app, autoretry_for=(OSError,), time_limit=90, **SURE)
    texts = [text for _, text, _ in said()]
    assert len(texts) == 2
    assert "a time_limit of 90 s" in texts[0]
    assert "a default_retry_delay of 180 s" in texts[1]


def test_the_limit_of_a_single_instance_task_is_told_once(make_app: MakeApp) -> None:
    """W011 tells it, and W020 what else is too long."""
    app = make_app(REDIS_BROKER, **patient(60), **SOFT)
    function = single_instance(idempotent(reindex))
    add_task(app, function, time_limit=90, **SURE)
    assert numbers() == ["W011"]
    app.tasks.clear()
    add_task(app, function, time_limit=90, autoretry_for=(OSError,), **SURE)
    assert numbers() == ["W011", "W020"]
    assert "a default_retry_delay" in said()[1][1]


def test_a_countdown_of_beat(make_app: MakeApp) -> None:
    """W020 names beat's entry that sends a task later than the broker waits."""
    app = make_app(REDIS_BROKER)
    add_task(app, reindex)
    for countdown, timeout, told in (
        (61, 60, "61"), (60, 60, None), (None, 60, None),
        (90.5, 60, "90.5"), (2 * HOUR, HOUR, "7200"),
    ):  # fmt: skip
        options = {} if countdown is None else {"countdown": countdown}
        app.conf.update(patient(timeout))
        app.conf.beat_schedule = {
            "nightly": {"task": NAME, "schedule": 60, "options": options},
            "plain": {"task": NAME, "schedule": 60},
            "nothing": {"task": NAME, "schedule": 60, "options": None},
            "other": {"task": "shop.tasks.other", "schedule": 60, "options": {"countdown": 10**6}},
        }
        messages = [(number, text) for number, text, _ in said()]
        assert [number for number, _ in messages] == (["W020"] if told else []), countdown
        if told:
            assert f"in beat's entry 'nightly' a countdown of {told} s" in messages[0][1]


def test_an_entry_of_beat_that_is_an_object(make_app: MakeApp) -> None:
    """A schedule may have entries as Celery's beat makes them, beside dicts and with any name."""
    app = make_app(REDIS_BROKER, **patient(60))
    late, plain, every = ({"countdown": 90}, None, schedules.schedule(60))
    app.conf.beat_schedule = {
        "late": ScheduleEntry("late", NAME, schedule=every, options=late, app=app),
        "plain": ScheduleEntry("plain", NAME, schedule=every, options=plain, app=app),
        7: {"task": NAME, "schedule": 60, "options": late},
    }
    add_task(app, reindex)
    texts = [text for _, text, _ in said()]
    assert len(texts) == 2
    for name, text in zip(("late", "7"), texts, strict=True):
        assert f"in beat's entry {name!r} a countdown of 90 s" in text


def test_a_schedule_that_is_none(make_app: MakeApp) -> None:
    """A beat_schedule that is no dict has no entries to tell of, and breaks no check."""
    app = make_app(REDIS_BROKER, **patient(60))
    add_task(app, reindex)
    schedules: list[Any] = [None, {}, [], ["nightly"], "shop.schedule", 60]
    for schedule in schedules:
        app.conf.beat_schedule = schedule
        assert (schedule, said()) == (schedule, [])


@pytest.mark.parametrize(
    ("broker", "options", "seconds"),
    [
        ("sqs://", {}, 1800),
        ("sqs://key:secret@", {"region": "eu-central-1"}, 1800),
        ("sqs://", {"visibility_timeout": 60}, 60),
        (REDIS_BROKER, {}, 3600),
        (REDIS_BROKER, {"visibility_timeout": 60}, 60),
    ],
)
def test_how_patient_a_broker_is(
    make_app: MakeApp, broker: str, options: dict[str, Any], seconds: float
) -> None:
    """Without a setting it is kombu's own default, half an hour with SQS and one with Redis."""
    app = make_app(broker, broker_transport_options=options)
    assert visibility_timeout(app) == seconds


def test_brokers_that_wait(make_app: MakeApp) -> None:
    """W020 and W021 are about brokers that deliver again by time, and silent with others."""
    app = make_app(**patient(60))
    app.conf.beat_schedule = {"x": {"task": NAME, "schedule": 60, "options": {"countdown": 90}}}
    add_task(app, autoretry_for=(OSError,), time_limit=90, **SURE)
    for broker in OTHER_BROKERS:
        app.conf.update(broker_url=broker)
        assert (broker, said()) == (broker, [])
    app.conf.update(broker_url=REDIS_BROKER)
    assert set(numbers()) == {"W020", "W021"}


def test_a_timeout_that_means_nothing(make_app: MakeApp) -> None:
    """A visibility_timeout that is no number leaves what there is to say of the task alone."""
    app = make_app(REDIS_BROKER)
    add_task(app, time_limit=2 * HOUR)
    for timeout in ("an hour", None, [60]):
        options = {**TRANSPORT_OPTIONS, "visibility_timeout": timeout}
        app.conf.update(broker_transport_options=options)
        assert (timeout, numbers()) == (timeout, ["W018"])


# W021: a worker that is stopped.


@pytest.mark.parametrize(
    ("options", "conf", "told"),
    [
        (SURE, {}, True),
        ({"acks_late": True}, {"task_reject_on_worker_lost": True}, True),
        ({"reject_on_worker_lost": True}, {"task_acks_late": True}, True),
        (SURE, SOFT, False),
        (SURE, {"worker_soft_shutdown_timeout": 0.0}, True),
        (SURE, {"worker_enable_soft_shutdown_on_idle": True}, True),
    ],
)
def test_a_worker_that_is_stopped(
    make_app: MakeApp, options: dict[str, Any], conf: dict[str, Any], told: bool
) -> None:
    """W021 names a task that waits for the broker's patience, unless the shutdown is soft."""
    app = make_app(REDIS_BROKER, **conf, **patient(7200))
    add_task(app, **options)
    if not told:
        assert said() == []
        return
    number, text, hint = only()
    assert number == "W021"
    assert NAME in text
    assert "a visibility_timeout of 7200 s" in text
    app.conf.update(dict.fromkeys(re.findall(r"Set (worker_\w+) ", hint), 10.0))
    assert said() == []


def test_a_stopped_worker_is_told_once(make_app: MakeApp) -> None:
    """W021 is about the worker: one message for all tasks, and none for early ones."""
    app = make_app(REDIS_BROKER)
    for number in range(3):
        add_task(app, name=f"{NAME}_{number}", **SURE)
    add_task(app, reindex, name=f"{NAME}_other", **SURE)
    assert numbers() == ["W021"]
    app.tasks.clear()
    add_task(app, reindex, **SURE)
    assert said() == []
    add_task(app, name=f"{NAME}_early")
    assert numbers() == ["W018"]


def test_all_hints_followed(make_app: MakeApp) -> None:
    """A task that heard W018 has nothing left to hear once each hint was followed in turn."""
    app = make_app(REDIS_BROKER)
    add_task(app, time_limit=2 * HOUR)
    assert numbers() == ["W018"]
    app.tasks.clear()
    add_task(app, time_limit=2 * HOUR, **SURE)
    assert numbers() == ["W020", "W021"]
    app.conf.update({**patient(3 * HOUR), **SOFT})
    assert said() == []


# All of these checks.


def test_tasks_that_can_not_be_loaded_are_told_once(make_app: MakeApp) -> None:
    """W007 says it, and these checks say nothing of what they can't see."""
    app = make_app(REDIS_BROKER)
    add_task(app)
    app.conf.include = ["no_such_module_of_tasks"]
    assert numbers() == ["W007"]


def test_what_is_silenced_is_not_told(make_app: MakeApp, settings: Settings) -> None:
    """A project that means it silences a check by its id, in ``check`` and in a worker."""
    add_task(make_app())
    settings.SILENCED_SYSTEM_CHECKS = ["django_celery_safe.W018"]
    messages = checking.find_messages()
    assert [message.is_silenced() for message in messages] == [True]


def test_no_connection_is_opened(make_app: MakeApp) -> None:
    """The checks learn from its URL what the broker is, and do not ask it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        app = make_app(f"redis://127.0.0.1:{listener.getsockname()[1]}/0")
        add_task(app, time_limit=2 * HOUR, **SURE)
        assert numbers() == ["W020", "W021"]
        with pytest.raises(BlockingIOError):
            listener.accept()


ONCE_TASKS = """
from celery import shared_task
from django_celery_safe import SafeTask, idempotent


@shared_task(base=SafeTask)
@idempotent
def early(): ...


@shared_task(base=SafeTask, acks_late=True, time_limit=90)
@idempotent
def late(): ...
"""


def test_a_worker_logs_them(settings: Settings, tmp_path: Path, redis_server: RedisServer) -> None:
    """A worker on a real Redis starts, and logs each of them as a warning."""
    redis_server.flush()
    settings.DATABASES = IN_MEMORY
    settings.CELERY_BROKER_URL = redis_server.database_url(1)
    settings.CELERY_BROKER_TRANSPORT_OPTIONS = {**TRANSPORT_OPTIONS, "visibility_timeout": 60}
    lines = log_of_worker_with(tmp_path, "once_shop_tasks", ONCE_TASKS)
    for number, text in {
        "W018": "Task once_shop_tasks.early does its work only once",
        "W019": "Task once_shop_tasks.late acknowledges late",
        "W020": "Task once_shop_tasks.late has a time_limit of 90 s",
        "W021": "such as once_shop_tasks.late",
    }.items():
        # The tests' own tasks are in this worker, too.
        told = [each for each in lines if f"django_celery_safe.{number}" in each]
        (line,) = [each for each in told if text in each]
        assert "WARNING" in line


# E001


def test_a_retention_that_means_nothing(make_app: MakeApp, settings: Settings) -> None:
    """E001 tells of an IDEMPOTENCY_RETENTION that is no time, with the default as its hint."""
    make_app()
    none: list[Any] = [0, -1, 0.0, timedelta(), True]
    for value in [*none, "7d", math.nan, math.inf, timedelta(days=99_999), []]:
        settings.DJANGO_CELERY_SAFE = {"IDEMPOTENCY_RETENTION": value}
        (message,) = checking.find_messages()
        assert (message.id, message.level) == ("django_celery_safe.E001", checks.ERROR)
        assert message.msg.startswith(f"IDEMPOTENCY_RETENTION={value!r} is not a valid time")
        assert message.hint == "The default is 7 days."


def test_a_retention_that_means_something(make_app: MakeApp, settings: Settings) -> None:
    """Seconds above 0 and timedeltas are times, and None is for ever."""
    make_app()
    for value in (None, 1, 0.5, timedelta(days=30), 3 * 365 * 86400):
        settings.DJANGO_CELERY_SAFE = {"IDEMPOTENCY_RETENTION": value}
        assert (value, said()) == (value, [])
