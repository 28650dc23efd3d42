"""Plans: valid ones, invalid ones, and their errors."""

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from celery import Celery, Task

from django_celery_safe import ConfigurationError, SafeTask, idempotent, single_instance, stages
from django_celery_safe.stages import plan as of_plans
from tests.concurrency.mailbox import Mailbox
from tests.stages.tasks import add, note, plain

pytestmark = pytest.mark.usefixtures("mailbox")

NOTE = "tests.stages.tasks.note"


def names(plan: stages.Plan) -> list[list[str]]:
    """Return the tasks of each stage."""
    return [[entry.task for entry in entries] for entries in plan.stages]


# Valid plans.


def test_higher_priorities_come_first() -> None:
    """Entries of one priority are one stage, in the order in which they were given."""
    plan = stages.make_plan([(note, 1), (add, 3), (plain, 3), (add, 2.5), (note, -1)])
    assert names(plan) == [[add.name, plain.name], [add.name], [note.name], [note.name]]
    assert [entries[0].priority for entries in plan.stages] == [3, 2.5, 1, -1]
    assert plan.params == "{}"


def test_a_task_is_given_as_it_is_or_by_name() -> None:
    """A task object, its name, a tuple or a list: all are the same entry."""
    forms: list[Any] = [(NOTE, 1), [NOTE, 1], (note, 1), (note, 1, {})]
    for entry in forms:
        assert stages.make_plan([entry]) == ([[(NOTE, 1.0, "")]], "{}")


def test_a_finished_plan_stays() -> None:
    """A finished plan keeps its entries; other params replace its own."""
    plan = stages.make_plan([(note, 1)], {"album": 7})
    assert stages.make_plan(plan) is plan
    assert stages.make_plan(plan, {"album": 8}) == plan._replace(params='{"album": 8}')
    assert stages.make_plan(plan, {}).params == "{}"


def test_the_dictionary_of_the_document() -> None:
    """The form of the document that stages are from: sub_tasks as lists, and params."""
    given = {"sub_tasks": [[NOTE, 1], [plain.name, 3]], "params": {"a": "a"}}
    plan = stages.make_plan(given)
    assert names(plan) == [[plain.name], [NOTE]]
    assert plan.params == '{"a": "a"}'
    assert stages.make_plan({"sub_tasks": [[NOTE, 1]]}, {"a": 1}).params == '{"a": 1}'
    assert stages.make_plan({"sub_tasks": [[NOTE, 1]]}).params == "{}"


def test_describe_shows_arguments() -> None:
    """The text of a plan has the arguments of each entry beside its task."""
    plan = stages.make_plan([(add, 1, {"number": 2})])
    assert plan.describe().endswith('\n  tests.stages.tasks.add {"number": 2}')


# Invalid plans.


#: A plan, the part that the error names, and the error's reason.
INVALID: list[tuple[Any, str, str]] = [
    ([], "it", "has no entries"),
    (NOTE, f"'{NOTE}'", "is not a list of entries"),
    (plain, "<@task: tests.stages.tasks.plain", "is not a list of entries"),
    ([(note, 1), NOTE], f"entry 2, '{NOTE}',", "is not an entry"),
    ([(NOTE, 1, {}, 4)], f"entry 1, ('{NOTE}', 1, {{}}, 4),", "is not an entry"),
    ([(NOTE, 1), (NOTE, "high")], f"entry 2, ('{NOTE}', 'high'),", "'high', which is not a number"),
    ([(NOTE, True)], "entry 1", "priority True, which is not a number"),
    ([(NOTE, float("nan"))], "entry 1", "the priority nan, which is not a number of"),
    ([(NOTE, 10**400)], "entry 1", "which is not a number of at most 2**53"),
    ([(NOTE, 1, ["a"])], "entry 1", "has the arguments ['a']. Give them by name"),
    ([(NOTE, 1, {1: "a"})], "entry 1", "has the arguments {1: 'a'}. Give them by name"),
    ([(NOTE, 1, {"value": object()})], "entry 1", "has arguments that can't be kept: JSON"),
    ([("tests.stages.tasks.not", 1)], "entry 1", f"does not know. Did you mean {NOTE!r}?"),
    ([(len, 1)], "entry 1", "<built-in function len>, which is not a task"),
    ([(plain.s({}, "a"), 1)], "entry 1", "which is not a task. Give a task, or its full name; its"),
    ([(NOTE, 1), (NOTE, 1, {"size": 1})], "entry 2", "does not take (params) and size ("),
    ([(plain, 1, {"size": 1})], "entry 1", "does not take (data, name) and size ("),
    ({"sub_task": [[NOTE, 1]]}, "it is a dictionary with 'sub_task'", "Write {"),
    ({"params": {}}, "it is a dictionary with 'params'", "Write {"),
    ({"sub_tasks": [[NOTE, 1]], "params": 7}, "its params", "7 is not a dict with names. Give"),
    ({"sub_tasks": [[NOTE, 1]], "params": {1: 2}}, "its params", "{1: 2} is not a dict"),
    ({"sub_tasks": [[NOTE, 1]], "params": {"a": object()}}, "its params", "JSON can't take it"),
]


@pytest.mark.parametrize(("plan", "where", "says"), INVALID)
def test_an_invalid_plan_is_refused(plan: Any, where: str, says: str) -> None:
    """The error names the entry, what is wrong with it and what to write."""
    with pytest.raises(ConfigurationError) as caught:
        stages.make_plan(plan)
    text = str(caught.value)
    assert text.startswith(f"The plan can't be run: {where}")
    assert says in text


def test_params_are_given_once() -> None:
    """Params in the dictionary and beside it contradict each other."""
    with pytest.raises(ConfigurationError, match="its 'params' are given twice"):
        stages.make_plan({"sub_tasks": [(note, 1)], "params": {}}, {"album": 7})


def test_too_many_entries_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan has an upper bound, which a generator without end reaches too."""
    monkeypatch.setattr(of_plans, "MOST_ENTRIES", 3)
    assert len(stages.make_plan([(note, 1)] * 3).stages[0]) == 3
    with pytest.raises(ConfigurationError, match="more than 3 entries"):
        stages.make_plan((note, 1) for _ in iter(int, 1))


# Tasks that can be steps.


def test_a_safe_task_can_be_a_step(mailbox: Mailbox) -> None:
    """With @stages.step below it; bound or not."""

    def bound(self: Any, params: dict[str, Any], size: int) -> None: ...

    def unbound(params: dict[str, Any], *, size: int, run: Any, step: Any) -> None: ...

    for task in (
        mailbox.task(stages.step(bound), base=SafeTask, bind=True, name="tests.bound"),
        mailbox.task(stages.step(unbound), base=SafeTask, name="tests.unbound"),
    ):
        plan = stages.make_plan([(task, 1, {"size": 640})])
        assert names(plan) == [[task.name]]
        with pytest.raises(ConfigurationError, match=r"does not take \(params\) \("):
            stages.make_plan([(task, 1)])
        with pytest.raises(ConfigurationError, match=r"does not take \(params\) and size, run"):
            stages.make_plan([(task, 1, {"size": 640, "run": 1})])


def work(params: dict[str, Any]) -> None:
    """Do nothing."""


#: A function with its decorators, options of its task, and the reason why it can't be a step.
UNFIT: list[tuple[Callable[[], Any], dict[str, Any], str]] = [
    (lambda: stages.step(work), {"base": Task}, "tests.unfit, which is not a SafeTask"),
    (lambda: stages.step(work), {"pydantic": True}, "pydantic=True.*Leave that out"),
    (lambda: single_instance(stages.step(work)), {}, 'on_conflict="skip" would leave out a step'),
    (
        lambda: single_instance(on_conflict="retry", unique_until="end")(stages.step(work)),
        {},
        "unique_until would leave out a step",
    ),
    (lambda: idempotent(stages.step(work)), {}, "Put @stages.step below @shared_task"),
    (lambda: single_instance(on_conflict="retry")(work), {}, "does not know of the step. Put"),
]


@pytest.mark.parametrize(("decorate", "options", "says"), UNFIT)
def test_a_task_that_can_not_be_a_step_is_refused(
    decorate: Callable[[], Any], options: dict[str, Any], says: str, mailbox: Mailbox
) -> None:
    """Its end would not be recorded, Celery would read its params, or its step be left out."""
    task = mailbox.task(decorate(), name="tests.unfit", **{"base": SafeTask, **options})
    with pytest.raises(
        ConfigurationError, match=rf"The plan can't be run: entry 2, \(<@task: tests.unfit.*{says}"
    ):
        stages.make_plan([(note, 2), (task, 1)])


def test_a_task_of_another_app_is_refused() -> None:
    """No worker here knows it."""
    with closing(Celery("other", broker="memory://", set_as_current=False)) as other:
        task: Any = other.task(stages.step(work), name="tests.theirs", base=SafeTask, shared=False)
        with pytest.raises(
            ConfigurationError, match=r"entry 1.*'tests.theirs', which this process"
        ):
            stages.make_plan([(task, 1)])


# Mistakes with the decorator.


def test_above_the_task_or_a_lock_it_is_a_mistake() -> None:
    """The error says what to write; above @single_instance a skipped run would count as done."""
    with pytest.raises(TypeError, match=r"@stages.step stands above the decorator that makes"):
        stages.step(note)
    with pytest.raises(TypeError, match=r"above @single_instance of work.*Put it below"):
        stages.step(single_instance(work))
