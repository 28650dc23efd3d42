"""Steps for a real worker, and for runs in this process."""

from typing import Any

from celery import shared_task

from django_celery_safe import SafeTask, stages


@shared_task(base=SafeTask)
@stages.step
def note(params: dict[str, Any], name: str = "note", value: Any = True) -> dict[str, Any]:
    """Say what it was given."""
    return {name: value}


@shared_task(base=SafeTask)
@stages.step
def add(params: dict[str, Any], number: int = 1) -> dict[str, Any]:
    """Add a number to the sum in the params."""
    return {"sum": params.get("sum", 0) + number}


@shared_task(base=SafeTask)
@stages.step
def crash(params: dict[str, Any]) -> None:
    """Fail by an error, unless the params say that all is well."""
    if not params.get("well"):
        raise ValueError("it does not work")


@shared_task(base=SafeTask, autoretry_for=(ConnectionError,), default_retry_delay=0, max_retries=3)
@stages.step
def reconnect(params: dict[str, Any]) -> dict[str, Any]:
    """Fail twice, and be retried by Celery."""
    if (retries := reconnect.request.retries) < 2:
        raise ConnectionError("refused")
    return {"retries": retries}


@shared_task(base=SafeTask)
def plain(data: dict[str, Any], name: str) -> dict[str, Any]:
    """Do it the first way of the document that stages are from."""
    return {"id": data["task_id"], "name": name, "result": True, "params": {"plain": name}}


@shared_task(base=SafeTask, ignore_result=True)
@stages.step
def nothing(params: dict[str, Any]) -> None:
    """Do nothing, for benchmarks."""


@shared_task(base=SafeTask, ignore_result=True)
@stages.step
def unread(params: dict[str, Any]) -> None:
    """Do nothing, for a message that no worker gets."""


@shared_task
def nothing_else() -> None:
    """Do nothing, and know nothing of stages."""


@shared_task
def join() -> None:
    """Stand between two chords."""
