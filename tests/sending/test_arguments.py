"""Arguments that can't be sent are errors at the call, and the errors say where they are."""

import uuid
from collections.abc import Callable
from typing import Any

import pytest
from celery import chain, chord, group, shared_task
from django.db import transaction
from django.utils.functional import SimpleLazyObject
from kombu.exceptions import EncodeError

from django_celery_safe import NotSerializable, SafeTask, send_on_commit
from tests.app.celery import app
from tests.app.models import Person
from tests.sending.published import Sent

pytestmark = pytest.mark.django_db(transaction=True)


@shared_task(base=SafeTask)
def take(*args: object, **kwargs: object) -> None:
    """Take anything."""


@shared_task(base=SafeTask)
def take_one(one: object, other: object = None) -> None:
    """Take one argument, or two."""


@shared_task
def take_plainly(*args: object, **kwargs: object) -> None:
    """Be a plain Celery task."""


#: Values that must not travel, and their names in the error.
UNSENDABLE: dict[str, tuple[Callable[[], Any], str]] = {
    "model instance": (lambda: Person(pk=1), "an instance of Person.*Pass the primary key"),
    "request.user": (
        lambda: SimpleLazyObject(lambda: Person(pk=1)),
        "an instance of Person.*Pass the primary key",
    ),
    "QuerySet": (Person.everyone.all, "a QuerySet of Person.*list of primary keys"),
    "generator": (lambda: (n for n in [1]), "instance of generator.*only once.*Pass a list"),
    "iterator": (lambda: map(str, [1]), "instance of map.*only once.*Pass a list"),
}

#: Where it stands: args and kwargs for a value, and the error's name of the place.
PLACES: dict[str, tuple[Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]], str]] = {
    "positional": (lambda value: ((1, value), {}), "args[1]"),
    "by name": (lambda value: ((), {"who": value}), "kwargs['who']"),
    "in a list": (lambda value: (([1, [value]],), {}), "args[0]"),
    "in a set": (lambda value: (([{value}],), {}), "args[0]"),
    "as a key": (lambda value: ((), {"who": {value: 1}}), "kwargs['who']"),
    "in a dict": (lambda value: ((), {"who": {"deep": ({"er": value},)}}), "kwargs['who']"),
}

#: Ways to send, each with the task's signature.
SENDS: dict[str, Callable[[Any, Any], Any]] = {
    "delay": lambda a, k: take.delay(*a, **k),
    "on commit with pickle": lambda a, k: take.apply_async_on_commit(a, k, serializer="pickle"),
    "chord in a chain in a group": lambda a, k: send_on_commit(
        group(take_plainly.s(), chain(take_plainly.s(), chord([take.s(*a, **k)], take.s())))
    ),
    "errback of a link": lambda a, k: send_on_commit(
        chain(take_plainly.s(), take_plainly.s().on_error(take.si(*a, **k)))
    ),
}


@pytest.fixture(params=["as sent", "eager"])
def mode(request: pytest.FixtureRequest, broker: object) -> str:
    """Send for real, or in eager mode: an error that only production has is found too late."""
    app.conf.task_always_eager = request.param == "eager"
    return str(request.param)


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("send", SENDS.values(), ids=SENDS.keys())
def test_it_is_refused_however_it_is_sent(send: Callable[[Any, Any], Any], sent: Sent) -> None:
    """The call raises inside the transaction, names task and argument, and nothing is sent."""
    for make, named in UNSENDABLE.values():
        with transaction.atomic(), pytest.raises(NotSerializable, match=named) as raised:
            send((1, make()), {})
        assert (raised.value.task, raised.value.argument) == (take.name, "args[1]")
    assert sent() == []


def test_a_plain_pickled_send_goes_out_as_in_celery(
    mode: str, sent: Sent, caplog: pytest.LogCaptureFixture
) -> None:
    """A model instance in a send that waits for nothing is a warning, so task_cls breaks none."""
    with transaction.atomic():
        take.apply_async((1, Person(pk=7)), serializer="pickle")
        chain(take_one.s(1), take_plainly.si(Person(pk=8))).apply_async(serializer="pickle")
    warnings = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    tasks = [take, take_plainly] if mode == "as sent" else [take]  # an eager chain sends nothing
    assert [text.partition(" is an instance of Person")[0] for text in warnings] == [
        f"args[{1 if task is take else 0}] of task {task.name}" for task in tasks
    ]
    if mode == "as sent":
        args, kwargs, _embed = sent()[0].body
        assert (args[1].pk, kwargs) == (7, {})


@pytest.mark.parametrize(("fill", "argument"), PLACES.values(), ids=PLACES.keys())
def test_it_is_found_wherever_it_stands(
    fill: Callable[[Any], Any], argument: str, sent: Sent
) -> None:
    """Nested in containers it is found too; the error names the outermost argument."""
    for make, named in UNSENDABLE.values():
        with transaction.atomic(), pytest.raises(NotSerializable, match=named) as raised:
            args, kwargs = fill(make())
            take.delay_on_commit(*args, **kwargs)
        assert raised.value.argument == argument
        assert str(raised.value).startswith(f"{argument} of task {take.name} is ")
    assert sent() == []


#: A list that contains itself.
ENDLESS: list[Any] = [1]
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize(
    ("send", "task", "argument"),
    [
        (lambda: take.delay_on_commit(1, object()), take, "args[1]"),
        (lambda: take.delay_on_commit(where={"it": [object()]}), take, "kwargs['where']"),
        (lambda: take.delay_on_commit(ENDLESS), take, "args[0]"),
        (lambda: send_on_commit(take_plainly.s({1, 2})), take_plainly, "args[0]"),
        (
            lambda: take_one.apply_async_on_commit((1,), link=chain(take.s(1), take.s(object()))),
            take,
            "args[0]",
        ),
        (lambda: take.apply_async_on_commit((lambda: None,), serializer="pickle"), take, "args[0]"),
    ],
    ids=["argument", "nested", "endless", "plain task", "chain in a link", "pickle"],
)
@pytest.mark.parametrize("protocol", [1, 2])
def test_what_the_serializer_refuses_is_an_error_at_the_call(
    send: Callable[[], Any],
    task: Any,
    argument: str,
    protocol: int,
    sent: Sent,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It names the argument, and the signature's task if it stands in one."""
    monkeypatch.setattr(app.amqp, "create_task_message", app.amqp.task_protocols[protocol])
    with transaction.atomic(), pytest.raises(NotSerializable, match="plain data") as raised:
        send()
    assert (raised.value.task, raised.value.argument) == (task.name, argument)
    assert isinstance(raised.value.__cause__, EncodeError)
    assert sent() == []


@pytest.mark.usefixtures("mode")
def test_arguments_that_do_not_fit_are_an_error_at_the_call(sent: Sent) -> None:
    """Celery's own check runs before the commit, on commit too."""
    for arguments in (take_one.s(), take_one.s(1, 2, 3), take_one.s(1, another=2)):
        with transaction.atomic(), pytest.raises(TypeError, match="argument") as raised:
            take_one.delay_on_commit(*arguments.args, **arguments.kwargs)
        assert not isinstance(raised.value, NotSerializable)
        with transaction.atomic(), pytest.raises(TypeError, match="argument"):
            send_on_commit(arguments)
    assert sent() == []


def test_what_looks_alike_can_be_sent(sent: Sent) -> None:
    """Repeated values, tuples, bytes, and the types of kombu's JSON are plain data."""
    shared = [1, 2]
    with transaction.atomic():
        take.apply_async_on_commit(
            ("text", b"bytes", (1, 2.5, None, True), shared),
            {"again": [shared, shared]},
            headers={"list": [1, {"deep": None}], "id": uuid.UUID(int=1)},
        )
    (message,) = sent()
    assert message.body[0][2:] == [[1, 2.5, None, True], [1, 2]]
    assert message.body[1] == {"again": [[1, 2], [1, 2]]}
    assert message.headers["list"] == [1, {"deep": None}]
