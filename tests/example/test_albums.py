"""Albums of the example site: four stages, their page, and its buttons; and its policy."""

import os
import re
from io import BytesIO
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import requests
from PIL import Image

from tests.example.site import POLICY, Site, Visitor, manage

pytestmark = pytest.mark.nightly

STAGES = ["Fetch", "Thumbnails and index", "Contact sheet", "Notify"]


def picture(share: float = 1.0) -> bytes:
    """Return the first part of a picture, whose beginning says that all is well."""
    out = BytesIO()
    Image.effect_noise((320, 240), 90).save(out, "JPEG")
    return out.getvalue()[: int(len(out.getvalue()) * share)]


def upload(visitor: Visitor, title: str, *files: tuple[str, bytes]) -> requests.Response:
    """Ask for an album."""
    fields = {"title": title, "email": "kim@example.com", "csrfmiddlewaretoken": visitor.token()}
    return visitor.send("/albums/", fields, files)


def test_album_goes_through_its_stages(visitor: Visitor) -> None:
    """The bars of an album never go back; late clicks say why they did nothing."""
    visitor.token()
    album = urlsplit(visitor.press("/albums/sample/").url).path
    told = visitor.wait_for_the_end(album)
    percents = [each["percent"] for each in told]
    assert percents == sorted(percents)
    assert (told[-1]["status"], percents[-1]) == ("succeeded", 100)
    bars = [(each["name"], each["done"], each["total"]) for each in told[-1]["stages"]]
    assert bars == [(name, steps, steps) for name, steps in zip(STAGES, (8, 9, 1, 1), strict=True)]
    page = visitor.get(album).text
    for path in ("resume/", "abort/"):
        assert visitor.send(album + path, {}).status_code == 403  # without a token
        assert visitor.get(album + path).status_code == 405
        assert 'class="message error"' in visitor.press(album + path).text
    assert visitor.get(album).text == page
    assert visitor.get("/albums/987654/").status_code == 404


def test_failed_step_is_named_and_the_run_resumed(site: Site, visitor: Visitor) -> None:
    """A broken picture stops the run, and is named; without it the run goes on to its end."""
    files = [("whole.jpg", picture()), ("cut-off.jpg", picture(0.5))]
    album = urlsplit(upload(visitor, "Broken", *files).url).path
    assert visitor.wait_for_the_end(album)[-1]["status"] == "failed"
    page = visitor.get(album).text
    assert "UnreadablePicture: cut-off.jpg: not a whole picture" in page
    (removal,) = re.findall(rf'action="({album}pictures/\d+/remove/)"', page)
    assert "cut-off.jpg was taken out" in visitor.press(removal).text
    visitor.press(f"{album}resume/")
    told = visitor.wait_for_the_end(album)[-1]
    assert (told["status"], told["percent"]) == ("succeeded", 100)
    assert "1 picture<" in visitor.get(album).text
    assert site.worker.log.count("Subject: Your album Broken") == 1


def test_every_answer_has_the_policy(visitor: Visitor) -> None:
    """Pages, the admin's, documents and refusals come with one strict policy."""
    for path, status in {
        "/": 200,
        "/activity/": 200,
        "/feeds/samples/harbour-notes.rss": 200,
        "/admin/": 200,
        "/feeds/import/": 405,
        "/nowhere/": 404,
    }.items():
        answer = visitor.get(path)
        assert (answer.status_code, answer.headers["Content-Security-Policy"]) == (status, POLICY)
    answer = visitor.send("/feeds/import/", {"url": "http://127.0.0.1/"})
    assert (answer.status_code, answer.headers["Content-Security-Policy"]) == (403, POLICY)


def test_refused_uploads(visitor: Visitor) -> None:
    """A file that is no picture makes no album, and the form names the file."""
    answer = upload(visitor, "Refused", ("note.jpg", b"no picture"))
    assert answer.status_code == 400
    assert "note.jpg: Upload a valid image." in answer.text


def test_models_have_their_migrations(tmp_path: Path) -> None:
    """The site's tables are those of its models."""
    env = {**os.environ, "EXAMPLE_DATA_DIR": str(tmp_path)}
    env.pop("DJANGO_SETTINGS_MODULE", None)
    manage(env, "makemigrations", "--check", "--dry-run", "albums", "accounts", "feeds")
