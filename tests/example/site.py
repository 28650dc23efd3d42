"""The example site on a port of this machine, and a visitor of it."""

import os
import re
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import requests

from tests.commands import run_python
from tests.processes import KeptProcess, wait_for
from tests.processes.waiting import reserve_port

EXAMPLE = Path(__file__).resolve().parents[2] / "example_project"
WORKER = (
    *(sys.executable, "-m", "celery", "-A", "example_project", "worker", "--loglevel=INFO"),
    *("--concurrency=2", "--without-gossip", "--without-mingle", "--hostname=albums@%h"),
)
#: Headers that every page sends to the browser.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
#: Variables of ours that would reach into the site.
FOREIGN = ("CELERY", "REDIS_URL", "EMAIL_", "DJANGO_SETTINGS_MODULE")
#: Longest start of a process, and longest run of an album, seconds.
PATIENCE = 60


@dataclass
class Site:
    """A running site."""

    url: str
    worker: KeptProcess
    folder: Path
    env: Mapping[str, str]

    def execute(self, code: str) -> str:
        """Execute Python code in a process with the site's Django; return what it printed."""
        env = {**self.env, "DJANGO_SETTINGS_MODULE": "example_project.settings"}
        program = f"import django\ndjango.setup()\n{dedent(code)}"
        return run_python("-c", program, env=env, cwd=EXAMPLE)

    def answers(self) -> bool:
        """Return whether pages are served."""
        with suppress(requests.ConnectionError):
            return requests.get(self.url).ok
        return False


@contextmanager
def running_site(folder: Path, **variables: str) -> Iterator[Site]:
    """
    Run the site and a worker for the block, in an empty folder.

    Args:
        variables: Of the site's environment, such as ``REDIS_URL``; without any it
            needs no server.
    """
    # kombu's folder broker takes messages through the folder for temporary files.
    (folder / "tmp").mkdir()
    ours = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    places = {"EXAMPLE_DATA_DIR": str(folder), "TMPDIR": str(folder / "tmp")}
    env = {**ours, **places, **variables}
    with ThreadPoolExecutor() as pool:
        databases = [("--database=default",), ("django_celery_safe", "--database=locks")]
        list(pool.map(lambda which: manage(env, "migrate", *which), databases))
    port, reservation = reserve_port()
    serve = [sys.executable, "manage.py", "runserver", "--noreload", f"127.0.0.1:{port}"]
    web = KeptProcess(serve, folder=EXAMPLE, log_path=folder / "site.log", env=env)
    worker = KeptProcess(WORKER, folder=EXAMPLE, log_path=folder / "worker.log", env=env)
    site = Site(f"http://127.0.0.1:{port}", worker, folder, env)
    with reservation, web, worker:
        wait_for(lambda: "ready." in worker.log, PATIENCE, "the worker was not ready")
        wait_for(site.answers, PATIENCE, "the site did not answer")
        yield site


def manage(env: Mapping[str, str], *arguments: str) -> str:
    """Run a command of a site's; return what it printed."""
    return run_python("manage.py", *arguments, env=env, cwd=EXAMPLE)


@dataclass
class Visitor:
    """Somebody with a browser that keeps cookies."""

    site: Site
    session: requests.Session

    def get(self, path: str) -> requests.Response:
        """Look at a page."""
        return self.session.get(self.site.url + path)

    def press(self, path: str, **fields: str) -> requests.Response:
        """Press a button, with the token of a page that has a form."""
        found = re.search(r'csrfmiddlewaretoken" value="(\w+)"', self.get("/albums/").text)
        assert found
        return self.send(path, {**fields, "csrfmiddlewaretoken": found[1]})

    def send(self, path: str, fields: Mapping[str, str]) -> requests.Response:
        """Send a form as it is given."""
        return self.session.post(self.site.url + path, data=fields)

    def wait_for_the_end(self, album: str) -> list[tuple[str, int]]:
        """Wait until an album's run has ended; return each status and percentage until then."""
        told: list[tuple[str, int]] = []

        def is_over() -> bool:
            page = self.get(album).text
            found = re.search(r'class="panel run (\w+)".*?"percent">(\d+) %', page, re.DOTALL)
            assert found
            told.append((found[1], int(found[2])))
            return 'http-equiv="refresh"' not in page

        wait_for(is_over, PATIENCE, "the album's run did not end")
        return told
