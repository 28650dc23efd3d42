"""Pictures in, pictures out: all that Pillow does here. Knows no models and no storage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from math import ceil
from typing import IO, Final

from PIL import Image, ImageDraw, ImageFont, ImageOps

from .errors import EmptyAlbum, UnreadablePicture

#: Longest edge of a picture as it is kept, pixels.
LONGEST_EDGE: Final = 2000
#: Width and height of a thumbnail, pixels.
THUMBNAIL: Final = (480, 360)
#: The contact sheet, in pixels: size of a picture, the space around it, and the title.
TILE: Final = (320, 240)
GAP: Final = 20
HEAD: Final = 90
#: Pictures in a row of it, at most.
COLUMNS: Final = 4
PAPER: Final = "#fbfaf6"
INK: Final = "#1d2521"
#: JPEG's own scale.
QUALITY: Final = 88


def straighten(name: str, file: IO[bytes]) -> bytes:
    """
    Return a picture as a JPEG: upright, not too large, and without the camera's notes.

    Raises:
        UnreadablePicture: The file is no picture, or ends before its picture does.
    """
    with _opened(name, file) as picture:
        upright = ImageOps.exif_transpose(picture).convert("RGB")
        upright.thumbnail((LONGEST_EDGE, LONGEST_EDGE))
        return _as_jpeg(upright)


def make_thumbnail(name: str, file: IO[bytes]) -> bytes:
    """Return the middle of a picture, small; raises as :func:`straighten`."""
    with _opened(name, file) as picture:
        return _as_jpeg(ImageOps.fit(picture, THUMBNAIL))


def find_colour(name: str, file: IO[bytes]) -> tuple[int, int, int]:
    """Return a picture's average colour; raises as :func:`straighten`."""
    with _opened(name, file) as picture:
        pixel = picture.convert("RGB").resize((1, 1), Image.Resampling.BOX).getpixel((0, 0))
    red, green, blue = pixel  # type: ignore[misc] # of an RGB picture they are three
    return red, green, blue


def make_sheet(title: str, files: Sequence[tuple[str, IO[bytes]]]) -> bytes:
    """
    Return a contact sheet: the title, and below it the pictures in their order.

    Raises:
        EmptyAlbum: There are none.
        UnreadablePicture: See :func:`straighten`.
    """
    if not files:
        raise EmptyAlbum(title, "no picture is left in it")
    columns = min(COLUMNS, len(files))
    width, height = TILE
    size = (
        GAP + columns * (width + GAP),
        HEAD + ceil(len(files) / columns) * (height + GAP),
    )
    sheet = Image.new("RGB", size, PAPER)
    font = ImageFont.load_default(size=34)
    ImageDraw.Draw(sheet).text((GAP, HEAD / 2), title, INK, font, anchor="lm")
    for number, (name, file) in enumerate(files):
        row, column = divmod(number, columns)
        place = (GAP + column * (width + GAP), HEAD + row * (height + GAP))
        with _opened(name, file) as picture:
            sheet.paste(ImageOps.fit(picture, TILE), place)
    return _as_jpeg(sheet)


@contextmanager
def _opened(name: str, file: IO[bytes]) -> Iterator[Image.Image]:
    try:
        with Image.open(file) as picture:
            picture.load()
            yield picture
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        # A file that can't be read is told apart from the disk's own trouble, which has a number.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise UnreadablePicture(name, f"not a whole picture ({error})") from error


def _as_jpeg(picture: Image.Image) -> bytes:
    out = BytesIO()
    picture.convert("RGB").save(out, "JPEG", quality=QUALITY)
    return out.getvalue()
