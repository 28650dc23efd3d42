"""The task classes of projects with one of their own; imported when the apps are ready."""

from typing import Any

from celery.contrib.django.task import DjangoTask
from django.db import transaction

from django_celery_safe import SafeTask, SafeTaskMixin
from tests.company.neighbours import acting, acting_user


class HeaderTask(SafeTask):
    """Sends the acting user in Celery's old place for headers, as tracers do."""

    abstract = True

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        headers = dict(options.pop("headers", None) or {})
        headers["headers"] = {"user": acting_user.get()}
        return super().apply_async(args, kwargs, headers=headers, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with acting((self.request.headers or {}).get("user")):
            return super().__call__(*args, **kwargs)


class UserTask(SafeTaskMixin, DjangoTask):
    """Adds a keyword, takes it out before the run, and may raise."""

    abstract = True
    typing = False

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        kwargs = {**(kwargs or {}), "_user": acting_user.get()}
        return super().apply_async(args, kwargs, **options)

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        if args and args[0] == "before_start raises":
            raise LookupError("before_start raises")

    def __call__(self, *args: Any, _user: str | None = None, **kwargs: Any) -> Any:
        if args and args[0] == "call raises":
            raise LookupError("call raises")
        with acting(_user):
            result = super().__call__(*args, **kwargs)
        if args and args[0] == "call raises at its end":
            raise LookupError("call raises at its end")
        return result


class AtomicTask(SafeTask):
    """Runs each task in a transaction."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with transaction.atomic():
            return super().__call__(*args, **kwargs)
