"""Projects' own tests: a plain Django TestCase, eager tasks, and captureOnCommitCallbacks."""

from collections.abc import Callable
from typing import Any

import pytest
from celery import chain, chord, group, shared_task
from celery.canvas import Signature
from celery.result import EagerResult, GroupResult
from django.db import transaction
from django.test import TestCase

from django_celery_safe import ConfigurationError, NotSerializable, SafeTask, send_on_commit
from tests.app.celery import app
from tests.app.models import Person
from tests.app.tasks import add, total
from tests.sending.conftest import rolled_back
from tests.sending.published import ids_in

#: Effects of the tasks below, emptied before each test.
effects: list[Any] = []


@shared_task(base=SafeTask)
def join(*args: object, **kwargs: object) -> list[Any]:
    """Note the arguments as they arrived."""
    effects.append([*args, kwargs])
    return effects[-1]  # type: ignore[no-any-return]


@shared_task(base=SafeTask, send_on_commit=True)
def join_later(value: object) -> object:
    """Wait for the commit with every send."""
    effects.append(value)
    return value


@shared_task(base=SafeTask)
def fail() -> None:
    """Raise."""
    raise LookupError("from the task")


#: A signature, what it returns, and the type of its result.
CANVASES: dict[str, tuple[Callable[[], Signature[Any]], Any, type]] = {
    "chain": (lambda: chain(app.signature(add.name, (1, 2)), add.s(3)), 6, EagerResult),
    "group from a generator": (lambda: group(add.s(n) for n in range(3)), [0, 1, 2], GroupResult),
    "chord of chords": (
        lambda: chord([chord([add.s(1), add.s(2)], total.s()), add.s(4)], total.s()),
        7,
        EagerResult,
    ),
    "group, then group, then task": (
        lambda: chain(group(add.s(1), join_later.s(2)), group(total.s(), total.s()), total.s()),
        6,
        EagerResult,
    ),
}


@pytest.mark.usefixtures("broker")
class EagerTests(TestCase):
    """The promises of the documentation to a plain TestCase."""

    def setUp(self) -> None:
        """Begin without effects."""
        effects.clear()
        app.conf.update(task_always_eager=True, task_eager_propagates=True)

    def tearDown(self) -> None:
        """Leave the app as it was."""
        app.conf.update(task_always_eager=False, task_eager_propagates=False)

    def test_a_send_waits_for_the_callbacks(self) -> None:
        """Nothing runs before captureOnCommitCallbacks does it, nor after a rollback."""
        with self.captureOnCommitCallbacks(execute=True) as callbacks:
            with rolled_back():
                join.delay_on_commit(1)
                send_on_commit(group(join.s(2), join.s(3)))
            result = join.delay_on_commit(4, key=5)
            assert effects == []
            assert (result.state, result.result) == ("PENDING", None)
        assert len(callbacks) == 1
        assert effects == [[4, {"key": 5}]]
        assert (result.state, result.get()) == ("SUCCESS", [4, {"key": 5}])
        assert result.send_error is None

    def test_what_is_wrong_is_an_error_of_the_call(self) -> None:
        """As it is for a message: the commit has nothing to do."""
        with self.captureOnCommitCallbacks() as callbacks, transaction.atomic():
            with pytest.raises(NotSerializable, match="primary key"):
                join.apply_async_on_commit((1,), link=join.s(Person()))
            with pytest.raises(ConfigurationError, match="keys"):
                join.apply_async_on_commit((1,), single_instance={"keys": []})
        assert callbacks == []

    def test_every_canvas_runs_at_the_commit(self) -> None:
        """Under the ids announced, with the values that a worker would give."""
        for name, (make, value, kind) in CANVASES.items():
            with self.subTest(name):
                with self.captureOnCommitCallbacks() as callbacks, transaction.atomic():
                    result = send_on_commit(make())
                announced = ids_in(result)
                assert type(result) is kind
                assert len(callbacks) == 1
                callbacks[0]()
                assert result.get() == value
                assert result.send_error is None
                assert ids_in(result) == announced

    def test_an_error_of_the_task_stays_in_its_result(self) -> None:
        """The callbacks after it run, also with ``task_eager_propagates``; the error is logged."""
        fails: Any = fail.s()
        for propagates in (True, False):
            app.conf.task_eager_propagates = propagates
            for canvas in (fails, chain(fails, fails), group(fails, fails), chord([fails], fails)):
                effects.clear()
                with self.assertLogs("", "ERROR"), self.captureOnCommitCallbacks(execute=True):
                    result: Any = send_on_commit(canvas)
                    join.delay_on_commit("after")
                assert effects == [["after", {}]]
                last = result[-1] if isinstance(result, GroupResult) else result
                assert last.state == "FAILURE"
                with pytest.raises(LookupError, match="from the task"):
                    last.get()
