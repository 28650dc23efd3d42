"""Text of others in logs and on terminals is shown, and steers nothing."""

import logging
from importlib import import_module

import pytest
from pytest_django import Settings

from django_celery_safe import cache_lock
from django_celery_safe.events import MESSAGE_DEAD
from tests.locks.test_portable import UnknownCache
from tests.modules import find_modules
from tests.sending.conftest import hearing

#: Begins a line of its own in a log, and clears a terminal.
EVIL = "gone\n2026-01-01 INFO all is well\x1b[2J"
SHOWN = r"gone\n2026-01-01 INFO all is well\x1b[2J"


class EvilCache(UnknownCache):
    """A cache whose errors are somebody else's text."""

    def delete(self, key: str, version: int | None = None) -> bool:
        """Fail."""
        raise OSError(EVIL)


def test_an_error_of_a_server_is_one_line_of_the_log(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """The text of a server's error begins no line of the log, and steers no terminal."""
    settings.CACHES = {"default": {"BACKEND": f"{__name__}.{EvilCache.__qualname__}"}}
    with cache_lock("evil") as lock:
        assert lock
    (message,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert "could not be released" in message
    assert SHOWN in message
    assert message.isprintable()


def test_fields_of_an_event_are_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """A name, an error or an object that an event shows is escaped; its field is as it was."""
    with hearing(MESSAGE_DEAD.signal) as heard:
        event = MESSAGE_DEAD.also("%(task)s and %(task)r, %(attempts)d: %(error)s")
        event.emit(None, task=EVIL, attempts=7, error=ValueError(EVIL))
    (record,) = caplog.records
    assert record.getMessage() == f"{SHOWN} and {SHOWN!r}, 7: ValueError: {SHOWN}"
    assert ([one["task"] for one in heard], vars(record)["safe_task"]) == ([EVIL], EVIL)


def test_each_logger_of_the_package_escapes() -> None:
    """No module of the package logs past the filter."""
    for module in find_modules():
        import_module(module)
    ours = {
        name: logger
        for name, logger in logging.root.manager.loggerDict.items()
        if name.startswith("django_celery_safe.") and isinstance(logger, logging.Logger)
    }
    assert len(ours) > 20
    assert [name for name, logger in ours.items() if not logger.filters] == []
