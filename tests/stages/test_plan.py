"""Plans: valid ones, invalid ones, and their errors."""

import pickle
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import pytest
from celery import Task, shared_task

from django_celery_safe import (
    ConfigurationError,
    IllegalTransition,
    InvalidPlan,
    InvalidResult,
    SafeTask,
    StepLost,
    idempotent,
    single_instance,
    stages,
)
from django_celery_safe.stages import plan as plans
from tests.concurrency.conftest import mailbox
from tests.concurrency.mailbox import Mailbox
from tests.stages.tasks import add, note, plain

__all__ = ["mailbox"]

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


@pytest.mark.parametrize("entry", [(NOTE, 1), [NOTE, 1], (note, 1), (note, 1, {})])
def test_a_task_is_given_as_it_is_or_by_name(entry: Any) -> None:
    """A task object, its name, a tuple or a list: all are the same entry."""
    assert stages.make_plan([entry]) == ([[(NOTE, 1.0, "")]], "{}")


def test_a_lazy_task_can_be_planned(mailbox: Mailbox) -> None:
    """A task whose app was not used yet is known by its name."""

    @shared_task(base=SafeTask, name="tests.lazy", bind=True)
    @stages.step
    def lazy(self: Any, params: dict[str, Any]) -> None: ...

    assert names(stages.make_plan([(lazy, 2), ("tests.lazy", 1)])) == [["tests.lazy"]] * 2


def test_one_task_may_stand_several_times() -> None:
    """Each entry has arguments of its own."""
    plan = stages.make_plan([(add, 1, {"number": 2}), (add, 1), (add, 1, {"number": 2})])
    assert [entry.arguments for entry in plan.stages[0]] == ['{"number": 2}', "", '{"number": 2}']


def test_any_iterable_is_a_plan() -> None:
    """A generator is read once."""
    assert names(stages.make_plan((note, number) for number in (1, 2))) == [[NOTE]] * 2


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


def test_the_caller_keeps_what_was_given() -> None:
    """The plan copies its arguments at the call, and does not change them."""
    params: dict[str, Any] = {"ids": [1]}
    arguments: dict[str, Any] = {"value": [1]}
    given = {"sub_tasks": [[NOTE, 1, arguments]], "params": params}
    plan = stages.make_plan(given)
    params["ids"].append(2)
    arguments["value"].append(2)
    assert (plan.params, plan.stages[0][0].arguments) == ('{"ids": [1]}', '{"value": [1]}')
    assert given["sub_tasks"] == [[NOTE, 1, arguments]]


def test_what_a_message_carries_can_be_kept() -> None:
    """Values beyond JSON that Celery's messages take are taken here."""
    assert "1.5" in stages.make_plan([(note, 1)], {"price": Decimal("1.5")}).params


def test_describe_shows_stages_and_arguments() -> None:
    """A line for each stage and for each of its entries, with its arguments."""
    plan = stages.make_plan([(add, 2.5, {"number": 2}), (note, 1), (add, 2.5)])
    assert plan.describe() == (
        "Stage 1 of 2, priority 2.5\n"
        '  tests.stages.tasks.add {"number": 2}\n'
        "  tests.stages.tasks.add\n"
        "Stage 2 of 2, priority 1\n"
        "  tests.stages.tasks.note"
    )


# Invalid plans.


def entries() -> Iterator[Any]:
    """Fail on the way, as a generator of the caller's may."""
    yield (note, 1)
    raise KeyError("theirs")


#: A plan, the part that the error names, and the error's reason.
INVALID: list[tuple[Any, str, str]] = [
    ([], "it", "has no entries"),
    (7, "7", "is not a list of entries"),
    (None, "None", "is not a list of entries"),
    (NOTE, f"'{NOTE}'", "is not a list of entries"),
    (b"abc", "b'abc'", "is not a list of entries"),
    ([(note, 1), NOTE], f"entry 2, '{NOTE}',", "is not an entry"),
    ([{"task": NOTE}], "entry 1, {'task'", "is not an entry"),
    ([(note,)], "entry 1, (<@task: tests.stages.tasks.note", "has 1 parts"),
    ([(NOTE, 1, {}, 4)], f"entry 1, ('{NOTE}', 1, {{}}, 4),", "has 4 parts"),
    ([(NOTE, 1), (NOTE, "high")], f"entry 2, ('{NOTE}', 'high'),", "'high', which is not a number"),
    ([(NOTE, None)], "entry 1", "priority None, which is not a number"),
    ([(NOTE, True)], "entry 1", "priority True, which is not a number"),
    ([(NOTE, 1j)], "entry 1", "which is not a number"),
    ([(NOTE, float("nan"))], "entry 1", "priority nan, which is in no order"),
    ([(NOTE, float("inf"))], "entry 1", "priority inf, which is in no order"),
    ([(1, NOTE)], "entry 1", "which is not a number"),
    ([(NOTE, 1, ["a"])], "entry 1", "has the arguments ['a']. Give them by name"),
    ([(NOTE, 1, {1: "a"})], "entry 1", "has the arguments {1: 'a'}. Give them by name"),
    ([(NOTE, 1, {"value": object()})], "entry 1", "has arguments that can't be kept: JSON"),
    ([(NOTE, 1, {"value": float("inf")})], "entry 1", "has arguments that can't be kept: JSON"),
    ([(NOTE, 1, {"value": "x" * 65536})], "entry 1", "can't be kept: it is 65,549 characters"),
    (
        [("tests.stages.tasks.not", 1)],
        "entry 1",
        f"does not know. Did you mean {NOTE!r}?",
    ),
    ([("§§§", 1)], "entry 1", "this process does not know. Is its module among the app's?"),
    ([(len, 1)], "entry 1", "<built-in function len>, which is not a task"),
    ([(None, 1)], "entry 1", "None, which is not a task"),
    (plain, "<@task: tests.stages.tasks.plain", "is not a list of entries"),
    ([(plain.s({}, "a"), 1)], "entry 1", "has a signature of tests.stages.tasks.plain, whose arg"),
    ([(NOTE, 1), (NOTE, 1, {"size": 1})], "entry 2", "does not take (params) and size ("),
    ([(plain, 1, {"size": 1})], "entry 1", "does not take (data, name) and size ("),
    ([("celery.chord", 1)], "entry 1", "neither a @stages.step nor a SafeTask"),
    ({"sub_task": [[NOTE, 1]]}, "its key 'sub_task'", "Did you mean 'sub_tasks'?"),
    ({"sub_tasks": [[NOTE, 1]], "parms": {}}, "its key 'parms'", "Did you mean 'params'?"),
    ({"sub_tasks": [[NOTE, 1]], 7: 1}, "its key 7", "It knows 'sub_tasks' and 'params'."),
    ({"params": {}}, "it", "has no 'sub_tasks'"),
    ({}, "it", "has no 'sub_tasks'"),
    ({"sub_tasks": []}, "it", "has no entries"),
    ({"sub_tasks": None}, "None", "is not a list of entries"),
    ({"sub_tasks": [[NOTE, 1], [NOTE]]}, f"entry 2, ['{NOTE}'],", "has 1 parts"),
    ({"sub_tasks": [[NOTE, 1]], "params": 7}, "its params", "are 7. Give a dict"),
]


@pytest.mark.parametrize(
    ("plan", "where", "says"), INVALID, ids=[f"{says[:30]}" for _, _, says in INVALID]
)
@pytest.mark.parametrize("do", [stages.make_plan, stages.start])
def test_an_invalid_plan_is_refused(
    do: Callable[[Any], Any], plan: Any, where: str, says: str
) -> None:
    """The error names the entry, what is wrong with it and what to write; no query is run."""
    with pytest.raises(InvalidPlan) as caught:
        do(plan)
    assert caught.value.where.startswith(where)
    text = str(caught.value)
    assert text.startswith(f"The plan can't be run: {where}")
    assert says in text


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"file": object()}, "can't be kept: JSON can't take it (TypeError"),
        ({"text": "x" * 65536}, "can't be kept: it is 65,548 characters of JSON, of 65,536"),
        ({"ratio": float("nan")}, "can't be kept: JSON can't take it (ValueError: Out of range"),
        ({"ratios": [float("-inf")]}, "can't be kept: JSON can't take it (ValueError"),
        ([1], "are [1]. Give a dict"),
        ({1: 2}, "are {1: 2}. Give a dict"),
        ("text", "are 'text'. Give a dict"),
    ],
)
def test_invalid_params_are_refused(params: Any, says: str) -> None:
    """Params are a dict with names, of plain data, of 64 KB at most; also those given anew."""
    for plan in ([(note, 1)], {"sub_tasks": [(note, 1)]}, stages.make_plan([(note, 1)])):
        with pytest.raises(InvalidPlan) as caught:
            stages.make_plan(plan, params)
        assert caught.value.where == "its params"
        assert says in str(caught.value)


def test_params_up_to_the_cap_are_taken() -> None:
    """64 KB of JSON are taken, and not a character more."""
    longest = {"text": "x" * (65536 - len('{"text": ""}'))}
    assert len(stages.make_plan([(note, 1, {"value": "x"})], longest).params) == 65536
    with pytest.raises(InvalidPlan, match="65,537 characters"):
        stages.make_plan([(note, 1)], {"text": longest["text"] + "x"})


def test_params_are_given_once() -> None:
    """Params in the dictionary and beside it contradict each other."""
    with pytest.raises(InvalidPlan, match="its 'params' are given twice"):
        stages.make_plan({"sub_tasks": [(note, 1)], "params": {}}, {"album": 7})


def test_too_many_entries_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan has an upper bound, which a generator without end reaches too."""
    monkeypatch.setattr(plans, "MOST_ENTRIES", 3)
    assert len(stages.make_plan([(note, 1)] * 3).stages[0]) == 3
    with pytest.raises(InvalidPlan, match="more than 3 entries"):
        stages.make_plan((note, 1) for _ in iter(int, 1))


def test_the_callers_own_error_comes_through() -> None:
    """An error of a generator of entries is not taken for an invalid plan."""
    with pytest.raises(KeyError, match="theirs"):
        stages.make_plan(entries())


# Tasks that can be steps.


def test_any_celery_task_can_be_a_step(mailbox: Mailbox) -> None:
    """With @stages.step below it, the task needs no base of ours; bound or not."""

    def bound(self: Any, params: dict[str, Any], size: int) -> None: ...

    def unbound(params: dict[str, Any], *, size: int, run: Any, step: Any) -> None: ...

    tasks = [
        mailbox.task(stages.step(bound), base=base, bind=True, name=f"tests.bound.{base.__name__}")
        for base in (Task, SafeTask)
    ] + [
        mailbox.task(stages.step(unbound), base=base, name=f"tests.unbound.{base.__name__}")
        for base in (Task, SafeTask)
    ]
    for task in tasks:
        plan = stages.make_plan([(task, 1, {"size": 640})])
        assert names(plan) == [[task.name]]
        with pytest.raises(InvalidPlan, match=r"does not take \(params\) \("):
            stages.make_plan([(task, 1)])
        with pytest.raises(InvalidPlan, match=r"does not take \(params\) and size, run"):
            stages.make_plan([(task, 1, {"size": 640, "run": 1})])


def test_params_are_no_argument_of_an_entry() -> None:
    """The first argument is the run's params, which an entry can't give by name."""
    with pytest.raises(InvalidPlan, match=r"does not take \(params\) and params"):
        stages.make_plan([(note, 1, {"params": {}})])


class Sizing(SafeTask):
    """A class-based step, of the decorator."""

    name = "tests.sizing"

    @stages.step
    def run(self, params: dict[str, Any], size: int = 1) -> None:
        """Do nothing."""


class Framing(SafeTask):
    """A class-based step, of the document's form."""

    name = "tests.framing"

    def run(self, data: dict[str, Any], name: str, size: int = 1) -> Any:
        """Do nothing."""


class Other(SafeTask):
    """A class-based task that is no step."""

    name = "tests.other"

    def run(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize("kind", [Sizing, Framing])
def test_a_class_can_be_a_step(kind: type[Any], mailbox: Mailbox) -> None:
    """The arguments are checked for a task made by a class, too."""
    task = mailbox.app.register_task(kind())
    assert names(stages.make_plan([(task, 1, {"size": 640})])) == [[kind.name]]
    with pytest.raises(InvalidPlan, match="and length"):
        stages.make_plan([(kind.name, 1, {"length": 640})])


def test_a_class_that_takes_nothing_is_refused(mailbox: Mailbox) -> None:
    """A SafeTask without the decorator is to take (data, name)."""
    task = mailbox.app.register_task(Other())
    with pytest.raises(InvalidPlan, match=r"tests.other, which does not take \(data, name\)"):
        stages.make_plan([(task, 1)])


def test_a_plain_task_of_another_base_is_refused(mailbox: Mailbox) -> None:
    """The end of such a step would not be recorded."""

    def document(data: dict[str, Any], name: str) -> None: ...

    task = mailbox.task(document, name="tests.document", base=Task)
    with pytest.raises(InvalidPlan, match=r"entry 1.*tests.document, which is neither"):
        stages.make_plan([(task, 1)])


def work(params: dict[str, Any]) -> None:
    """Do nothing."""


#: Decorated functions that can't be steps, and what is said about them.
UNFIT: dict[str, tuple[Callable[[], Any], str]] = {
    "skip": (
        lambda: single_instance(stages.step(work)),
        'on_conflict="skip" would leave out a step',
    ),
    "unique": (
        lambda: single_instance(on_conflict="retry", unique_until="end")(stages.step(work)),
        "unique_until would leave out a step",
    ),
    "idempotent above": (
        lambda: idempotent(stages.step(work)),
        "@idempotent does not know of the step. Put @stages.step below @shared_task",
    ),
    "idempotent alone": (
        lambda: idempotent(work),
        "@idempotent does not know of the step",
    ),
    "single_instance alone": (
        lambda: single_instance(on_conflict="retry")(work),
        "@single_instance does not know of the step. Put @stages.step below @single_instance.",
    ),
}


@pytest.mark.parametrize("name", UNFIT)
@pytest.mark.parametrize("base", [Task, SafeTask])
def test_what_would_leave_out_a_step_is_refused(name: str, base: Any, mailbox: Mailbox) -> None:
    """Decorators that end a message without its step are refused, naming the entry."""
    decorated, says = UNFIT[name]
    task = mailbox.task(decorated(), name="tests.unfit", base=base)
    with pytest.raises(InvalidPlan) as caught:
        stages.make_plan([(note, 2), (task, 1)])
    assert caught.value.where.startswith("entry 2, (<@task: tests.unfit")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "decorated",
    [
        lambda: single_instance(on_conflict="retry")(stages.step(work)),
        lambda: single_instance(on_conflict="wait", blocking_timeout=5)(stages.step(work)),
        lambda: single_instance(on_conflict="raise")(stages.step(work)),
        lambda: stages.step(idempotent(work)),
    ],
)
@pytest.mark.parametrize("options", [{}, {"autoretry_for": (ValueError,)}])
def test_other_decorators_go_along(
    decorated: Callable[[], Any], options: dict[str, Any], mailbox: Mailbox
) -> None:
    """Decorators that keep the step, or bring it back, are allowed in this order."""
    task = mailbox.task(decorated(), name="tests.fit", base=SafeTask, **options)
    assert names(stages.make_plan([(task, 1)])) == [["tests.fit"]]


# Mistakes with the decorator.


def test_above_the_task_it_is_a_mistake() -> None:
    """Above @shared_task it says what to write."""
    with pytest.raises(TypeError, match=r"@stages.step stands above the decorator that makes"):
        stages.step(note)


def test_above_single_instance_it_is_a_mistake() -> None:
    """Above @single_instance a skipped run would count as done."""
    with pytest.raises(TypeError, match=r"above @single_instance of work.*Put it below"):
        stages.step(single_instance(work))


@pytest.mark.parametrize("thing", [None, 7, int, {"a": 1}])
def test_it_decorates_functions(thing: Any) -> None:
    """Anything but a function is refused."""
    with pytest.raises(TypeError, match=r"@stages.step got .* instead of a function"):
        stages.step(thing)


@pytest.mark.parametrize(
    "function", [lambda: None, lambda run, step: None, lambda **rest: None, lambda *, a: None]
)
def test_a_function_takes_params(function: Any) -> None:
    """One without a place for the params is refused, and told how to write it."""
    with pytest.raises(TypeError, match=r"which takes no params. Write: def .*\(params\): ..."):
        stages.step(function)


def test_functions_without_a_body_are_refused() -> None:
    """A coroutine or generator function would count as done before its body ran."""

    async def later(params: Any) -> None: ...

    def yielding(params: Any) -> Iterator[int]:
        yield 1

    for function in (later, yielding):
        with pytest.raises(ConfigurationError, match="the step would count as done"):
            stages.step(function)


# Errors.


@pytest.mark.parametrize(
    "error",
    [
        InvalidPlan("entry 3, ('shop.tasks.index', 2),", "has 2 parts", "Write three."),
        InvalidResult("shop.tasks.index", "it is 7"),
        IllegalTransition("run 12", "resume", "it is running"),
        StepLost("shop.tasks.index[0b5a]", "run 12", "another"),
        StepLost("shop.tasks.index[0b5a]", "run 12"),
    ],
)
def test_errors_survive_pickling(error: Exception) -> None:
    """They arrive in another process as they were, text and parts."""
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
    assert all(str(value) in str(error) for value in vars(error).values())


def test_a_refusal_of_the_planner_survives_pickling() -> None:
    """The error keeps its text, even if the plan had a task object."""
    with pytest.raises(InvalidPlan) as caught:
        stages.make_plan([(note, "high")])
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
