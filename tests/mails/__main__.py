"""
Sends e-mails under do_once, each task several times, through a mail server that refuses,
hangs and drops connections, while the workers' processes are killed; checks who got how many.

Exits with 1 if a promise was not kept, or too little happened to tell; with --fault that is
what to expect. All servers are private and started for the run.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import get_args

import django

from django_celery_safe.idempotency.flags import Guarantee
from tests.mails.plan import FaultName, Plan
from tests.servers import ServerPool
from tests.servers.databases import Databases
from tests.verdict import print_verdict


def main(arguments: Sequence[str] | None = None) -> int:
    """Record and check one run; return 1 if something is wrong with it."""
    options = parse(arguments)
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()
    # They have models.
    from tests.mails.checker import check, count
    from tests.mails.recorder import record

    plan = Plan(
        options.guarantee,
        users=options.users,
        copies=options.copies,
        seed=options.seed,
        fault=options.fault,
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mails-")))
        kept = folder / "witness" if options.keep is None else options.keep
        kept.mkdir(parents=True)
        servers = stack.enter_context(ServerPool())
        alias = stack.enter_context(Databases(servers, folder).alias("postgres", folder))
        began = time.monotonic()
        history = record(plan, servers.redis, alias, kept)
        seconds = time.monotonic() - began
    violations = check(history)
    result = {
        "guarantee": plan.guarantee,
        "fault": plan.fault or "none",
        "seed": plan.seed,
        **count(history),
        "seconds": round(seconds, 1),
        "violations": len(violations),
    }
    return print_verdict(result, violations, as_json=options.json)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.mails", description=__doc__)
    parser.add_argument("--guarantee", choices=get_args(Guarantee), default="at_least_once")
    parser.add_argument("--users", type=int, default=200, help="one e-mail each; default: 200")
    parser.add_argument("--copies", type=int, default=2, help="of each task; default: 2")
    parser.add_argument("--seed", type=int, default=0, help="of the mail server and the kills")
    parser.add_argument("--fault", choices=get_args(FaultName), help="break this on purpose")
    parser.add_argument("--keep", type=Path, help="new folder in which the witnesses' files stay")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
