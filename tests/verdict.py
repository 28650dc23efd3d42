"""What the commands that record and check a run print of it."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from textwrap import fill
from typing import Any

#: Violations that are printed in full.
SHOWN = 10

#: Width of what is printed, columns.
WIDTH = 80


def nothing_more(violation: Any) -> Iterable[str]:
    """Return no more lines."""
    return ()


def as_dict(violation: Any) -> dict[str, Any]:
    """Return what JSON shows of a violation, a named tuple."""
    shown: dict[str, Any] = violation._asdict()
    return shown


def print_verdict(
    result: Mapping[str, Any],
    violations: Sequence[Any],
    *,
    as_json: bool,
    details: Callable[[Any], Iterable[str]] = nothing_more,
    to_dict: Callable[[Any], dict[str, Any]] = as_dict,
) -> int:
    """
    Print a run's figures and what was wrong with it; return the command's exit status.

    Args:
        violations: Each has a ``check``, which found it, and a ``text``.
        details: Returns more lines about one.
        to_dict: Returns what JSON shows of one.
    """
    shown = violations[:SHOWN]
    if as_json:
        print(json.dumps({**result, "shown": [to_dict(one) for one in shown]}, indent=2))
        return 1 if violations else 0
    for name, value in result.items():
        text = value if isinstance(value, str) else format(value, ",")
        print(f"{name}{text:>{WIDTH - len(name)}}")
    for one in shown:
        print(f"\n{one.check}")
        print(fill(one.text, WIDTH, initial_indent="  ", subsequent_indent="  "))
        for line in details(one):
            print(f"  {line}")
    if len(violations) > len(shown):
        print(f"\n... and {len(violations) - len(shown):,} more.")
    return 1 if violations else 0
