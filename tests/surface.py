"""
Lists the public surface: all names that a user may have to learn, beside limits that may only fall.

``python -m tests.surface`` prints each kind with its names, and ends with 1 if a kind or the sum
is above its limit. The names are read from the code, and docs/reference is made of it.
"""

import os
import re
import sys
import textwrap
from argparse import ArgumentParser
from collections.abc import Iterator
from inspect import Parameter, get_annotations, signature
from itertools import groupby
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Final

import django
from django.core.management import BaseCommand, load_command_class
from django.dispatch import Signal

APP: Final = "django_celery_safe"
PACKAGE: Final = Path(__file__).parent.parent / APP

#: How many names of each kind there may be, and in all.
LIMITS: Final = {
    "names": 34,
    "stages": 8,
    "models": 8,
    "settings": 12,
    "options": 22,
    "sends": 2,
    "actions": 14,
    "flags": 30,
    "signals": 15,
    "checks": 15,
    "metrics": 10,
    "testing": 9,
    "pages": 6,
    "tasks": 1,
    "in all": 185,
}


def read_surface() -> dict[str, list[str]]:
    """Return the names of each kind. The last word is what a user writes, after its owner."""
    actions = dict(_iter_actions())
    sources = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    return {
        "names": _get("__all__"),
        "stages": _get("stages.__all__"),
        "models": _get("models.__all__"),
        "settings": [*_get("conf.DEFAULTS")],
        "options": [
            *_iter_options(
                "cache_lock", "single_instance", "idempotent", "IdempotentMixin.do_once"
            ),
            *(f"SafeTaskMixin {name}" for name in get_annotations(_get("SafeTaskMixin"))),
        ],
        "sends": [*_iter_options("send_on_commit")],
        "actions": [*actions],
        "flags": [f"{name} {flag}" for name in actions for flag in _iter_flags(actions[name])],
        "signals": [n for n, value in vars(_get("signals")).items() if isinstance(value, Signal)],
        "checks": sorted(set(re.findall(r'"([EW]\d{3})"', sources))),
        "metrics": [*_iter_metrics()],
        "testing": [*_get("testing.__all__"), *_iter_own(resolve_name(f"pytest_{APP}"))],
        "pages": [*_iter_pages()],
        "tasks": [*_iter_own(_get("tasks"))],
    }


def _get(path: str) -> Any:
    return resolve_name(f"{APP}.{path}")


def _iter_own(module: Any) -> Iterator[str]:
    """Yield the public tasks or fixtures of a module."""
    for name, value in vars(module).items():
        if getattr(value, "__module__", "") == module.__name__ and not name.startswith("_"):
            yield f"{module.__name__} {name}"


def _iter_options(*functions: str) -> Iterator[str]:
    for name in functions:
        for option in signature(_get(name)).parameters.values():
            if option.kind is Parameter.KEYWORD_ONLY:
                yield f"{name} {option.name}"


def _iter_actions() -> Iterator[tuple[str, ArgumentParser]]:
    for path in sorted(PACKAGE.glob("management/commands/[!_]*.py")):
        parser = load_command_class(APP, path.stem).create_parser("manage.py", path.stem)
        (actions,) = (each.choices for each in parser._actions if isinstance(each.choices, dict))
        yield from ((f"{path.stem} {name}", actions[name]) for name in actions)


def _iter_flags(action: ArgumentParser) -> Iterator[str]:
    """Yield the flags and arguments of an action beside those of every command of Django."""
    common = {each.dest for each in BaseCommand().create_parser("manage.py", "")._actions}
    own = (each for each in action._actions if each.dest not in common)
    yield from (str((each.option_strings or [each.metavar])[0]) for each in own)


def _iter_metrics() -> Iterator[str]:
    prometheus = _get("contrib.prometheus")
    yield f"{prometheus.PREFIX}{prometheus.COUNTER}_total"
    yield from (f"{prometheus.PREFIX}{name}" for name in prometheus.GAUGES)


def _iter_pages() -> Iterator[str]:
    models = [model._meta for model in resolve_name("django.contrib.admin.site")._registry]
    yield from (model.object_name for model in models if model.app_label == APP)
    yield from (f"/admin/{APP}/" for _ in PACKAGE.glob(f"templates/admin/{APP}/app_index.html"))


def main() -> int:
    """Print the names of each kind; return 1 if a limit is exceeded."""
    surface = read_surface()
    counts = {kind: len(names) for kind, names in surface.items()}
    counts["in all"] = sum(counts.values())
    for kind, count in counts.items():
        mark = "" if count <= LIMITS[kind] else "  TOO MANY"
        print(f"{kind:<10}{count:>4} of {LIMITS[kind]:>4}{mark}")
        for owner, names in groupby(surface.get(kind, ()), lambda name: name.rpartition(" ")[0]):
            text = ", ".join(name.rpartition(" ")[2] for name in names)
            indent = f"    {owner}: " if owner else "    "
            print("\n        ".join(textwrap.wrap(indent + text, 92, break_on_hyphens=False)))
    return int(any(counts[kind] > LIMITS[kind] for kind in counts))


if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()
    sys.exit(main())
