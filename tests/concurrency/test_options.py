"""Options of ``@single_instance``: accepted, and refused at import; the function stays."""

import inspect
import typing
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from celery import Task, shared_task
from pydantic import BaseModel

from django_celery_safe import ConfigurationError, SafeTask, iter_locks, single_instance
from django_celery_safe.conf import UNSET
from tests.concurrency.mailbox import Mailbox
from tests.versions import IS_CELERY_57


def import_feed(feed_url: str, limit: int = 10) -> int:
    """Fetch the entries of a feed."""
    return limit


HERE = r"tests\.concurrency\.test_options\.import_feed"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"on_conflict": "retyr"}, r"'retyr' is not known.*'skip', 'retry'.*mean 'retry'\?"),
        ({"retry_delay": 5}, r"retry_delay=5 has no meaning with on_conflict='skip'"),
        ({"retry_delay": -1, "on_conflict": "retry"}, r"retry_delay=-1 is no"),
        ({"on_conflict": "wait"}, r"blocking_timeout=None is not a .* above 0: with on_conflict"),
        ({"on_conflict": "wait", "blocking_timeout": -1}, r"-1 is not a valid time to wait"),
        ({"blocking_timeout": 5}, r"blocking_timeout=5 has no meaning with on_conflict='skip'"),
        ({"timeout": None}, r"timeout=None is not a valid lease"),
        ({"key": None}, r"key=None can't say which calls are the same"),
        *(({"lock": lock}, f"lock={lock!r} can't stand before") for lock in ("", 7, "sent:x")),
        ({"key": [7]}, r"key=\[7\] can't say"),
    ],
)
def test_options_without_a_meaning_are_refused(options: dict[str, Any], sentence: str) -> None:
    """An option that is unknown, or contradicts another, is an error where it is written."""
    with pytest.raises(ConfigurationError, match=sentence):
        single_instance(**options)


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("feed", rf"'feed' of {HERE} names no argument.*key=\[\]"),
        ("{feed_ulr}", rf"of {HERE} names 'feed_ulr'.*feed_url, limit\. Did you mean 'feed_url'\?"),
        ("{feed_url}-{limits[0]}", rf"of {HERE} names 'limits'.*mean 'limit'\?"),
        ("{}", rf"of {HERE} names ''"),
        (["feed_url", "user"], rf"of {HERE} names 'user'"),
        ("{feed_url", rf"'{{feed_url' of {HERE} is not a format string"),
    ],
)
def test_a_key_that_names_no_argument_is_refused(key: Any, sentence: str) -> None:
    """A key of names that the function does not take is an error at import, naming the function."""
    with pytest.raises(ConfigurationError, match=sentence):
        single_instance(key=key)(import_feed)


@pytest.mark.parametrize("kind", ["shared_task", "lazy app task", "finalized app task", "instance"])
def test_standing_above_the_task_decorator_is_refused(kind: str, mailbox: Mailbox) -> None:
    """Above ``@shared_task`` or ``@app.task`` it raises a TypeError that shows the right order."""
    app = mailbox.app
    if kind == "finalized app task":
        app.finalize()
    task: Any = {
        "shared_task": lambda: shared_task(import_feed, name="tests.above"),
        "lazy app task": lambda: mailbox.task(import_feed),
        "finalized app task": lambda: mailbox.task(import_feed),
        "instance": SafeTask,
    }[kind]()
    for decorate in (single_instance, single_instance(key="{feed_url}")):
        with pytest.raises(TypeError, match=r"stands above(.|\n)*@shared_task\n +@single_instance"):
            decorate(task)
    assert app.finalized is (kind == "finalized app task")


def test_a_decorated_function_looks_as_before(mailbox: Mailbox) -> None:
    """Name, module, docstring, annotations and signature stay, and so does what Celery makes."""
    for decorate in (single_instance, single_instance(key=["feed_url"], timeout=5)):
        decorated: Any = decorate(import_feed)
        assert (decorated.__name__, decorated.__module__) == ("import_feed", __name__)
        assert typing.get_type_hints(decorated) == {"feed_url": str, "limit": int, "return": int}
        assert inspect.signature(decorated) == inspect.signature(import_feed)
        assert inspect.getfullargspec(decorated).args == ["feed_url", "limit"]
    task = mailbox.task(decorated)
    plain = mailbox.task(import_feed, name="plain")
    assert task.name == f"{__name__}.import_feed"
    assert task.__doc__ == plain.__doc__ == "Fetch the entries of a feed."
    assert (task.acks_late, task.max_retries) == (plain.acks_late, plain.max_retries)


@pytest.mark.parametrize(("base", "bind"), [(Task, False), (SafeTask, True)])
def test_arguments_are_checked_at_the_call(base: type, bind: bool, mailbox: Mailbox) -> None:
    """Wrong arity raises at ``.delay()``, as it does without the decorator; nothing is sent."""
    if bind:

        def function(self: Any, feed_url: str, limit: int = 10) -> None: ...
    else:
        function = import_feed  # type: ignore[assignment]
    task = mailbox.task(single_instance(function), base=base, bind=bind)
    with pytest.raises(TypeError, match="feed_url"):
        task.delay()
    with pytest.raises(TypeError, match="speed"):
        task.delay("x", speed=1)
    assert mailbox.take() == []
    task.delay("x", limit=3)
    assert mailbox.take_one().kwargs == {"limit": 3}


class Album(BaseModel):
    """A model as a task's argument."""

    pk: int
    title: str = ""


def held_names() -> list[str]:
    """Return what is locked now."""
    return [lock.name for lock in iter_locks()]


def plain(pk: int, limit: int = 10) -> Any:
    """Return the names of the locks."""
    return held_names()


def bound(self: Any, pk: int, limit: int = 10) -> Any:
    """Return the names of the locks."""
    assert isinstance(self, Task)
    return held_names()


def with_model(self: Any, album: Album, limit: int = 10) -> Any:
    """Return the names of the locks."""
    assert isinstance(self, Task)
    assert isinstance(album, Album)
    return held_names()


#: Every way to make a task: function, template, first argument, options of the task.
KINDS: dict[str, tuple[Callable[..., Any], str, Any, dict[str, Any]]] = {
    "plain": (plain, "{pk}", 7, {}),
    "bound": (bound, "{pk}", 7, {"bind": True}),
    "class": (bound, "{pk}", 7, {}),
    "bound autoretry": (bound, "{pk}", 7, {"autoretry_for": (Exception,), "bind": True}),
    "pydantic": (
        with_model,
        "{album[pk]}",
        {"pk": 7},
        {"pydantic": True, "autoretry_for": (Exception,), "bind": True},
    ),
    "pickle": (plain, "{pk}", 7, {"serializer": "pickle"}),
}


def make_task(mailbox: Mailbox, kind: str, base: Any, **given: Any) -> Any:
    """Return a single-instance task of that kind."""
    function, template, _, options = KINDS[kind]
    function = single_instance(**{"key": template, **given})(function)
    if kind == "class":
        task_class = type("ClassBased", (base,), {"name": "tests.class_based", "run": function})
        return mailbox.app.register_task(task_class())
    return mailbox.task(function, base=base, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_the_key_of_the_send_is_the_key_of_the_run(
    kind: str, mailbox: Mailbox, locks_in_memory: None
) -> None:
    """A message without a key runs under the lock that a header with one names."""
    with closing(Mailbox()) as other:
        safe = make_task(mailbox, kind, SafeTask, key=UNSET)
        celerys = make_task(other, kind, Task, key=UNSET)
        for args in [(KINDS[kind][2],), (KINDS[kind][2], 10)]:
            safe.apply_async(args, single_instance={})
            safe.delay(*args)
            celerys.delay(*args)
            (with_key, safe_without), without = mailbox.take(), other.take_one()
            assert safe_without.ours == without.ours == {}
            expected = [f"{safe.name}:{with_key.ours['key']}"]
            assert mailbox.deliver(with_key).value == expected
            assert mailbox.deliver(safe_without).value == expected
            assert other.deliver(without).value == expected
            assert safe.lock_name(*args) == expected[0]


@pytest.mark.skipif(not IS_CELERY_57, reason="Celery before 5.7 can't send a model")
def test_models_have_the_key_of_their_dump(mailbox: Mailbox, locks_in_memory: None) -> None:
    """A pydantic model passed by the caller counts as what travels, not as an object."""
    task = make_task(mailbox, "pydantic", SafeTask, key=["album"])
    task.delay(Album(pk=7))
    task.delay({"pk": 7, "title": ""})
    task.delay(Album(pk=8))
    names = [mailbox.deliver(message).value for message in mailbox.take()]
    assert names[0] == names[1] != names[2]
