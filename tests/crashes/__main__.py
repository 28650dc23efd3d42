"""
Runs transactions that send tasks through the outbox while the senders, two relays and the
broker are killed, and checks what became of the tasks.

Exits with 1 if a promise was not kept, or too little happened to tell; with --plain or
--fault that is what to expect. All servers are private and started for the run.
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

from tests.crashes.plan import TROUBLES, BrokerName, FaultName, Plan
from tests.servers import ServerPool
from tests.servers.databases import Databases
from tests.verdict import print_verdict


def main(arguments: Sequence[str] | None = None) -> int:
    """Record and check one run; return 1 if something is wrong with it."""
    options = parse(arguments)
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()
    # They have models.
    from tests.crashes.checker import check, count
    from tests.crashes.recorder import LastingRedis, record

    plan = Plan(
        broker=options.broker,
        transactions=options.transactions,
        seed=options.seed,
        plain=options.plain,
        fault=options.fault,
        rounds=options.rounds,
        random_kills=options.random_kills,
        troubles=TROUBLES * options.rounds,
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="crashes-")))
        kept = folder / "witness" if options.keep is None else options.keep
        kept.mkdir(parents=True)
        servers = stack.enter_context(ServerPool())
        broker = servers.get(LastingRedis) if plan.broker == "redis" else servers.rabbitmq
        alias = stack.enter_context(Databases(servers, folder).alias("postgres", folder))
        began = time.monotonic()
        history = record(plan, broker, servers.redis, alias, kept)
        seconds = time.monotonic() - began
    violations = check(history)
    result = {
        "broker": plan.broker,
        "sent by": "delay_on_commit" if plan.plain else "outbox",
        "fault": plan.fault or "none",
        "seed": plan.seed,
        **count(history),
        "seconds": round(seconds, 1),
        "violations": len(violations),
    }
    return print_verdict(result, violations, as_json=options.json)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.crashes", description=__doc__)
    parser.add_argument("--broker", choices=get_args(BrokerName), default="redis")
    parser.add_argument(
        "--transactions", type=int, default=300, help="how many at least; default: 300"
    )
    parser.add_argument("--rounds", type=int, default=3, help="kills at each point; default: 3")
    parser.add_argument("--random-kills", type=int, default=10, help="of each process; default: 10")
    parser.add_argument("--seed", type=int, default=0, help="of what is sent and killed")
    parser.add_argument("--plain", action="store_true", help="delay_on_commit, without an outbox")
    parser.add_argument("--fault", choices=get_args(FaultName), help="break this on purpose")
    parser.add_argument("--keep", type=Path, help="new folder in which the witnesses' files stay")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if options.plain and options.fault in ("last-id", "delete-first"):
        parser.error(f"{options.fault} is a fault of relays, and --plain has none.")
    return options


if __name__ == "__main__":
    sys.exit(main())
