"""Albums of the example site: four stages, their page, and its buttons."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.example.site import Site, Visitor, manage

pytestmark = pytest.mark.nightly

STAGES = ["Fetch", "Thumbnails and index", "Contact sheet", "Notify"]


@contextmanager
def nothing_begins(site: Site) -> Iterator[None]:
    """Keep the worker from taking anything while the block runs."""
    site.worker.pause()
    try:
        yield
    finally:
        site.worker.resume()


def jpeg(colour: str, size: tuple[int, int] = (640, 480), **options: Any) -> bytes:
    """Return a picture of one colour."""
    out = BytesIO()
    Image.new("RGB", size, colour).save(out, "JPEG", **options)
    return out.getvalue()


def cut_off() -> bytes:
    """Return a picture whose beginning says all is well, and whose second half is missing."""
    out = BytesIO()
    Image.effect_noise((320, 240), 90).save(out, "JPEG")
    return out.getvalue()[: len(out.getvalue()) // 2]


def upload(visitor: Visitor, title: str, *files: tuple[str, bytes]) -> str:
    """Make an album; return the path of its page."""
    fields = {"title": title, "email": "kim@example.com", "csrfmiddlewaretoken": visitor.token()}
    answer = visitor.send("/albums/", fields, files)
    assert answer.status == 200, answer.text
    assert answer.path != "/albums/", answer.text
    return answer.path


def read(visitor: Visitor, page: str, what: str) -> Image.Image:
    """Return the first picture of a page to which a link of this form leads."""
    found = re.search(f'href="(/media/{what})"', page)
    assert found, page
    return Image.open(BytesIO(visitor.get(found[1]).body))


def bars(told: Any) -> list[tuple[str, int, int, str]]:
    """Return name, done, total and status of each stage."""
    return [
        (stage["name"], stage["done"], stage["total"], stage["status"]) for stage in told["stages"]
    ]


def test_album_goes_through_its_stages(site: Site, visitor: Visitor) -> None:
    """Uploads end up on one sheet, from dark to light; the bars never go back; one e-mail."""
    sideways = Image.Exif()
    sideways[0x0112] = 6  # orientation: turn it by 90 degrees
    album = upload(
        visitor,
        "Grey & greyer",
        ("light.jpg", jpeg("#dddddd")),
        ("dark.jpg", jpeg("#222222", exif=sideways)),
    )
    told = visitor.wait_for_the_end(album)
    percents = [each["percent"] for each in told]
    assert percents == sorted(percents)
    assert (told[-1]["status"], percents[-1]) == ("succeeded", 100)
    assert bars(told[-1]) == [
        (name, steps, steps, "succeeded") for name, steps in zip(STAGES, (2, 3, 1, 1), strict=True)
    ]
    page = visitor.get(album).text
    assert "<h1>Grey &amp; greyer</h1>" in page
    assert "/resume/" not in page
    assert "/abort/" not in page
    sheet = read(visitor, page, r"albums/\d+/contact-sheet.jpg")
    darks = [sheet.getpixel((x, 200))[0] for x in (100, 500)]  # type: ignore[index]
    assert darks == pytest.approx([0x22, 0xDD], abs=3)
    light, dark = re.findall(r'href="(/media/albums/\d+/\d+\.jpg)"', page)
    sizes = [Image.open(BytesIO(visitor.get(path).body)).size for path in (light, dark)]
    assert sizes == [(640, 480), (480, 640)]
    assert site.worker.log.count("Subject: Your album Grey & greyer") == 1


def test_failed_step_is_named_and_the_run_resumed(site: Site, visitor: Visitor) -> None:
    """A broken picture stops the run, and is named; without it the run goes on to its end."""
    album = upload(visitor, "Broken", ("whole.jpg", jpeg("#336699")), ("cut-off.jpg", cut_off()))
    assert visitor.wait_for_the_end(album)[-1]["status"] == "failed"
    page = visitor.get(album).text
    assert "UnreadablePicture: cut-off.jpg: not a whole picture" in page
    assert "albums.tasks.fetch" in page
    assert page.count("Take out") == 1
    (removal,) = re.findall(rf'action="({album}pictures/\d+/remove/)"', page)

    assert "cut-off.jpg was taken out" in visitor.press(removal).text
    visitor.press(f"{album}resume/")
    told = visitor.wait_for_the_end(album)[-1]
    assert (told["status"], told["percent"]) == ("succeeded", 100)
    page = visitor.get(album).text
    assert "1 picture<" in page
    assert read(visitor, page, r"albums/\d+/contact-sheet.jpg").format == "JPEG"
    assert site.worker.log.count("Subject: Your album Broken") == 1


def test_picture_that_stays_broken_fails_again(visitor: Visitor) -> None:
    """Resumed without a change, the run comes to the same end, and can be resumed again."""
    album = upload(visitor, "Still broken", ("cut-off.jpg", cut_off()))
    visitor.wait_for_the_end(album)
    visitor.press(f"{album}resume/")
    assert visitor.wait_for_the_end(album)[-1]["status"] == "failed"
    assert f'action="{album}resume/"' in visitor.get(album).text


def test_album_without_pictures_says_so(visitor: Visitor) -> None:
    """With its only picture taken out, there is nothing to put on the sheet."""
    album = upload(visitor, "Emptied", ("cut-off.jpg", cut_off()))
    visitor.wait_for_the_end(album)
    (removal,) = re.findall(rf'action="({album}pictures/\d+/remove/)"', visitor.get(album).text)
    visitor.press(removal)
    visitor.press(f"{album}resume/")
    told = visitor.wait_for_the_end(album)[-1]
    assert [stage["status"] for stage in told["stages"]][2:] == ["failed", "aborted"]
    assert "EmptyAlbum: Emptied: no picture is left in it" in visitor.get(album).text


def test_abort_and_resume(site: Site, visitor: Visitor) -> None:
    """A run aborted before it began can be resumed; the page has the button that applies."""
    with nothing_begins(site):
        album = upload(visitor, "Stopped", ("one.jpg", jpeg("#884422")))
        page = visitor.get(album).text
        # Live by the script; without it the page reloads itself.
        assert f'data-progress="{album}progress.json"' in page
        assert '<noscript><meta http-equiv="refresh"' in page
        assert 'src="/static/progress.js"' in page
        assert f'action="{album}abort/"' in page
        assert f'action="{album}resume/"' not in page

        page = visitor.press(f"{album}abort/").text
        assert visitor.get(f"{album}progress.json").json["status"] == "aborted"
        assert f'action="{album}resume/"' in page
        assert 'http-equiv="refresh"' not in page
        visitor.press(f"{album}resume/")
    assert visitor.wait_for_the_end(album)[-1]["status"] == "succeeded"
    assert site.worker.log.count("Subject: Your album Stopped") == 1


def test_late_clicks_change_nothing(visitor: Visitor) -> None:
    """Buttons of a page that is out of date say why they did nothing."""
    album = upload(visitor, "Over", ("one.jpg", jpeg("#446622")))
    visitor.wait_for_the_end(album)
    page = visitor.get(album).text
    (number,) = re.findall(r'href="/media/albums/\d+/(\d+)\.jpg"', page)
    for path in ("resume/", "abort/", f"pictures/{number}/remove/"):
        assert 'class="message error"' in visitor.press(album + path).text
    assert visitor.get(f"{album}progress.json").json["status"] == "succeeded"
    assert visitor.get(album).text == page


@pytest.mark.parametrize("button", ["resume/", "abort/", "pictures/1/remove/", "../sample/"])
def test_buttons_need_a_token_and_a_post(visitor: Visitor, button: str) -> None:
    """Another site's form can't press them, and no link can."""
    path = button.replace("../", "/albums/") if button.startswith("..") else f"/albums/1/{button}"
    visitor.token()
    assert visitor.send(path, {}).status == 403
    assert visitor.get(path).status == 405


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ([("note.jpg", b"no picture")], "note.jpg: Upload a valid image."),
        ([("page.html", jpeg("#123456"))], "page.html: File extension"),
        ([("huge.png", None)], "huge.png has more than 40,000,000 pixels."),
        ([(f"{number}.jpg", b"x") for number in range(25)], "At most 24 pictures."),
        ([], "This field is required."),
    ],
    ids=["not a picture", "another extension", "too many pixels", "too many", "none"],
)
def test_upload_is_refused(
    visitor: Visitor, files: list[tuple[str, bytes | None]], said: str
) -> None:
    """A file that is no picture makes no album, and the form names the file."""
    out = BytesIO()
    Image.new("1", (8000, 6000)).save(out, "PNG")
    given = [(name, out.getvalue() if content is None else content) for name, content in files]
    fields = {"title": "Refused", "email": "kim@example.com"}
    answer = visitor.send("/albums/", {**fields, "csrfmiddlewaretoken": visitor.token()}, given)
    assert answer.status == 400
    assert said in answer.text
    assert "<h3>Refused</h3>" not in answer.text


def test_sample_pictures(visitor: Visitor) -> None:
    """The button without an upload makes an album of eight painted pictures."""
    visitor.token()
    album = visitor.press("/albums/sample/").path
    assert bars(visitor.wait_for_the_end(album)[-1])[1] == (STAGES[1], 9, 9, "succeeded")
    assert visitor.get(album).text.count('loading="lazy"') == 8
    assert read(visitor, visitor.get(album).text, r"albums/\d+/contact-sheet.jpg").width == 1380


def test_unknown_album(visitor: Visitor) -> None:
    """There is no page of an album that nobody made."""
    for path in ("", "progress.json"):
        assert visitor.get(f"/albums/987654/{path}").status == 404


def test_models_have_their_migrations(tmp_path: Path) -> None:
    """The site's tables are those of its models."""
    env = {**os.environ, "EXAMPLE_DATA_DIR": str(tmp_path)}
    env.pop("DJANGO_SETTINGS_MODULE", None)
    manage(env, "makemigrations", "--check", "--dry-run", "albums", "accounts", "feeds")
