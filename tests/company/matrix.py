"""Plays all flows beside one neighbour: a worker, a relay, the neighbour's own, and the sender."""

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from django.db import connections

from tests.company.neighbours import NEIGHBOURS, Neighbour
from tests.processes import CeleryWorker, KeptProcess
from tests.processes.waiting import reserve_port
from tests.processes.worker import ROOT
from tests.servers.databases import Databases

PROJECT = "tests.company.project"
PLAY = "import django; django.setup(); from tests.company.play import main; main()"
#: Seconds for everything that the sender does.
LONGEST = 240
#: The settings of its database that the project gets.
DATABASE = ("ENGINE", "NAME", "USER", "HOST", "PORT", "DISABLE_SERVER_SIDE_CURSORS")
#: A session that idles between two ticks ends.
IDLE = "-c idle_session_timeout=1000"


class NotInstalled(Exception):
    """A package of the neighbour is missing."""


def versions(name: str) -> str:
    """Return the versions of a neighbour's packages; raise NotInstalled without them."""
    here = NEIGHBOURS[name]
    if here.target:
        return here.target.partition("==")[2]
    try:
        return ", ".join(version(package) for package in here.packages)
    except PackageNotFoundError as error:
        raise NotInstalled(str(error)) from None


def play(name: str, databases: Databases, folder: Path) -> dict[str, str | None]:
    """Play all flows beside a neighbour; return what went wrong in each, None: nothing did."""
    here = NEIGHBOURS[name]
    versions(name)
    redis = databases.servers.redis
    redis.flush()
    with ExitStack() as stack:
        alias = stack.enter_context(databases.alias(here.kind, folder))
        database = connections.settings[alias]
        port, reservation = reserve_port()
        stack.enter_context(reservation)
        scene = {
            "neighbour": name,
            "database": {key: database[key] for key in DATABASE if key in database},
            "redis": redis.url.rpartition("/")[0],
            "folder": str(folder),
            "port": port,
        }
        env = {
            **here.env,
            "DJANGO_SETTINGS_MODULE": "tests.company.settings",
            "SAFE_COMPANY": json.dumps(scene),
        }
        if here.target:
            env["PYTHONPATH"] = str(install(here.target, folder))

        def start(what: str, *command: str, **more: str) -> KeptProcess:
            """Start a program of the project, with what the neighbour puts before it."""
            return stack.enter_context(
                KeptProcess(
                    [*launcher(here), sys.executable, *command],
                    folder=ROOT,
                    log_path=folder / f"{what}.log",
                    env={**os.environ, **env, **more},
                )
            )

        if here.apps:
            migration = start("migrate", "-m", "django", *here.migrate)
            assert migration.wait(LONGEST) == 0, migration.log
        worker = CeleryWorker(PROJECT, concurrency=3, pool=here.pool, env=env)
        worker.command = [*launcher(here), *worker.command]
        stack.enter_context(worker)
        start("relay", "-m", "django", "celery_outbox", "relay")
        for command in here.beside:
            words = [word.format(**scene) for word in command]
            start(words[0], "-m", "celery", "-A", PROJECT, *words, PGOPTIONS=IDLE)
        sender = start("sender", "-c", PLAY)
        deadline = time.monotonic() + LONGEST
        while sender.running:
            assert time.monotonic() < deadline, f"the sender does not end:\n{sender.log}"
            if not worker.running:  # as a supervisor does
                worker.close()
                worker.start()
            time.sleep(0.1)
        assert (folder / "verdicts").exists(), f"the sender failed:\n{sender.log}"
        verdicts: dict[str, str | None] = json.loads((folder / "verdicts").read_text())
        if any(verdicts.values()):
            print(f"--- sender ---\n{sender.log}\n--- worker ---\n{worker.log}")
        return verdicts


def launcher(here: Neighbour) -> list[str]:
    """Return what stands before the command of each process."""
    programs = Path(sys.executable).parent
    return [str(programs / word) if not index else word for index, word in enumerate(here.launcher)]


def install(requirement: str, folder: Path) -> Path:
    """Install another version of a package into a folder, and return it."""
    target = folder / "packages"
    pip = [sys.executable, "-m", "pip", "install", "-q"]
    subprocess.run([*pip, "--target", str(target), requirement], check=True)
    return target
