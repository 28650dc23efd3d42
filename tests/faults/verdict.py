"""The output of the runner about a run."""

import json
from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

from tests.faults.oracle import Violation

#: Violations that are printed in full.
SHOWN = 10

#: Width of what is printed, columns.
WIDTH = 80


def print_verdict(
    result: Mapping[str, Any], violations: Sequence[Violation], *, as_json: bool
) -> None:
    """Print a run's plan and figures, and which promises were broken in it."""
    shown = violations[:SHOWN]
    if as_json:
        texts = [violation._asdict() for violation in shown]
        print(json.dumps({**result, "violations": len(violations), "shown": texts}))
        return
    for name, value in {**result, "violations": len(violations)}.items():
        text = value if isinstance(value, str) else format(value, ",")
        print(f"{name}{text:>{WIDTH - len(name)}}")
    for violation in shown:
        print(f"\n{violation.check}")
        print(fill(violation.text, WIDTH, initial_indent="  ", subsequent_indent="  "))
        for line in violation.details:
            print(f"  {line}")
    if len(violations) > len(shown):
        print(f"\n... and {len(violations) - len(shown):,} more.")
