""":class:`SafeTask`, the task base, and :class:`SafeTaskMixin` for your own base classes."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from celery import Task as CeleryTask
from celery.canvas import Signature
from celery.contrib.django.task import DjangoTask as CeleryDjangoTask
from django.apps import apps
from kombu.exceptions import EncodeError

from .. import conf
from ..concurrency.guard import find_guarded, name_lock
from ..delivery.call import wrap_class, wrap_run
from ..delivery.copies import Resent, find_resent, resending
from ..delivery.header import HEADER, Header, read_given_fields, read_header
from ..events import SENT_IN_ATOMIC
from ..exceptions import ConfigurationError, NotSerializable, TaskPoisoned
from ..resuming.checkpoints import HandedOver
from ..texts import get_logger
from ..transactions import aliases_in_atomic
from ..usage import calling_line
from .canvas import run_task_on_commit
from .capture import CAPTURED, check_arguments, explain, refuse_misspelt
from .carried_run import find_run, is_by_row
from .commit import must_wait, send_or_hold
from .deduplicate import SIGNATURES, Call, lock_fields, pass_on, run_with_lock, send_once
from .outbox import UNTIL_DONE, Outbox, task_wants_outbox
from .typed import DjangoTask, P, R, SentResult, Task, as_sent_result

logger = get_logger(__name__)


class SafeTaskMixin(Task[P, R]):
    """
    Adds sending on commit to a task class, and changes none of Celery's defaults.

    Attributes:
        send_on_commit: Whether plain ``.delay()`` and ``.apply_async()`` inside
            ``atomic()`` wait for the commit; None: as ``SEND_ON_COMMIT`` says.
        outbox: Whether a message sent on commit stays in the outbox until the broker
            has it; ``"until_done"``: every message of the task stays until the task is done;
            None: as ``OUTBOX`` says.
        max_deaths: How many processes may die in the task before it fails with TaskPoisoned
            instead of being run again; None: any number; unset: as ``MAX_DEATHS`` says.
    """

    abstract = True
    #: Whether runs of the task end the outbox rows of their messages.
    _ends_rows = True
    send_on_commit: bool | None = None
    outbox: Outbox | None = None
    max_deaths: int | conf.Unset | None = conf.UNSET

    if TYPE_CHECKING:
        # Not at run time, where it would override delay() of a project's own task class.
        def delay(self, *args: P.args, **kwargs: P.kwargs) -> SentResult[R]: ...

    def delay_on_commit(self, *args: P.args, **kwargs: P.kwargs) -> SentResult[R]:
        """Send the task when the transaction commits; see :meth:`apply_async_on_commit`."""
        return self.apply_async_on_commit(args, kwargs)

    def apply_async_on_commit(
        self,
        args: Any = None,
        kwargs: Any = None,
        *,
        using: str | None = None,
        outbox: Outbox | None = None,
        **options: Any,
    ) -> SentResult[R]:
        """
        Send the task when the transaction commits.

        The message is made now: the id is final, the arguments are frozen, and
        arguments that don't fit or can't be sent raise here, before the commit.
        If the transaction, or its savepoint, is rolled back, nothing is sent. Outside a
        transaction the task is sent at once. A retry of the running task is never held back.

        Args:
            using: Database alias whose commit to wait for; unset: ``"default"``.
            outbox: Whether to keep the message in the outbox, a table of that database,
                until the broker has it, even outside a transaction; ``"until_done"``: until
                the task has ended; None: as the task or ``OUTBOX`` says.
            options: See ``apply_async``.

        Returns:
            The task's result. Its ``send_error`` is None, or the error if the publication
            fails after the commit. Such a failure is also logged and sent as a signal,
            but not raised from the commit.

        Raises:
            NotSerializable: A value can't travel in a message.
            WrongTransaction: ``using`` is in autocommit while another database
                is inside ``atomic()``.
            ConfigurationError: The database has no outbox.
        """
        # Through the project's own apply_async, which may add to what is sent.
        given = {"using": using, "outbox": outbox, "send_on_commit": True}
        return self.apply_async(args, kwargs, **options, **given)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Send on commit as this class does, even if Celery's DjangoTask is an earlier base."""
        super().__init_subclass__(**kwargs)
        for name in ("delay_on_commit", "apply_async_on_commit"):
            if getattr(cls, name) is getattr(CeleryDjangoTask, name):
                setattr(cls, name, getattr(SafeTaskMixin, name))

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Check the attributes, and wrap ``run`` so that calls may pass ``single_instance``."""
        task = super().__new__(cls)
        if task.outbox is not None:
            conf.outbox(task.outbox, f"outbox of {task.name}")
        if task.send_on_commit is not None:
            conf.switch(task.send_on_commit, f"send_on_commit of {task.name}")
        if task.max_deaths is not conf.UNSET:
            conf.max_deaths(task.max_deaths, f"max_deaths of {task.name}")
        if task.Request == CeleryTask.Request:  # a project's own is left alone
            task.Request = "django_celery_safe.sending.carried_request:SafeRequest"
        # On the instance, because run() of a class may call its parent's.
        task.run = wrap_run(task)  # type: ignore[method-assign]
        wrap_class(task)
        return task

    def apply(self, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
        """Run the task in this process, as Celery does; takes ``single_instance`` options too."""
        if "single_instance" in options:
            call, header = self._with_header(Call(self, args, kwargs, options), Header())
            options = call.options
            header.pop("sent", None)  # nothing was sent
        run = partial(super().apply, args, kwargs, *more, **options)
        header = read_header(options.get("headers"), self.name)
        return run_with_lock(self, header, run)

    def apply_async(
        self, args: Any = None, kwargs: Any = None, *more: Any, **options: Any
    ) -> SentResult[R]:
        """
        Send the task now or, if ``send_on_commit`` says so, when the transaction commits.

        Like Celery's method. If the send may wait for a commit, a model instance, QuerySet or
        iterator among the arguments raises NotSerializable with every serializer; otherwise one
        that the serializer accepts is only logged as a warning. With ``outbox=True`` or
        ``using`` it does the same as :meth:`apply_async_on_commit`. ``send_on_commit`` for one
        call: True waits for the commit, False sends now, whatever the task and settings say.
        """
        options.update(zip(_POSITIONAL, more, strict=False))
        for name in options:
            refuse_misspelt(name)
        if options.get("task_id") is not None:
            options["task_id"] = str(options["task_id"])  # some callers pass a UUID
        ours = {name: options.pop(name) for name in _OURS if name in options}
        call = Call(self, args, kwargs, options)
        resent = find_resent(options.get("task_id"))
        waits = CAPTURED.get() is not None
        # A captured message waits for its commit; a message that is re-sent must not wait.
        if resent is not None or waits:
            return self._send(call, resent, waits=waits)
        outbox, wanted, warns = map(conf.get, ("OUTBOX", "SEND_ON_COMMIT", "WARN_IN_ATOMIC"))
        if self._waits_for_commit(ours, outbox, wanted):
            return self._send_on_commit(call, ours)
        if warns and ours.get("send_on_commit") is not False and (opened := aliases_in_atomic()):
            place = calling_line()
            SENT_IN_ATOMIC.emit(SafeTaskMixin, task=self.name, using=opened[0], place=place)
        return self._send(call, waits=False)

    def lock_name(self, *args: P.args, **kwargs: P.kwargs) -> str:
        """
        Return the name of the lock under which the task runs with these arguments.

        With ``unique_until``, the name of the message's lock is ``sent:`` followed by this name.

        Raises:
            ConfigurationError: The task has no ``@single_instance``, so it has no lock.
            TypeError: The arguments don't fit the task.
        """
        return name_lock(self, args, kwargs)

    def retry(self, *args: Any, **kwargs: Any) -> Any:
        """Re-send the running task, as Celery does; never held back, because Retry rolls back."""
        error = kwargs.get("exc") or sys.exc_info()[1]
        is_decided = isinstance(error, TaskPoisoned | HandedOver)
        if error is not None and (is_decided or is_by_row(self.request)):
            raise error  # the task's outcome is decided, or its run did not begin
        if self.request.is_eager:
            return super().retry(*args, **kwargs)
        retry = resending(self.request.id, partial(super().retry, *args, **kwargs))
        # With throw=False, only this shows that the task goes on.
        request: Any = self.request
        request.safe_retries = getattr(request, "safe_retries", 0) + 1
        return retry

    def on_replace(self, sig: Signature[Any]) -> Any:
        """Send the replacement of the running task, as Celery does; never held back."""
        if self.request.is_eager:
            return super().on_replace(sig)
        run = find_run(self.request.id)
        send = partial(resending, None, partial(super().on_replace, sig))
        return send() if run is None else run.keep(send)

    def _waits_for_commit(self, ours: dict[str, Any], outbox: Any, wanted: bool) -> bool:
        """Return whether a send waits; ``outbox`` and ``wanted`` are what the settings say."""
        outbox = outbox if self.outbox is None else self.outbox
        carried = outbox == UNTIL_DONE and ours.get("outbox") is None
        asked = ours.get("send_on_commit")
        if asked is not None and not isinstance(asked, bool):
            conf.switch(asked, "send_on_commit")
        if asked is False:
            if carried or ours.get("outbox") or ours.get("using"):
                raise TypeError(
                    f"Task {self.name} is sent with send_on_commit=False, which means now, while "
                    f"using=... and the outbox mean at the commit. Leave one of them out; for a "
                    f'task with outbox="until_done" pass outbox=False too.'
                )
            return False
        # Carried: also the next link of a chain, which Celery sends.
        if carried or any(map(ours.get, _OURS)):
            return True
        return bool(wanted if self.send_on_commit is None else self.send_on_commit)

    def _send_on_commit(self, call: Call, ours: dict[str, Any]) -> SentResult[R]:
        using, outbox = ours.get("using"), ours.get("outbox")
        if not isinstance(outbox, bool):
            outbox = task_wants_outbox(self) if outbox is None else conf.outbox(outbox)

        def send(**options: Any) -> SentResult[R]:
            return self._send(call._replace(options=options))

        result: SentResult[R]
        if not self.app.conf.task_always_eager:
            result = send_or_hold(self.app, send, using, call.options, outbox=outbox)
        elif must_wait(using):
            # What is wrong is an error of the call, as for a message.
            check_arguments(self.name, call.args, call.kwargs, *_signatures_in(call.options))
            self._with_header(call, Header())
            result = run_task_on_commit(self._send, call, using)
        else:
            result = self._send(call)
        return result

    def _send(
        self, call: Call, resent: Resent | None = None, *, waits: bool = True
    ) -> SentResult[R]:
        """Send the task, or let ``CAPTURED`` keep its message; ``waits``: a commit may delay it."""
        if apps.ready and "django_celery_safe" not in apps.app_configs:
            raise ConfigurationError(
                f'Task {self.name} is a SafeTask, and "django_celery_safe" is not in '
                f"INSTALLED_APPS: nothing would free the locks of messages, fail steps or check "
                f"the settings. Add it, and run manage.py migrate."
            )
        options = call.options
        try:
            check_arguments(self.name, call.args, call.kwargs, *_signatures_in(options))
        except NotSerializable as error:
            if waits or (options.get("serializer") or self.serializer) == "json":
                raise
            logger.warning("%s The message is sent all the same.", error)
        # A worker's main process sends the retry of a killed run like any other message.
        run = None if resent is None else find_run(options.get("task_id"))
        if resent is not None and run is not None and CAPTURED.get() is None:
            send = partial(self._send, call, resent, waits=waits)
            return run.keep(send, unchanged=resent.unchanged)
        again = resent is not None or options.get("retries")
        carried = read_header(options.get("headers"), self.name) if again else Header()
        header = carried
        if resent is None or not resent.unchanged:
            call, header = self._with_header(call, carried, resent is not None)
        if "sent" not in header:
            return self._publish(call)
        if header["sent"] == carried.get("sent"):
            # Before the publication, because the next run may take the lock right after it.
            sent = pass_on(header["sent"], call.options)
            try:
                return self._publish(call)
            except BaseException:
                if sent is not None:
                    sent.take_back()
                raise
        return send_once(call, self._publish, again=resent is not None)

    def _publish(self, call: Call) -> SentResult[R]:
        """Send as Celery does, and name the argument that can't be serialized."""
        _, args, kwargs, options = call
        try:
            return as_sent_result(super().apply_async(args, kwargs, **options))
        except EncodeError as error:
            serializer = options.get("serializer") or self.serializer
            links = _signatures_in(options)
            raise explain(self.name, args, kwargs, links, serializer, error) from error

    def _with_header(
        self, call: Call, carried: Header, is_resent: bool = False
    ) -> tuple[Call, Header]:
        """
        Return the call with our header among the headers of its options, and the header itself.

        Args:
            carried: The header of the running message, if that is re-sent; otherwise empty.
        """
        asked = call.options.get("single_instance", carried.get("options"))
        options = {name: call.options[name] for name in call.options if name != "single_instance"}
        call, headers, header = call._replace(options=options), options.get("headers"), Header()
        if headers and HEADER in headers:
            # All other fields were copied from another message, or are set below.
            header = read_given_fields(headers, self.name)
            options["headers"] = {name: headers[name] for name in headers if name != HEADER}
        guarded = find_guarded(self)
        # Without unique_until, the key is made when the task runs.
        if asked is not None or (guarded and guarded.options.unique_until is not None):
            header |= lock_fields(call, guarded, asked, carried, is_resent)
        if header:
            options["headers"] = {**(options.get("headers") or {}), HEADER: header}
        return call, header


def _signatures_in(options: dict[str, Any]) -> list[Any]:
    """Return the signatures that travel in the message of a send with these options."""
    return [options[name] for name in SIGNATURES if options.get(name) is not None]


#: Our options of a send on commit, which Celery does not know; a signature can have them too.
_OURS = ("outbox", "using", "send_on_commit")

#: Parameters of Celery's ``apply_async`` that may be positional, after the arguments.
_POSITIONAL = ("task_id", "producer", "link", "link_error", "shadow")


class SafeTask(SafeTaskMixin[P, R], DjangoTask[P, R]):  # type: ignore[misc]
    """
    A Celery task that can be sent on commit.

    Use it for the whole project with ``Celery("shop", task_cls="django_celery_safe:SafeTask")``,
    or for one task with ``@shared_task(base=SafeTask)``.
    """

    abstract = True
