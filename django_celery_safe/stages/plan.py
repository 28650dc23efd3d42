"""
Plans: which tasks run together, and which run after them. Plain data, no database.

A plan is checked as a whole before anything is written, and so are the key, the name and the link
of its run: the caller gets an error at once. :mod:`django_celery_safe.stages.engine` runs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from celery import Celery, current_app
from celery.local import Proxy

from ..exceptions import ConfigurationError
from ..values import NotPlain
from .entries import ENTRY_HINT, Entry, encode_named, invalid, read_entries

#: Most characters of a key and of a name, as the columns have them.
LONGEST_LABEL: Final = 255
#: Allowed starts of a URL. A click on another, such as ``javascript:``, could run code.
URL_STARTS: Final = ("/", "http://", "https://")


class Plan(NamedTuple):
    """
    A plan for ``stages.start``, made and checked by :func:`make_plan`.

    Attributes:
        stages: The entries of each stage, in the order in which they were given.
        params: The params of the first stage, as JSON.
    """

    stages: list[list[Entry]]
    params: str

    def describe(self) -> str:
        """
        Return the stages as text: one line for each stage and one for each of its tasks.

        Example:
            >>> from django_celery_safe import stages
            >>> plan = stages.make_plan([("shop.tasks.notify", 1), ("shop.tasks.fetch", 3)])
            >>> print(plan.describe())
            Stage 1 of 2, priority 3
              shop.tasks.fetch
            Stage 2 of 2, priority 1
              shop.tasks.notify
        """
        lines = []
        for number, entries in enumerate(self.stages, 1):
            priority = entries[0].priority
            lines.append(f"Stage {number} of {len(self.stages)}, priority {priority:g}")
            lines += [f"  {entry}" for entry in entries]
        return "\n".join(lines)


def make_plan(
    plan: Plan | Mapping[str, Any] | Iterable[Any], params: Mapping[str, Any] | None = None
) -> Plan:
    """
    Check a plan and return it in its final form; nothing is written or sent.

    Args:
        plan, params: As for ``stages.start``. If the plan is a :class:`Plan` already, only its
            params are replaced, unless ``params`` is None.

    Raises:
        ConfigurationError: The plan can't be run; the error names the entry.
    """
    if isinstance(plan, Plan):
        return plan if params is None else plan._replace(params=_encode_params(params))
    app: Celery = current_app._get_current_object()  # type: ignore[attr-defined]
    if isinstance(plan, Mapping):
        plan, params = _read_dictionary(plan, params)
    # A lazy task claims to be iterable but is not.
    if isinstance(plan, str | bytes | Proxy) or not isinstance(plan, Iterable):
        raise invalid(f"{plan!r} is not a list of entries", ENTRY_HINT)
    stages = read_entries(plan, app)
    in_order = [stages[priority] for priority in sorted(stages, reverse=True)]
    return Plan(in_order, _encode_params(params))


def _read_dictionary(
    plan: Mapping[str, Any], params: Mapping[str, Any] | None
) -> tuple[Any, Mapping[str, Any] | None]:
    # The source document of this form spells ``sub_tasks`` in two ways.
    if "sub_tasks" not in plan or not plan.keys() <= {"sub_tasks", "params"}:
        form = 'Write {"sub_tasks": [["task", 1]], "params": {}}.'
        raise invalid(f"it is a dictionary with {', '.join(map(repr, plan))}", form)
    if params is not None and "params" in plan:
        raise invalid("its 'params' are given twice", "Give them once.")
    return plan["sub_tasks"], plan.get("params", params)


def _encode_params(params: Any) -> str:
    try:
        return "{}" if params is None else encode_named(params) or "{}"
    except NotPlain as error:
        hint = "Give a dict of little and plain data: primary keys."
        raise invalid(f"its params can't be kept: {error}", hint) from error


def make_labels(key: Any, name: Any, url: Any) -> dict[str, str]:
    """
    Return the texts by which people and programs identify a run, as its row takes them.

    Args:
        key: A text that has to fit uncut.
        name: A text, which may be lazy; a name that is too long is cut.
        url: A URL, or an object with ``get_absolute_url()``.

    Raises:
        ConfigurationError: A label can't be stored.
    """
    if not isinstance(key, str) or not key.isprintable() or len(key) > LONGEST_LABEL:
        raise ConfigurationError(
            f"The run can't be started: its key is {key!r:.300}. Give a text that can be seen, of "
            f'at most {LONGEST_LABEL} characters, such as "album:7".'
        )
    text = "" if name is None else str(name)
    shown = "".join(letter if letter.isprintable() else " " for letter in text)
    if len(shown) > LONGEST_LABEL:
        shown = f"{shown[: LONGEST_LABEL - 1]}…"
    address = str(url.get_absolute_url() if hasattr(url, "get_absolute_url") else url)
    if address and not (address.startswith(URL_STARTS) and address.isprintable()):
        raise ConfigurationError(
            f"The run can't be started: its url is {address!r:.200}, which is not an address. Give "
            f'a path such as "/albums/7/", or an object with get_absolute_url().'
        )
    return {"key": key, "name": shown, "url": address}
