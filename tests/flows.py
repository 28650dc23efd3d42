"""
Counts what one send, one run, one step goes through inside the package.

``python -m tests.flows`` prints it for each flow, and ends with 1 if one of them makes more
calls from one file of the package into another than its limit, or leaves objects that only the
garbage collector finds. SQLite, locks in this process, no broker: it counts functions, not time.
``-v`` prints each of these calls.
"""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, Final

#: Calls into another file that each flow may make. A change may lower them. Only a change that
#: lets a flow do more may raise one, and says so in its message.
LIMITS: Final = {
    "plain send": 4,
    "single_instance send": 4,
    "single_instance run": 16,
    "unique_until send": 12,
    "unique_until run": 22,
    "outbox call and commit": 19,
    "carried call and commit": 20,
    "carried run": 20,
    "relay of one": 17,
    "do_once": 6,
    "idempotent run": 24,
    "start": 34,
    "step and next stage": 69,
    "last step": 47,
}


@dataclass
class Trace:
    """The calls of functions of the package that one flow makes."""

    package: str
    #: The file and the function of each call, and the other file of ours that made it, or "".
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    #: How many objects were left in cycles.
    garbage: int = 0
    _stack: list[str | None] = field(default_factory=list)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count what is called inside."""
        gc.collect()
        gc.disable()
        sys.setprofile(self._see)
        try:
            yield
        finally:
            sys.setprofile(None)
            self.garbage = gc.collect()
            gc.enable()

    @property
    def crossings(self) -> list[tuple[str, str, str]]:
        """The calls from one file of the package into another."""
        return [call for call in self.calls if call[2]]

    def describe(self, name: str) -> str:
        """Return a line with the numbers."""
        return (
            f"{name:23}  into another file {len(self.crossings):4}  limit {LIMITS[name]:4}  "
            f"calls {len(self.calls):4}  garbage {self.garbage}"
        )

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            path = frame.f_code.co_filename
            file = path.removeprefix(self.package) if path.startswith(self.package) else None
            if file is not None:
                caller = next((each for each in reversed(self._stack) if each), file)
                self.calls.append(
                    (file, frame.f_code.co_qualname, "" if caller == file else caller)
                )
            self._stack.append(file)
        elif event == "return" and self._stack:
            self._stack.pop()


def trace_all() -> dict[str, Trace]:
    """Return what each flow makes, in this process, whose Django was set up."""
    from django.core.management import call_command
    from django.db import connections, transaction

    import django_celery_safe
    from django_celery_safe import SafeTask, idempotent, single_instance, stages
    from django_celery_safe.models import OutboxMessage
    from django_celery_safe.sending.relay import Relay
    from tests.app.models import Person
    from tests.concurrency.mailbox import Mailbox

    call_command("migrate", verbosity=0, run_syncdb=True)
    mailbox = Mailbox()
    mailbox.app.set_current()
    traces: dict[str, Trace] = {}

    @contextmanager
    def flow(name: str) -> Iterator[None]:
        trace = traces[name] = Trace(str(Path(django_celery_safe.__file__).parent) + os.sep)
        with trace.watching():
            yield

    def task(function: Any, name: str, **options: Any) -> Any:
        return mailbox.task(function, base=SafeTask, name=f"flows.{name}", **options)

    def body(url: str) -> str:
        return url

    def params(params: dict[str, Any]) -> dict[str, Any]:
        return {"a": 1}

    plain = task(body, "plain")
    alone = task(single_instance(key="{url}")(body), "alone")
    unique = task(single_instance(key="{url}", unique_until="end")(body), "unique", acks_late=True)
    carried = task(body, "carried", outbox="until_done")
    step = task(stages.step(params), "step", acks_late=True)
    once = task(idempotent(key="{url}")(body), "once", acks_late=True)
    mailbox.app.finalize()

    for warm in (plain, alone, unique, once):  # what comes once
        warm.delay("warm")
    plain.apply_async_on_commit(("warm",), outbox=True)
    carried.delay("warm")
    stages.start([(step, 2), (step, 1)])
    while messages := mailbox.take():
        for message in messages:
            mailbox.deliver(message)

    with flow("plain send"):
        plain.delay("a")
    mailbox.take()
    for name, single in (("single_instance", alone), ("unique_until", unique)):
        with flow(f"{name} send"):
            single.delay("a")
        message = mailbox.take_one()
        with flow(f"{name} run"):
            mailbox.deliver(message)

    with flow("outbox call and commit"), transaction.atomic():
        plain.apply_async_on_commit(("a",), outbox=True)
    mailbox.take()
    with flow("carried call and commit"), transaction.atomic():
        carried.delay("a")
    message = mailbox.take_one()
    with flow("carried run"):
        mailbox.deliver(message)
    relay = Relay()
    for _ in range(2):  # the first time, for what comes once
        with transaction.atomic():
            plain.apply_async_on_commit(("a",), outbox=True)
            connections["default"].run_on_commit.clear()  # as if the process died here
        OutboxMessage.objects.pending().update(due_at="2000-01-01 00:00Z")
        with flow("relay of one"):
            relay.relay_batch()
        mailbox.take()

    Person.everyone.create(pk=1)
    with flow("do_once"), Person.do_once(1, "is_welcome_email_sent") as row:
        assert row
    once.delay("a")
    message = mailbox.take_one()
    with flow("idempotent run"):
        mailbox.deliver(message)

    with flow("start"):
        run = stages.start([(step, 2), (step, 1)])
    for name in ("step and next stage", "last step"):
        message = mailbox.take_one()
        with flow(name):
            mailbox.deliver(message)
    run.refresh_from_db()
    assert run.status == stages.Status.SUCCEEDED, run.status
    return traces


def main(*, verbose: bool = False) -> int:
    """Print what each flow makes; return 1 if one goes beyond its limit."""
    import django
    from django.conf import settings

    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    with TemporaryDirectory() as folder:
        settings.DATABASES["default"].update(
            NAME=str(Path(folder) / "flows.sqlite3"), OPTIONS={"transaction_mode": "IMMEDIATE"}
        )
        django.setup()
        traces = trace_all()
    for name, trace in traces.items():
        print(trace.describe(name))
        if verbose:
            for file, function, caller in trace.crossings:
                print(f"    {caller} > {file}: {function}")
    beyond = [n for n, one in traces.items() if len(one.crossings) > LIMITS[n] or one.garbage]
    if beyond:
        print(f"Beyond their limit, or with garbage: {', '.join(beyond)}.")
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main(verbose="-v" in sys.argv))
