"""
The Celery app of the tests, configured by Django settings that begin with ``CELERY_``.

In the test process the fixture ``broker`` points it at the private Redis; a worker
gets the same from the settings that ``CeleryWorker`` passes on.
"""

from typing import Any

from celery import Celery

app = Celery("tests", include=["tests.app.tasks"])
app.config_from_object("django.conf:settings", namespace="CELERY")


def tell_workers(command: str, *args: Any, **options: Any) -> Any:
    """
    Send a control command by a new connection: the pool's may be to a server long gone.

    With ``reply=True`` a worker must answer.
    """
    if options.get("reply"):
        options.setdefault("timeout", 30)  # where it is not set, no answer in 1 s is no error
    with app.connection_for_write() as connection:
        answer = getattr(app.control, command)(*args, connection=connection, **options)
    assert answer or not options.get("reply"), f"no worker answered {command}{args}"
    return answer
