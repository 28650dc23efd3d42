"""
The header of a message that is about to be sent: its key, and the lock that it takes.

``concurrency`` says what the fields mean, and ``delivery.header`` which there are.
"""

from __future__ import annotations

import os
from datetime import datetime
from typing import Any, Final

from celery.signals import before_task_publish
from celery.utils.time import maybe_make_aware
from kombu.utils.uuid import uuid

from .. import conf
from ..compat import dump_models
from ..concurrency.guard import Guarded, find_guarded
from ..concurrency.keys import call_key
from ..concurrency.options import DEFAULTS, Options, check_key_names, options_of_call
from ..delivery.call import is_as_sent
from ..delivery.header import FORMAT, HEADER, Header, read_given_fields
from .arguments import show

#: Options with signatures that travel in the task's message.
_SIGNATURES: Final = ("link", "link_error", "chain", "chord")

#: Options that only parts of a canvas have; other tasks wait for such a part.
_CANVAS = (*_SIGNATURES, "group_id", "parent_id", "root_id")

#: Options that replace the texts of the arguments.
_SHOWN = ("argsrepr", "kwargsrepr")


def signatures_in(options: dict[str, Any]) -> list[Any]:
    """Return the signatures that travel in the message of a send with these options."""
    return [options[name] for name in _SIGNATURES if options.get(name) is not None]


def add_header(
    task: Any,
    args: Any,
    kwargs: Any,
    options: dict[str, Any],
    carried: Header,
    is_resent: bool = False,
) -> tuple[dict[str, Any], Header]:
    """Return the options of a send with our header added, and the header itself."""
    asked = options.get("single_instance", carried.get("options"))
    options = {name: value for name, value in options.items() if name != "single_instance"}
    headers = options.get("headers")
    header = Header()
    if headers and HEADER in headers:
        # All other fields were copied from another message, or are set below.
        header = read_given_fields(headers, task.name)
        options["headers"] = {name: headers[name] for name in headers if name != HEADER}
    guarded = find_guarded(task)
    # Without unique_until, the key is made when the task runs.
    if asked is not None or (guarded and guarded.options.unique_until is not None):
        guarded = guarded or Guarded(task.run, DEFAULTS, False)
        header |= _lock_fields(task, guarded, asked, args, kwargs, options, carried, is_resent)
    if header:
        header["format"] = FORMAT
        options["headers"] = {**(options.get("headers") or {}), HEADER: header}
    return options, header


def _lock_fields(
    task: Any,
    guarded: Guarded,
    asked: Any,
    args: Any,
    kwargs: Any,
    options: dict[str, Any],
    carried: Header,
    is_resent: bool,
) -> Header:
    """Return the header fields for a message's locks."""
    own = guarded.options
    if asked is not None:
        own = options_of_call(own, asked)
        check_key_names(guarded.function, own.key, plain=True)
    key = carried.get("key")
    is_same = asked == carried.get("options") and kwargs is not None
    if key is None or not is_same or not is_as_sent(task.request, args or (), kwargs):
        key = _key(task, guarded, own, args, kwargs, options)
    header = Header(task=task.name, key=key)
    if not isinstance(own.lock, conf.Unset):
        header["lock"] = own.lock
    if asked is not None:
        header["options"] = dict(asked)
    if carried or options.get("retries"):
        # A retry takes no new lock, which could be held by another message. With the same
        # key it keeps the old lock.
        if (carried.get("lock"), carried.get("key")) == (header.get("lock"), key):
            old = {name: carried[name] for name in carried if name != "copy"}
            header = {**old, **header}
    elif own.unique_until is not None:
        header["sent"] = os.urandom(16).hex()
        header["canvas"] = is_resent or any(map(options.get, _CANVAS))
        if isinstance(own.unique_until, float):
            header["period"] = own.unique_until
    return header


def _key(
    task: Any, guarded: Guarded, own: Options, args: Any, kwargs: Any, options: dict[str, Any]
) -> str:
    """Return the key of a call that is sent."""
    serializer = options.get("serializer") or task.serializer
    # The attribute exists since Celery 5.7, and is None for most tasks.
    has_models = getattr(task, "_dump_pydantic_arguments", True) is not None
    if has_models and serializer != "pickle":
        args, kwargs = dump_models(task, args, kwargs)
    return call_key(
        task.name,
        guarded.function,
        own.key,
        tuple(args or ()),
        kwargs or {},
        bound=guarded.bound,
        serializer=serializer,
        is_send=True,
    )


def headers_to_be(
    task: Any, args: Any, kwargs: Any, options: dict[str, Any], header: Header
) -> dict[str, Any]:
    """Return those headers of a message to be built that the lock of its send needs."""
    delay = options.get("countdown") or options.get("eta")  # as Celery does
    moments = {"eta": delay, "expires": options.get("expires", task.expires)}
    for name, moment in moments.items():
        if isinstance(moment, datetime):
            moments[name] = maybe_make_aware(moment, task.app.timezone)
    headers = {"task": task.name, "id": options.get("task_id") or uuid(), HEADER: header}
    # A receiver may redact what the message shows.
    if conf.get("SHOW_ARGUMENTS") and not before_task_publish.receivers:
        headers |= show(args or (), kwargs or {})
        headers |= {name: options[name] for name in _SHOWN if options.get(name)}
    return headers | moments
