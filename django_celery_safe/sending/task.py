""":class:`SafeTask`, the task base, and :class:`SafeTaskMixin` for bases of one's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery import Task
from celery.contrib.django.task import DjangoTask

from .. import conf
from ..concurrency.copies import HEADER, is_resending, keeps_key, resending
from ..concurrency.guard import find_guarded
from ..concurrency.keys import call_key
from ..exceptions import ConfigurationError, NotSerializable
from .arguments import check_arguments
from .capture import is_capturing
from .commit import hold, must_wait, note_result
from .eager import is_running, run_on_commit

if TYPE_CHECKING:
    from celery.canvas import Signature


class SafeTaskMixin(Task):  # type: ignore[type-arg]
    """
    Adds sending on commit to a task class, and changes none of Celery's defaults.

    Attributes:
        send_on_commit: Whether plain ``.delay()`` and ``.apply_async()`` inside
            ``atomic()`` wait for the commit; None: as ``SEND_ON_COMMIT`` says.
    """

    abstract = True
    send_on_commit: bool | None = None

    def delay_on_commit(self, *args: Any, **kwargs: Any) -> Any:
        """Send the task when the transaction commits; see :meth:`apply_async_on_commit`."""
        return self.apply_async_on_commit(args, kwargs)

    def apply_async_on_commit(
        self,
        args: Any = None,
        kwargs: Any = None,
        *,
        using: str | None = None,
        **options: Any,
    ) -> Any:
        """
        Send the task when the transaction commits.

        The message is made now: the id is final, the arguments are frozen, and
        arguments that don't fit or can't be sent raise here, before the commit.
        Rolled back, savepoint included: nothing is sent. Outside a transaction
        it is sent at once. A retry of the running task is never held back.

        Args:
            using: Database alias whose commit to wait for; unset: ``"default"``.
            options: As for ``apply_async``.

        Returns:
            The task's result. Its ``send_error`` is None, or, once the
            publication failed after the commit, that error; such a failure is
            also logged and signalled, and does not leave the commit.

        Raises:
            NotSerializable: A value can't travel in a message.
            WrongTransaction: ``using`` is in autocommit while another database
                is inside ``atomic()``.
        """
        if is_capturing() or is_resending() or not must_wait(using):
            return self._send(args, kwargs, options)
        if self.app.conf.task_always_eager:
            return note_result(run_on_commit(self.signature(args, kwargs), using, options))
        return hold(self.app, lambda given: self._send(args, kwargs, given), using, options)

    def apply_async(self, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
        """
        Send the task; inside ``atomic()``, when it commits if ``send_on_commit`` says so.

        As Celery's, except that a model instance, QuerySet or iterator among the
        arguments raises NotSerializable with every serializer.
        """
        options.update(zip(_POSITIONAL, more, strict=False))
        if self._waits_for_commit() and not is_running(options.get("task_id")):
            return self.apply_async_on_commit(args, kwargs, **options)
        return self._send(args, kwargs, options)

    def retry(self, *args: Any, **kwargs: Any) -> Any:
        """Send the running task again, as Celery's; never held back, since Retry rolls back."""
        if self.request.is_eager:
            return super().retry(*args, **kwargs)
        with resending():
            return super().retry(*args, **kwargs)

    def on_replace(self, sig: Signature[Any]) -> Any:
        """Send what replaces the running task, as Celery's; never held back."""
        if self.request.is_eager:
            return super().on_replace(sig)
        with resending():
            return super().on_replace(sig)

    def _waits_for_commit(self) -> bool:
        wanted = self.send_on_commit
        return bool(conf.get("SEND_ON_COMMIT") if wanted is None else wanted)

    def _send(self, args: Any, kwargs: Any, options: dict[str, Any]) -> Any:
        if "single_instance" in options:
            raise ConfigurationError(
                f"Task {self.name} was sent with single_instance={options['single_instance']!r}, "
                f"and options for one call are not there yet. Give them to @single_instance."
            )
        check_arguments(self.name, args, kwargs, [options.get(name) for name in _CARRIED])
        options = self._with_key(args, kwargs, options)
        return note_result(super().apply_async(args, kwargs, **options))

    def _with_key(self, args: Any, kwargs: Any, options: dict[str, Any]) -> dict[str, Any]:
        """Let the key of a single-instance task travel with its message."""
        guarded = find_guarded(self)
        if guarded is None or keeps_key():
            return options
        serializer = options.get("serializer") or self.serializer
        dump_models: Any = getattr(self, "_dump_pydantic_arguments", None)
        if dump_models is not None and serializer != "pickle":
            args, kwargs = dump_models(args, kwargs)
        try:
            key = call_key(
                self.name,
                guarded.function,
                guarded.options,
                tuple(args or ()),
                kwargs or {},
                bound=guarded.bound,
                serializer=serializer,
            )
        except NotSerializable:
            raise
        except TypeError:
            # Arguments that don't fit. Celery says so itself, unless typing is off.
            return options
        headers = dict(options.get("headers") or {})
        headers[HEADER] = {**headers.get(HEADER, {}), "key": key}
        return {**options, "headers": headers}


#: What Celery's ``apply_async`` takes by position after the arguments.
_POSITIONAL = ("task_id", "producer", "link", "link_error", "shadow")

#: Options with signatures that travel in the task's message.
_CARRIED = ("link", "link_error", "chain", "chord")


class SafeTask(SafeTaskMixin, DjangoTask):  # type: ignore[misc,type-arg]
    """
    A Celery task that can be sent on commit.

    Use it with ``@shared_task(base=SafeTask)``, or for a whole project with
    ``Celery("shop", task_cls="shop.tasks:AppTask")`` where AppTask derives from it.
    """

    abstract = True
