""":class:`SafeTask`, the task base, and :class:`SafeTaskMixin` for bases of one's own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Self

from celery import Task as CeleryTask
from celery._state import get_current_task

from .. import conf
from ..concurrency.guard import Guarded, find_guarded, name_lock, options_for
from ..concurrency.keys import ArgumentsDontFit, call_key
from ..concurrency.message_endings import watch
from ..concurrency.options import DEFAULTS, Options, check_key_names, options_of_call
from ..concurrency.sent import SentLock, find_sent
from ..delivery.copies import COPY_FIELDS, find_resent, resending
from ..delivery.header import HEADER, Header, read_given_fields, read_header, with_header
from ..delivery.wrappers import wrap_run
from ..exceptions import AlreadySent
from ..locks import HeldLock
from .arguments import check_arguments
from .beyond_visibility import warn_if_beyond_visibility
from .capture import is_capturing, publishing_through
from .carried import find_run, has_ended
from .commit import hold, must_wait, note_result, settle
from .deduplicate import publish_once
from .eager import is_running, run_on_commit
from .outbox import UNTIL_DONE, Outbox, checked_outbox, task_wants_outbox
from .sent_in_atomic import warn_if_in_atomic
from .typed import DjangoTask, P, R, Task

if TYPE_CHECKING:
    from celery.canvas import Signature

    from .typed import SentResult


class SafeTaskMixin(Task[P, R]):
    """
    Adds sending on commit to a task class, and changes none of Celery's defaults.

    Attributes:
        send_on_commit: Whether plain ``.delay()`` and ``.apply_async()`` inside
            ``atomic()`` wait for the commit; None: as ``SEND_ON_COMMIT`` says.
        outbox: Whether what is sent on commit stays in the outbox until the broker
            has it; ``"until_done"``: whatever is sent, until it is done; None: as ``OUTBOX``
            says.
        max_deaths: How many processes may die in the task, if it is carried until done, before
            it fails with TaskPoisoned; None: any number; unset: as ``MAX_DEATHS`` says.
    """

    abstract = True
    #: Its runs end the rows of their messages.
    _ends_rows = True
    send_on_commit: bool | None = None
    outbox: Outbox | None = None
    max_deaths: int | conf.Unset | None = conf.UNSET

    if TYPE_CHECKING:
        # Not at run time, where it would stand before that of a project's own task class.
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
        Rolled back, savepoint included: nothing is sent. Outside a transaction
        it is sent at once. A retry of the running task is never held back.

        Args:
            using: Database alias whose commit to wait for; unset: ``"default"``.
            outbox: Whether to keep the message in the outbox, a table of that database,
                until the broker has it, also outside a transaction; ``"until_done"``: until
                the task has ended; None: as the task or ``OUTBOX`` says.
            options: As for ``apply_async``.

        Returns:
            The task's result. Its ``send_error`` is None, or, once the
            publication failed after the commit, that error; such a failure is
            also logged and signalled, and does not leave the commit.

        Raises:
            NotSerializable: A value can't travel in a message.
            WrongTransaction: ``using`` is in autocommit while another database
                is inside ``atomic()``.
            ConfigurationError: The database has no outbox.
        """
        _name_by_text(options)
        if is_capturing() or find_resent(options.get("task_id")) is not None:
            return self._send(args, kwargs, options)
        outbox = task_wants_outbox(self) if outbox is None else outbox
        eager = self.app.conf.task_always_eager
        if not must_wait(using) and (eager or not outbox):
            return self._send(args, kwargs, options)
        if eager:
            self._with_header(args, kwargs, options, Header())  # what is wrong shows now
            return note_result(run_on_commit(self.signature(args, kwargs), using, options))

        def send(given: dict[str, Any]) -> SentResult[R]:
            return self._send(args, kwargs, given)

        result: SentResult[R] = hold(self.app, send, using, options, outbox=outbox)
        return result

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Let a call ask for what ``@single_instance`` does, also where that does not stand."""
        task = super().__new__(cls)
        if task.outbox is not None:
            checked_outbox(task.outbox, f"outbox of {task.name}")
        if task.max_deaths is not conf.UNSET:
            conf.max_deaths(task.max_deaths, f"max_deaths of {task.name}")
        if task.Request == CeleryTask.Request:  # a project's own is left alone
            task.Request = "django_celery_safe.sending.carried_request:SafeRequest"
        watch(runs=True)  # a call can ask for unique_until
        # On the instance: a class' run may call that of its parent.
        task.run = wrap_run(task)  # type: ignore[method-assign]
        return task

    def apply(self, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
        """Run the task here and now, as Celery's; ``single_instance`` as for ``apply_async``."""
        if "single_instance" in options:
            options, _ = self._with_header(args, kwargs, options, Header())
        return super().apply(args, kwargs, *more, **options)

    def apply_async(
        self, args: Any = None, kwargs: Any = None, *more: Any, **options: Any
    ) -> SentResult[R]:
        """
        Send the task; inside ``atomic()``, when it commits if ``send_on_commit`` says so.

        As Celery's, except that a model instance, QuerySet or iterator among the
        arguments raises NotSerializable with every serializer. With ``outbox=True`` or
        ``using`` it is :meth:`apply_async_on_commit`.
        """
        options.update(zip(_POSITIONAL, more, strict=False))
        _name_by_text(options)
        settings = conf.current()
        if self._waits_for_commit(options, settings) and not is_running(options.get("task_id")):
            return self.apply_async_on_commit(args, kwargs, **options)
        options = {name: options[name] for name in options if name not in _OURS}
        if settings["WARN_IN_ATOMIC"] and not self._leaves_rightly(options.get("task_id")):
            warn_if_in_atomic(self.name)
        return self._send(args, kwargs, options)

    def lock_name(self, *args: P.args, **kwargs: P.kwargs) -> str:
        """
        Return the name of the lock under which the task runs with these arguments.

        That of its message, with ``unique_until``, is ``sent:`` and this.

        Raises:
            ConfigurationError: The task has no ``@single_instance``, and so no lock.
            TypeError: The arguments don't fit the task.
        """
        return name_lock(self, args, kwargs)

    def retry(self, *args: Any, **kwargs: Any) -> Any:
        """Send the running task again, as Celery's; never held back, since Retry rolls back."""
        error = kwargs.get("exc") or sys.exc_info()[1]
        if error is not None and has_ended(self.request):
            raise error  # a row tells by now what becomes of the task
        if self.request.is_eager:
            return super().retry(*args, **kwargs)
        with resending(self.request.id):
            return super().retry(*args, **kwargs)

    def on_replace(self, sig: Signature[Any]) -> Any:
        """Send what replaces the running task, as Celery's; never held back."""
        if self.request.is_eager:
            return super().on_replace(sig)
        run = find_run(self.request.id)
        with resending(None), nullcontext() if run is None else run.keeping():
            return super().on_replace(sig)

    def _waits_for_commit(self, options: dict[str, Any], settings: dict[str, Any]) -> bool:
        if any(options.get(name) for name in _OURS):
            return True
        outbox = settings["OUTBOX"] if self.outbox is None else self.outbox
        if outbox == UNTIL_DONE and "outbox" not in options:
            return True  # so is the next link of a chain, which Celery sends
        wanted = self.send_on_commit
        return bool(settings["SEND_ON_COMMIT"] if wanted is None else wanted)

    def _leaves_rightly(self, task_id: str | None) -> bool:
        """Return whether a send waits for its commit already, or must not wait."""
        return is_capturing() or find_resent(task_id) is not None or is_running(task_id)

    def _send(self, args: Any, kwargs: Any, options: dict[str, Any]) -> SentResult[R]:
        check_arguments(self.name, args, kwargs, [options.get(name) for name in _CARRIED])
        if not self.app.conf.task_always_eager:
            warn_if_beyond_visibility(self.app, self.name, options)
        # A retry of a killed run is sent by the worker's main process, as any send is.
        resent = find_resent(options.get("task_id"))
        run = find_run(options.get("task_id")) if resent is not None else None
        if run is not None and not is_capturing():
            with run.keeping():
                return self._send(args, kwargs, options)
        again = resent is not None or options.get("retries")
        carried = read_header(options.get("headers"), self.name) if again else Header()
        header = carried
        if resent is None or not resent.unchanged:
            options, header = self._with_header(args, kwargs, options, carried)
        if "sent" not in header:
            return note_result(super().apply_async(args, kwargs, **options))
        if header["sent"] == carried.get("sent"):
            # Before the publication, since the next run may have the lock right after it.
            sent = self._pass_on(header["sent"], options)
            try:
                return note_result(super().apply_async(args, kwargs, **options))
            except BaseException:
                if sent is not None:
                    sent.take_back()
                raise
        return self._send_once(args, kwargs, options, header)

    def _send_once(
        self, args: Any, kwargs: Any, options: dict[str, Any], header: Header
    ) -> SentResult[R]:
        """Send the task now if it is no duplicate, or find that out at the commit."""
        guarded = find_guarded(self) or Guarded(self.run, DEFAULTS, False)
        raises = options_for(guarded, header).on_duplicate == "raise"
        if is_capturing():
            if raises and not header.get("canvas"):
                raise TypeError(
                    f'Task {self.name} has on_duplicate="raise", and whether this send is a '
                    f"duplicate shows at the commit, when nobody is left to raise to. Send it "
                    f'outside of the transaction, or use on_duplicate="existing" and look at '
                    f"the result's is_duplicate after the commit."
                )
            result = note_result(super().apply_async(args, kwargs, **options))
            result.is_duplicate = None
            return result
        outcomes: dict[str, tuple[dict[str, Any], HeldLock | None]] = {}

        def publish(headers: dict[str, Any], publish_now: Callable[[], object]) -> bool:
            again = find_resent(headers.get("id")) is not None
            held = publish_once(headers, publish_now, again=again)
            outcomes[headers.get("id", "")] = headers, held
            return held is None

        with publishing_through(self.app, publish):
            result = note_result(super().apply_async(args, kwargs, **options))
        if result.id not in outcomes:
            return result  # it ran eagerly
        headers, held = outcomes[result.id]
        if held is not None:
            backend: Any = self.backend
            backend.remove_pending_result(result)
        settle(result, headers, held)  # a parent's trail has it already
        if held is not None and raises:
            name = held.name.removeprefix("sent:")
            raise AlreadySent(name, held.holder.task_id or "", held.remaining)
        if find_resent(result.id) is not None:
            # A message that replaces its own run goes on with that run's lock.
            self._pass_on(read_header(headers, self.name).get("sent"), options)
        return result

    def _pass_on(self, token: str | None, options: dict[str, Any]) -> SentLock | None:
        """Let the lock of the running task's message go on, if it is that which is sent again."""
        running = get_current_task()
        sent = None if running is None else find_sent(running.request)
        if sent is None or sent.token != token:
            return None
        delay = options.get("countdown") or options.get("eta")  # as Celery does
        sent.pass_on(sent.lease(delay, options.get("expires")))
        return sent

    def _with_header(
        self, args: Any, kwargs: Any, options: dict[str, Any], carried: Header
    ) -> tuple[dict[str, Any], Header]:
        """Return options that let travel what the run, and others, have to know; and that."""
        asked = options.get("single_instance", carried.get("options"))
        options = {name: value for name, value in options.items() if name != "single_instance"}
        headers = options.get("headers")
        header = Header()
        if headers and HEADER in headers:
            # The other fields were copied from another message, or are set below.
            header = read_given_fields(headers, self.name)
            options["headers"] = {name: headers[name] for name in headers if name != HEADER}
        guarded = find_guarded(self)
        if asked is not None or guarded is not None:
            guarded = guarded or Guarded(self.run, DEFAULTS, False)
            header |= self._lock_fields(guarded, asked, args, kwargs, options, carried)
        return (with_header(options, header) if header else options), header

    def _lock_fields(
        self,
        guarded: Guarded,
        asked: Any,
        args: Any,
        kwargs: Any,
        options: dict[str, Any],
        carried: Header,
    ) -> Header:
        """Return what a message says of its locks; nothing if the arguments don't fit the task."""
        own = guarded.options
        if asked is not None:
            own = options_of_call(own, asked)
            check_key_names(guarded.function, own.key, plain=True)
        key = self._key(guarded, own, args, kwargs, options)
        if key is None:
            return Header()
        header = Header(task=self.name, key=key)
        if not isinstance(own.lock, conf.Unset):
            header["lock"] = own.lock
        if asked is not None:
            header["options"] = dict(asked)
        if carried or options.get("retries"):
            # A retry: nothing may be in its way. With another key it goes on without this lock.
            if (carried.get("lock"), carried.get("key")) == (header.get("lock"), key):
                old = {name: carried[name] for name in carried if name not in COPY_FIELDS}
                header = {**old, **header}
        elif own.unique_until is not None:
            header["sent"] = os.urandom(16).hex()
            header["canvas"] = (
                any(options.get(name) for name in _CANVAS)
                or find_resent(options.get("task_id")) is not None
            )
            if not isinstance(own.sent_timeout, conf.Unset):
                header["sent_timeout"] = own.sent_timeout
            if not isinstance(own.cache, conf.Unset):
                header["cache"] = own.cache
        return header

    def _key(
        self, guarded: Guarded, own: Options, args: Any, kwargs: Any, options: dict[str, Any]
    ) -> str | None:
        """Return the key of a call; None if the arguments don't fit the task."""
        serializer = options.get("serializer") or self.serializer
        dump_models: Any = getattr(self, "_dump_pydantic_arguments", None)
        if dump_models is not None and serializer != "pickle":
            args, kwargs = dump_models(args, kwargs)
        try:
            return call_key(
                self.name,
                guarded.function,
                own.key,
                tuple(args or ()),
                kwargs or {},
                bound=guarded.bound,
                serializer=serializer,
            )
        except ArgumentsDontFit:
            # Celery says so itself, unless typing is off.
            return None


def _name_by_text(options: dict[str, Any]) -> None:
    """Let a ``task_id`` be a text, as ids are compared everywhere: a UUID is given at times."""
    if options.get("task_id") is not None:
        options["task_id"] = str(options["task_id"])


#: Options of a send on commit that Celery does not know; a signature can have them too.
_OURS = ("outbox", "using")

#: What Celery's ``apply_async`` takes by position after the arguments.
_POSITIONAL = ("task_id", "producer", "link", "link_error", "shadow")

#: Options with signatures that travel in the task's message.
_CARRIED = ("link", "link_error", "chain", "chord")

#: Options that only the parts of a canvas have, for which others wait.
_CANVAS = (*_CARRIED, "group_id", "parent_id", "root_id")


class SafeTask(SafeTaskMixin[P, R], DjangoTask[P, R]):  # type: ignore[misc]
    """
    A Celery task that can be sent on commit.

    Use it with ``@shared_task(base=SafeTask)``, or for a whole project with
    ``Celery("shop", task_cls="shop.tasks:AppTask")`` where AppTask derives from it.
    """

    abstract = True
