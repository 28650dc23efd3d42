"""
Records what several processes do with locks while they are stopped for longer than
their leases, or the server is restarted, and checks the history.

Exits with 1 if a promise of the locks was not kept, or too little happened to tell.
All servers are private and started for the run.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import django

from django_celery_safe.locks.stores import locate
from tests.histories.checker import Violation, check, count
from tests.histories.plan import Plan
from tests.histories.recorder import record
from tests.histories.stores import FORGETFUL, LEASES, WHOLE, use_store
from tests.servers import ServerPool
from tests.verdict import print_verdict


def main(arguments: Sequence[str] | None = None) -> int:
    """Record and check one history; return 1 if something is wrong with it."""
    options = parse(arguments)
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()
    plan = Plan(
        operations=options.operations,
        processes=options.processes,
        nemesis=options.nemesis,
        leases=LEASES[options.store],
        whole=options.store in WHOLE,
        seed=options.seed,
        at_most=options.at_most,
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="history-")))
        kept = folder / "records" if options.keep is None else options.keep
        kept.mkdir(parents=True)
        servers = stack.enter_context(ServerPool())
        server = stack.enter_context(use_store(options.store, servers, folder))
        plan = replace(plan, fences=locate().store().fences)
        history = record(plan, server, kept)
    began = time.monotonic()
    story, violations = check(history)
    result = {
        "store": options.store,
        "nemesis": plan.nemesis,
        "processes": plan.processes,
        "seed": plan.seed,
        **count(story),
        "seconds": round(history.seconds, 1),
        "checked in": round(time.monotonic() - began, 1),
        "violations": len(violations),
    }
    return print_verdict(result, violations, as_json=options.json, details=details, to_dict=as_dict)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.histories", description=__doc__)
    parser.add_argument(
        "--operations",
        type=int,
        default=200_000,
        help="requests that the store must have answered: acquire, extend, ensure and "
        "release; default: 200000",
    )
    parser.add_argument("--processes", type=int, default=8, help="default: 8")
    parser.add_argument(
        "--nemesis",
        choices=["pause", "restart"],
        default="pause",
        help="pause (default) stops processes; restart also restarts the server",
    )
    parser.add_argument("--store", choices=sorted(LEASES), default="django-redis")
    parser.add_argument("--seed", type=int, default=0, help="of what is done, not of its timing")
    parser.add_argument("--at-most", type=float, default=1800, help="seconds; default: 1800")
    parser.add_argument("--keep", type=Path, help="new folder in which the records stay")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if options.nemesis == "restart" and options.store not in FORGETFUL:
        parser.error(f"{options.store} does not lose its memory with a restart: use pause.")
    return options


def as_dict(violation: Violation) -> dict[str, Any]:
    """Return what JSON shows of a violation."""
    records = [record._asdict() for record in violation.records]
    return {"check": violation.check, "text": violation.text, "records": records}


def details(violation: Violation) -> Iterator[str]:
    """Yield the records that a violation is about, for readers."""
    for one in violation.records:
        yield f"{one.action} by process {one.process}: {one.outcome}, fence {one.fence}"
        yield f"  token {one.token}, lease {one.seconds:.6f} s"
        yield f"  sent {one.sent}, returned {one.returned}, left {one.left} ns"


if __name__ == "__main__":
    sys.exit(main())
