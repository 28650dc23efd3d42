"""Faults of the settings, and of the cache or database that holds the locks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from django.core.checks import CheckMessage

from .. import conf
from ..exceptions import ConfigurationError
from ..inspection import lock_store
from ..inspection.lock_store import fault
from .project import Project


def check_settings(project: Project) -> Iterator[CheckMessage]:
    """E001: a setting that does not exist, or whose value is not valid."""
    try:
        given = conf.given()
    except ConfigurationError as error:
        yield fault("E001", str(error), f"Write {conf.NAME} = {{...}}.")
        return
    for name in [each for each in given if each not in conf.DEFAULTS]:
        text = f"{conf.NAME} has no setting {name!r}; it does nothing."
        known = f"It knows: {', '.join(conf.DEFAULTS)}."
        yield fault("E001", text, conf.did_you_mean(name, conf.DEFAULTS).lstrip() or known)
    for name, default in conf.DEFAULTS.items():
        try:
            conf.get(name)
        except ConfigurationError as error:
            yield fault("E001", str(error), f"The default is {default!r}.")


def check_lock_place(project: Project) -> Iterable[CheckMessage]:
    """E002: locks can't live in the place of the settings. W002: they may get lost there."""
    # A project whose tasks run eagerly has no workers that would have to share its locks.
    eager = project.app.conf.task_always_eager
    return (one for one in lock_store.check_place() if one.is_serious() or not eager)


def check_lock_server(project: Project) -> Iterable[CheckMessage]:
    """E002: the server refuses locks. W002: it may lose them. W010: it does not answer."""
    if any(one.is_serious() for one in lock_store.check_place()):
        return []  # check_lock_place reports it
    return lock_store.check_server()
