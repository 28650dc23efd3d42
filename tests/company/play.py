"""The flows, played by a process that sends: each with its right values."""

import json
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.request import urlopen

import django
from celery import chain
from django.conf import settings
from django.db import connection, transaction

from django_celery_safe import iter_locks, send_on_commit, stages
from django_celery_safe.models import OutboxMessage, StageStep
from tests.company import tasks
from tests.company.neighbours import Neighbour
from tests.processes import wait_for
from tests.processes.waiting import port_is_free

HERE: Neighbour = settings.HERE
#: Seconds for all flows together; a flow that begins late gets the rest, so that all are judged.
PATIENCE, REST = 90.0, 15.0
_end = time.monotonic() + PATIENCE


def patience() -> float:
    """Return how long to wait for what has to come."""
    return max(REST, _end - time.monotonic())


@dataclass(frozen=True)
class Play:
    """
    One flow that is being played.

    Attributes:
        flow: Its name; the tasks write it into the journal.
        brought: What its messages have to bring along from here, such as the id of a trace.
    """

    flow: str
    brought: str | None

    def until(self, condition: Callable[[], Any], message: str) -> None:
        """Wait for what has to come."""
        wait_for(condition, patience(), message)

    def get(self, result: Any) -> Any:
        """Return the result of a task."""
        return result.get(timeout=patience())

    def count(self, effect: str) -> int:
        """Return how often something happened in this flow."""
        return tasks.JOURNAL.count(effect, flow=self.flow)

    def open(self) -> None:
        """Let the tasks before the gate go on."""
        (tasks.FOLDER / self.flow).touch()

    def at_gate(self) -> None:
        """Wait until a task stands before the gate."""
        self.until(lambda: self.count("waits"), "it did not begin")

    def ran(self, times: int = 1) -> None:
        """Check that as many messages did their work, each once, and that all their rows ended."""
        self.until(lambda: self.count("ran") >= times, f"{self.count('ran')} runs, not {times}")
        entries = tasks.JOURNAL.entries("ran", flow=self.flow)
        rows = OutboxMessage.objects.filter(task_id__in={each["id"] for each in entries})
        self.until(lambda: not rows.exists(), "its row has not ended")
        entries = tasks.JOURNAL.entries("ran", flow=self.flow)
        assert len(entries) == len({each["id"] for each in entries}) == times, "ran twice"
        brought = {each["brought"] for each in entries}
        if self.flow not in HERE.fresh:
            assert brought == {self.brought}, f"it brought {brought}, not {self.brought}"

    def no_lock_is_left(self, task: Any) -> None:
        """Wait until no lock of a task is held, that of a send included."""
        self.until(
            lambda: not any(task.name in each.name for each in iter_locks()), "a lock is left"
        )


def send(*names: str, **options: Any) -> Callable[[Play], None]:
    """Return the flow in which a task, or a chain of tasks, is sent on commit and runs."""

    def flow(play: Play) -> None:
        links = [getattr(tasks, name).si(play.flow) for name in names]
        with transaction.atomic():
            result = send_on_commit(chain(*links) if links[1:] else links[0], **options)
        assert play.get(result) == play.flow
        play.ran(len(names))

    return flow


def single_instance(play: Play) -> None:
    """A second run is skipped while the first one is under way."""
    first = tasks.alone.delay(play.flow)
    play.at_gate()
    assert play.get(tasks.alone.delay(play.flow)) is None  # skipped
    play.open()
    assert play.get(first) == play.flow
    play.ran()
    play.no_lock_is_left(tasks.alone)


def run_later(play: Play) -> None:
    """A second run comes after the first."""
    first = tasks.patient.delay(play.flow)
    play.at_gate()
    second = tasks.patient.delay(play.flow)
    play.until(lambda: second.state == "RETRY", "the second was not put off")
    play.open()
    assert [play.get(first), play.get(second)] == [play.flow] * 2
    play.ran(2)
    play.no_lock_is_left(tasks.patient)


def unique_send(play: Play) -> None:
    """A second send is a duplicate until the end of the run, and a later one is none."""
    first = tasks.unique.delay(play.flow)
    play.at_gate()
    assert tasks.unique.delay(play.flow).id == first.id  # a duplicate
    play.open()
    assert play.get(first) == play.flow
    play.no_lock_is_left(tasks.unique)
    assert play.get(tasks.unique.delay(play.flow)) == play.flow
    play.ran(2)


def carried_and_killed(play: Play) -> None:
    """A carried task whose process is killed runs again."""
    tasks.killed.delay(play.flow)
    play.ran()
    assert play.count("started") == 2


def in_stages(play: Play) -> None:
    """The steps of two stages run once each."""
    plan = [(tasks.step, 2), (tasks.step, 2), (tasks.step, 1)]
    run = stages.start(plan, params={"flow": play.flow})
    run = run.wait(timeout=patience())
    assert run.status == "succeeded", [step.error for step in StageStep.objects.filter(run=run)]
    play.ran(3)


def idempotent(play: Play) -> None:
    """Of two messages one does the work, and both have the result."""
    results = [play.get(tasks.once.delay(play.flow)) for _ in range(2)]
    assert results == [play.flow] * 2
    play.ran()


def django_tasks(play: Play) -> None:
    """A task of Django is carried."""
    with transaction.atomic():
        tasks.modern.enqueue(play.flow)
    play.ran()


def class_raises(play: Play) -> None:
    """A carried task whose class raises has failed, with that error."""
    for flow in ("before_start raises", "call raises", "call raises at its end"):
        sent = tasks.carried.delay(flow)
        row = OutboxMessage.objects.filter(task_id=sent.id)
        play.until(lambda row=row: row.get().state == "failed", f"{flow}: {row.get().state}")
        assert flow in row.get().error


def beat_ticks(play: Play) -> None:
    """A beat whose connections idled between two ticks sends a carried task at each."""
    play.until(lambda: play.count("ran") >= 3, f"{play.count('ran')} ticks in {PATIENCE:g} s")


def flower_sees(play: Play) -> None:
    """Flower shows the tasks that run while it watches."""

    def states() -> set[str]:
        with urlopen(f"http://127.0.0.1:{settings.SCENE['port']}/api/tasks", timeout=9) as answer:
            return {each["state"] for each in json.load(answer).values()}

    def sees() -> bool:
        tasks.carried.delay(play.flow)
        return "SUCCESS" in states()

    play.until(lambda: not port_is_free(settings.SCENE["port"]), "flower does not answer")
    play.until(sees, "it knows of no task that succeeded")


def pickled(play: Play) -> None:
    """What is no JSON, and waits for nothing, is sent as without us."""
    from django.contrib.contenttypes.models import ContentType

    row = ContentType.objects.first()
    assert play.get(tasks.name_of.apply_async((play.flow, row), serializer="pickle")) == play.flow


#: The flows of the table, in its order.
FLOWS = {
    "lock": send("lock"),
    "single instance": single_instance,
    "run later": run_later,
    "unique send": unique_send,
    "on commit": send("plain"),
    "outbox": send("plain", outbox=True),
    "carried": send("carried"),
    "killed": carried_and_killed,
    "chain": send("carried", "carried"),
    "stages": in_stages,
    "idempotent": idempotent,
}
if django.VERSION >= (6,):
    FLOWS["django.tasks"] = django_tasks
#: Flows that only some neighbours play.
MORE = {"class raises": class_raises, "beat": beat_ticks, "flower": flower_sees, "pickle": pickled}


def main() -> None:
    """Play all flows, and write down what went wrong in each; None: nothing did."""
    HERE.prepare()
    verdicts = {}
    for name in (*FLOWS, *HERE.more):
        verdicts[name] = None
        try:
            with HERE.request() as brought:
                (FLOWS | MORE)[name](Play(name, brought))
        except Exception as error:
            traceback.print_exc()
            verdicts[name] = f"{type(error).__name__}: {error}"
        connection.close()
    (tasks.FOLDER / "verdicts").write_text(json.dumps(verdicts))
