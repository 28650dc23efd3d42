"""
The pages of docs/reference that are made of docstrings, declarations and the commands' help.

``python -m tests.docs`` writes what stands on a page between its two marks.
"""

import inspect
import logging
import re
import textwrap
from argparse import Action, ArgumentParser
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from django.core.management import BaseCommand, load_command_class

import django_celery_safe
from django_celery_safe import conf, events, models, stages, tasks, testing
from django_celery_safe.contrib import prometheus
from django_celery_safe.emitting import Event

APP: Final = django_celery_safe.__name__
#: Longest line of a call.
WIDTH: Final = 88
#: The lines around the generated part of a page.
BEGIN: Final = "<!-- Made by python -m tests.docs -->\n"
UNTIL: Final = "<!-- End of what is made -->\n"
#: Each command, and what the rows of its ``--json`` are.
COMMANDS: Final = {
    "celery_locks": tuple(django_celery_safe.HeldLock("").as_json()),
    "celery_outbox": models.OutboxMessage.json_keys,
    "celery_stages": models.StageRun.json_keys,
}
#: The members of classes that users call or read, beside the attributes in their docstrings.
MEMBERS: Final = {
    "CacheLock": "acquire release extend ensure held remaining token fence contender not_acquired",
    "HeldLock": "kind place as_json",
    "SafeTaskMixin": "delay_on_commit apply_async_on_commit apply_async lock_name",
    "IdempotentMixin": "do_once",
    "Claim": "finish ensure",
    "Plan": "describe",
    "Progress": "percent",
    "StageProgress": "done",
    "StageRun": "wait resume abort is_aborted params steps error_step progress progress_by_stage",
    "StageStep": "arguments options params",
}
#: The methods of querysets that users call, by the model.
SELECTIONS: Final = {
    "OutboxMessage": "pending running failed dead revive discard",
    "IdempotencyRecord": "running done failed forget",
    "StageRun": "active stopped older erase",
}
#: Models of which a user may meet the rows, and nothing else.
INNER: Final = {"DatabaseLock", "Lock", "OutboxRelay"}
#: Errors that say by themselves what to write instead.
MISTAKES: Final = {"ConfigurationError", "TypeError"}
#: A sentence's end, as ``test_one_sentence_a_line`` knows it.
END: Final = re.compile(r"(?<=[^\d\s][.!?]) +(?=[A-Z])")


# Docstrings


def prose(text: str) -> str:
    """Return a docstring's paragraphs as Markdown: one sentence a line, without roles."""
    text = re.sub(r":\w+:`~?\.?([^`]+)`", r"`\1`", text.replace("``", "`"))
    parts = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text.strip())]
    return "\n\n".join(END.sub("\n", part) for part in parts)


def items(text: str) -> Iterator[tuple[str, str]]:
    """Yield the names and the texts of a section such as ``Args``."""
    for name, said in re.findall(r"^(\*{0,2}\w+): (.*(?:\n(?:[ ]+.*|$))*)", text, re.MULTILINE):
        yield name, re.sub(r"\n+", "\n  ", prose(said))


def explained(docstring: str) -> Iterator[str]:
    """Yield the paragraphs of a docstring, and its sections as lists."""
    first, *parts = re.split(r"^([A-Z]\w+)::?\n", docstring, flags=re.MULTILINE)
    yield prose(first)
    for title, body in zip(parts[::2], map(textwrap.dedent, parts[1::2]), strict=True):
        if title in {"Args", "Attributes"}:
            yield "\n".join(f"- `{name}`: {said}" for name, said in items(body))
        elif title == "Raises":
            listed = [f"- `{name}`: {said}" for name, said in items(body) if name not in MISTAKES]
            yield "\n".join(["Raises:", "", *listed]) if listed else ""
        elif title == "Returns":
            yield "Returns: " + prose(body)


def call(name: str, function: Any) -> str:
    """Return how something is called, without the types."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return name
    given = (
        each.replace(annotation=inspect.Parameter.empty)
        for each in signature.parameters.values()
        if each.name not in {"self", "cls"}
    )
    bare = signature.replace(parameters=[*given], return_annotation=inspect.Signature.empty)
    return f"{name}{bare}".replace("'", '"')


def wrapped(line: str) -> str:
    """Return a call with each argument on a line of its own, if it is long."""
    if len(line) <= WIDTH:
        return line
    name, _, arguments = line.rstrip(")").partition("(")
    return f"{name}(\n    " + arguments.replace(", ", ",\n    ") + ",\n)"


def member(owner: Any, name: str) -> str:
    """Return one line about a member of a class."""
    value = inspect.getattr_static(owner, name)
    callable_ = getattr(owner, name)
    shown = call(name, callable_) if callable(callable_) else name
    paragraphs = [*explained(inspect.getdoc(value) or inspect.getdoc(callable_) or "")]
    return f"**`{shown}`**: " + "\n\n".join(filter(None, paragraphs))


def is_error(value: Any) -> bool:
    """Return whether a public name is an error, which stands after all others."""
    return isinstance(value, type) and issubclass(value, Exception)


def described(name: str, value: Any) -> Iterator[str]:
    """Yield the parts of the section about a public name."""
    yield f"## {name}"
    if inspect.isfunction(value):
        yield f"```python\ndef {wrapped(call(name, value))}: ...\n```"
    if is_error(value) and value.__bases__ != (django_celery_safe.CelerySafeError,):
        yield "A kind of " + ", ".join(f"`{base.__name__}`" for base in value.__bases__) + "."
    about = inspect.getdoc(value) or ""
    if isinstance(value, ModuleType) or name in INNER:
        about = about.partition("\n")[0]  # users don't call it
    yield from filter(None, explained(about))
    for each in MEMBERS.get(name, "").split():
        yield member(value, each)
    if name in SELECTIONS:
        yield f"Of `{name}.objects`:"
        lines = []
        for each in SELECTIONS[name].split():
            method = getattr(value.objects.none(), each)
            said = next(explained(inspect.getdoc(method) or "")).replace("\n", " ")
            lines.append(f"- `{call(each, method)}`: {said}")
        yield "\n".join(lines)


def made_api() -> str:
    """Return the section of each public name: those of a module together, the errors last."""
    modules = (django_celery_safe, stages, models, testing)
    names = [(name, getattr(module, name)) for module in modules for name in module.__all__]
    names.append(("relay_outbox", tasks.relay_outbox.run))
    names.sort(key=lambda each: is_error(each[1]))
    return "\n\n".join(part for name, value in names for part in described(name, value))


# Commands


def usage(command: str, action: str, parser: ArgumentParser, own: list[Action]) -> str:
    """Return the line that a user types."""
    formatter = parser._get_formatter()
    formatter._width = 1000
    formatter.add_usage(None, own, parser._mutually_exclusive_groups, prefix="")
    rest = formatter.format_help().split(maxsplit=3)[3:]
    return f"manage.py {command} {action} {''.join(rest)}".strip()


def made_commands() -> str:
    """Return the section of each command: its actions with their options."""
    common = {each.dest for each in BaseCommand().create_parser("manage.py", "")._actions}
    parts = []
    for command, keys in COMMANDS.items():
        parser = load_command_class(APP, command).create_parser("manage.py", command)
        (chosen,) = (each for each in parser._actions if isinstance(each.choices, dict))
        helps = {each.dest: each.help for each in chosen._get_subactions()}
        parts += [f"## {command}", prose(parser.description or "")]
        for action, sub in (chosen.choices or {}).items():
            own = [each for each in sub._actions if each.dest not in common]
            parts.append(f"```text\n{usage(command, action, sub, own)}\n```")
            listed = (
                f"- `{(each.option_strings or [each.metavar])[0]}`: {each.help}"
                for each in own
                if each.help
            )
            parts.append("\n".join([f"{helps[action]}", "", *listed]).strip())
        parts.append("Keys of `list --json`: " + ", ".join(f"`{key}`" for key in keys) + ".")
    return "\n\n".join(parts)


# Settings, signals, metrics


def comments(module: ModuleType, declared: str) -> dict[str, str]:
    """Return what stands above each declaration whose line matches, by its name."""
    source = Path(module.__file__ or "").read_text("utf-8")
    found = re.findall(rf"((?:^ *#: ?.*\n|^ *#:\n)+) *{declared}", source, re.MULTILINE)
    return {name: prose(re.sub(r"^ *#: ?", "", text, flags=re.MULTILINE)) for text, name in found}


def made_settings() -> str:
    """Return the section of each setting."""
    about = comments(conf, r'"(\w+)": \(')
    return "\n\n".join(
        f"## {name}\n\nDefault: `{default!r}`\n\n{about[name]}"
        for name, default in conf.DEFAULTS.items()
    )


def declared() -> dict[str, list[Event]]:
    """Return each event with all ways in which it happens, in the order of their declaration."""
    found = defaultdict(list)
    for value in vars(events).values():
        if isinstance(value, Event):
            found[value.name].append(value)
    return dict(found)


def shown(event: Event) -> str:
    """Return the text of an event's record with ``<field>`` for each field."""
    text = re.sub(r"%\((\w+)\)r", r"'<\1>'", event.text)
    return re.sub(r"%\((\w+)\)[.\d]*[a-z]", r"<\1>", text)


def made_signals() -> str:
    """Return the section of each event: the signals first; and the table of the metrics."""
    about = comments(events, r'\w+ = \w+\(\s*"(\w+)"')
    signals, others = [], ["## Events that are only logged"]
    for name, ways in declared().items():
        records = "\n".join(f"- {logging.getLevelName(way.level)}: `{shown(way)}`" for way in ways)
        if ways[0].signal is None:
            others.append(f"### {name}\n\n{records}")
            continue
        fields = ", ".join(f"`{field}`" for field in ways[0].fields)
        signals.append(f"## {name}\n\n{about[name]}\n\nFields: {fields}\n\n{records}")
    return "\n\n".join([*signals, *others, "## Metrics", *metrics()])


def metrics() -> Iterable[str]:
    """Yield the paragraphs about the metrics for Prometheus."""
    rows = [
        f"| `{prometheus.PREFIX}{name}` | {', '.join(f'`{each}`' for each in labels)} | {text} |"
        for name, (text, labels) in prometheus.GAUGES.items()
    ]
    labels = ", ".join(f"`{each}`" for each in prometheus.LABELS)
    rows.append(f"| `{prometheus.PREFIX}{prometheus.COUNTER}_total` | {labels} | Signals sent. |")
    yield next(explained(inspect.getdoc(prometheus.TableCollector) or ""))
    yield "\n".join(["| metric | labels | meaning |", "|---|---|---|", *rows])
    yield "\n\n".join(explained(inspect.getdoc(prometheus.count_events) or ""))


PAGES: Final[dict[str, Callable[[], str]]] = {
    "api": made_api,
    "commands": made_commands,
    "settings": made_settings,
    "signals": made_signals,
}


def renewed(name: str, text: str) -> str:
    """Return the text of a page with its generated part as the code has it now."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{PAGES[name]()}\n\n{UNTIL}{rest.partition(UNTIL)[2]}"
