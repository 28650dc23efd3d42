"""Albums of the example site: four stages, their page, and its buttons; and the site's policy."""

import os
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.example.site import POLICY, Site, Visitor, manage

pytestmark = pytest.mark.nightly


def test_album_goes_through_its_stages(visitor: Visitor) -> None:
    """The bar of an album never goes back; late clicks say why they did nothing."""
    album = urlsplit(visitor.press("/albums/").url).path
    told = visitor.wait_for_the_end(album)
    assert told == sorted(told, key=lambda each: each[1])
    assert told[-1] == ("succeeded", 100)
    page = visitor.get(album).text
    for count in ("8 of 8", "1 of 1"):
        assert page.count(f">{count}<") == 2
    for path in ("resume/", "abort/"):
        assert visitor.send(album + path, {}).status_code == 403  # without a token
        assert visitor.get(album + path).status_code == 405
        assert 'class="message error"' in visitor.press(album + path).text
    assert visitor.get(album).text == page
    assert visitor.get("/albums/987654/").status_code == 404


def test_failed_step_is_named_and_the_run_resumed(site: Site, visitor: Visitor) -> None:
    """A torn picture stops the run, and is named; without it the run goes on to its end."""
    album = urlsplit(visitor.press("/albums/", torn="1").url).path
    assert visitor.wait_for_the_end(album)[-1][0] == "failed"
    page = visitor.get(album).text
    assert "UnreadablePicture: torn is not a whole picture" in page
    assert "9 pictures<" in page
    before = site.worker.log.count("Subject: Your album")
    visitor.press(f"{album}resume/")
    assert visitor.wait_for_the_end(album)[-1] == ("succeeded", 100)
    assert "8 pictures<" in visitor.get(album).text
    assert site.worker.log.count("Subject: Your album") == before + 1


def test_every_answer_has_the_policy(visitor: Visitor) -> None:
    """Pages, the admin's too, and refusals come with one strict policy."""
    for path, status in {
        "/": 200,
        "/feeds/": 200,
        "/accounts/sign-up/": 200,
        "/orders/": 200,
        "/digests/": 200,
        "/admin/": 200,
        "/albums/1/abort/": 405,
        "/nowhere/": 404,
    }.items():
        answer = visitor.get(path)
        assert (answer.status_code, answer.headers["Content-Security-Policy"]) == (status, POLICY)
    answer = visitor.send("/feeds/", {"url": "http://127.0.0.1/"})
    assert (answer.status_code, answer.headers["Content-Security-Policy"]) == (403, POLICY)


def test_models_have_their_migrations(tmp_path: Path) -> None:
    """The site's tables are those of its models."""
    env = {**os.environ, "EXAMPLE_DATA_DIR": str(tmp_path)}
    env.pop("DJANGO_SETTINGS_MODULE", None)
    manage(env, "makemigrations", "--check", "--dry-run", "albums", "accounts", "feeds", "orders")
