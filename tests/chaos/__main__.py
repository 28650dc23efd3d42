"""
Sends single-instance tasks, each from two processes at once, to workers whose processes
are killed all the time, and checks what became of them.

Exits with 1 if a promise was not kept, or too little happened to tell. The Redis is
private and started for the run.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import django

from tests.chaos.checker import check, count
from tests.chaos.plan import Plan
from tests.chaos.recorder import record
from tests.servers import ServerPool
from tests.verdict import print_verdict


def main(arguments: Sequence[str] | None = None) -> int:
    """Record and check one run; return 1 if something is wrong with it."""
    options = parse(arguments)
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()
    plan = Plan(
        tasks=options.tasks,
        keys=options.keys,
        seed=options.seed,
        pause=options.pause,
        worker_kills=options.worker_kills,
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        kept = folder / "witness" if options.keep is None else options.keep
        kept.mkdir(parents=True)
        servers = stack.enter_context(ServerPool())
        began = time.monotonic()
        history = record(plan, servers.redis, kept)
        seconds = time.monotonic() - began
    story, violations = check(history)
    result = {
        "tasks": plan.tasks,
        "keys": plan.keys,
        "seed": plan.seed,
        **count(story),
        "seconds": round(seconds, 1),
        "violations": len(violations),
    }
    return print_verdict(result, violations, as_json=options.json)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument(
        "--tasks", type=int, default=2000, help="each is sent twice at once; default: 2000"
    )
    parser.add_argument("--keys", type=int, default=20, help="default: 20")
    parser.add_argument("--pause", type=float, default=0.05, help="between sends, s; default: 0.05")
    parser.add_argument("--worker-kills", type=int, default=2, help="of whole workers; default: 2")
    parser.add_argument("--seed", type=int, default=0, help="of what is sent and killed")
    parser.add_argument("--keep", type=Path, help="new folder in which the witnesses' files stay")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
