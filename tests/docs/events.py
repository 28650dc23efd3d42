"""
The part of docs/reference/signals.md that is made of the declarations in ``events``.

``python -m tests.docs.events`` writes it.
"""

import logging
import re
from collections import defaultdict
from pathlib import Path
from typing import Final

from django_celery_safe import events
from django_celery_safe.emitting import Event
from tests.docs.pages import ROOT

PAGE: Final = ROOT / "docs/reference/signals.md"
#: The generated part of the page begins after this line.
MARK: Final = "<!-- From here on: python -m tests.docs.events -->\n"


def declared() -> dict[str, list[Event]]:
    """Return each event with all ways in which it happens, in the order of their declaration."""
    found = defaultdict(list)
    for value in vars(events).values():
        if isinstance(value, Event):
            found[value.name].append(value)
    return dict(found)


def comments() -> dict[str, str]:
    """Return what stands above the declaration of each event."""
    source = Path(events.__file__).read_text("utf-8")
    found = re.findall(r'((?:^#: ?.*\n|^#:\n)+)^\w+ = \w+\(\s*"(\w+)"', source, re.MULTILINE)
    return {name: _unwrapped(text) for text, name in found}


def _unwrapped(comment: str) -> str:
    """Return a comment's text with one sentence, or more, on each line."""
    lines = [line.removeprefix("#:").strip() for line in comment.splitlines()]
    text = ""
    for line in lines:
        if not line:
            text = text.rstrip() + "\n\n"
        else:
            # A line that ends a sentence before the margin was broken on purpose.
            text += line + ("\n" if line.endswith(".") else " ")
    return text.strip()


def shown(event: Event) -> str:
    """Return the text of an event's record with ``<field>`` for each field."""
    text = re.sub(r"%\((\w+)\)r", r"'<\1>'", event.text)
    return re.sub(r"%\((\w+)\)[.\d]*[a-z]", r"<\1>", text)


def made() -> str:
    """Return the generated part of the page."""
    about = comments()
    parts: dict[bool, list[str]] = {True: ["## Signals"], False: ["## Events that are only logged"]}
    for name, ways in declared().items():
        fields = ", ".join(f"`{field}`" for field in ways[0].fields)
        records = [f"- {logging.getLevelName(way.level)}: `{shown(way)}`" for way in ways]
        parts[ways[0].signal is not None].append(
            f"### `{name}`\n\n{about[name]}\n\nFields: {fields}\n\n" + "\n".join(records)
        )
    return "\n" + "\n\n".join(parts[True] + parts[False]) + "\n"


if __name__ == "__main__":
    written, _, _ = PAGE.read_text("utf-8").partition(MARK)
    PAGE.write_text(written + MARK + made(), "utf-8")
