"""
Runs stages while messages are delivered twice, children and workers are killed and the
broker is restarted, sweeps once, and checks what became of each stage and step.

Exits with 1 if a promise was not kept, or too little happened to tell; with a broken
--engine that is what to expect. All servers are private and started for the run.
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

from tests.runs.plan import BrokerName, EngineName, Plan
from tests.servers import ServerPool
from tests.servers.databases import DatabaseKind, Databases
from tests.verdict import print_verdict


def main(arguments: Sequence[str] | None = None) -> int:
    """Record and check; return 1 if something is wrong."""
    options = parse(arguments)
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()
    # They have models.
    from tests.runs.brokers import BROKERS, Broker, FolderBroker
    from tests.runs.checker import check, count
    from tests.runs.recorder import record

    plan = Plan(
        options.broker,
        runs=options.runs,
        stages=options.stages,
        steps=options.steps,
        seed=options.seed,
        engine=options.engine,
        restarts=0 if options.broker == "filesystem" else Plan.restarts,
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="runs-")))
        kept = folder / "witness" if options.keep is None else options.keep
        kept.mkdir(parents=True)
        servers = stack.enter_context(ServerPool())
        if plan.broker == "filesystem":
            broker: Broker = FolderBroker(folder / "broker")
        else:
            kind, server = BROKERS[plan.broker]
            broker = kind(servers.get(server))
        databases = Databases(servers, folder)
        alias = stack.enter_context(databases.alias(options.database, folder))
        began = time.monotonic()
        history = record(plan, broker, alias, kept)
        seconds = time.monotonic() - began
    violations = check(history)
    result = {
        "database": options.database,
        "broker": plan.broker,
        "engine": plan.engine,
        "seed": plan.seed,
        **count(history),
        "seconds": round(seconds, 1),
        "violations": len(violations),
    }
    return print_verdict(result, violations, as_json=options.json)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.runs", description=__doc__)
    parser.add_argument("--database", choices=get_args(DatabaseKind), default="postgres")
    parser.add_argument("--broker", choices=get_args(BrokerName), default="redis")
    parser.add_argument("--engine", choices=get_args(EngineName), default="right")
    parser.add_argument("--runs", type=int, default=Plan.runs, help="how many; default: 200")
    parser.add_argument("--stages", type=int, default=Plan.stages, help="of each; default: 5")
    parser.add_argument("--steps", type=int, default=Plan.steps, help="of a stage; default: 8")
    parser.add_argument("--seed", type=int, default=0, help="of durations and kills")
    parser.add_argument("--keep", type=Path, help="new folder in which the witnesses' files stay")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
