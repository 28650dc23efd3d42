"""Pictures in, pictures out: all that Pillow does here. Knows no models and no storage."""

from collections.abc import Sequence
from io import BytesIO
from math import ceil, sin
from typing import Final

from PIL import Image, ImageDraw, ImageFont, ImageOps, ImageStat

#: Width and height of a picture, of a thumbnail, and the space around one on a sheet, pixels.
SIZE: Final = (1200, 900)
SMALL: Final = (320, 240)
GAP: Final = 20
#: The title's height, and the pictures in a row, at most.
HEAD: Final = 90
COLUMNS: Final = 4

#: Colours of each landscape: sky above, sky below, sun, hills far and near; the sun's place, in
#: parts of the width and the height.
SCENERIES: Final = {
    "first-light": ("#2b3a67", "#f7b267", "#fff1c9", "#6d5a7e", "#2f2a44", 0.3, 0.6),
    "north-bay": ("#5fa8d3", "#dff2f7", "#ffffff", "#3f7d8c", "#1b4b5a", 0.75, 0.25),
    "heather": ("#9aa5d6", "#f3d9e5", "#fff6ea", "#8d5a97", "#54305f", 0.6, 0.4),
    "noon": ("#3c91e6", "#d5ecff", "#fffbe0", "#79b473", "#3f7a46", 0.5, 0.18),
    "dunes": ("#70b8d6", "#fbe7c6", "#fffdf3", "#e0ac69", "#b77b3c", 0.2, 0.3),
    "pine-ridge": ("#8fb9a8", "#f1f4e8", "#ffffff", "#4f7d63", "#1e3d2f", 0.7, 0.35),
    "red-hills": ("#7a1f2b", "#f2955d", "#ffe0a3", "#a2392c", "#4d1720", 0.45, 0.62),
    "moonrise": ("#0b132b", "#3a506b", "#e8ecf4", "#1c2541", "#070b1a", 0.65, 0.3),
}
#: Its file is cut off in the middle, as a broken transfer leaves it.
TORN: Final = "torn"


def paint(name: str) -> bytes:
    """Return the picture of a landscape; :data:`TORN` returns a broken one."""
    if name == TORN:
        whole = paint("noon")
        return whole[: len(whole) // 2]
    above, below, sun, far, near, x, y = SCENERIES[name]
    width, height = SIZE
    picture = ImageOps.colorize(Image.linear_gradient("L").resize(SIZE), above, below)
    # A gradient that is black in its middle: turned round and cut, it is the sun and its glow.
    glow = Image.radial_gradient("L").resize((400, 400)).point(lambda far: max(0, 255 - 3 * far))
    picture.paste(sun, (int(x * width) - 200, int(y * height) - 200), glow)
    for colour, level, rise in ((far, 0.66, 60), (near, 0.82, 80)):
        crest = [
            (at, level * height + rise * (sin(at * rise / 2e4) + 0.4 * sin(at * rise / 7e3)))
            for at in range(0, width + 8, 8)
        ]
        ImageDraw.Draw(picture).polygon([(0, height), *crest, (width, height)], fill=colour)
    return as_jpeg(picture)


def make_thumbnail(jpeg: bytes) -> tuple[bytes, float]:
    """
    Return a picture, small, and how bright it is.

    Raises:
        OSError: The file ends before its picture does.
    """
    with Image.open(BytesIO(jpeg)) as picture:
        small = ImageOps.fit(picture, SMALL)
        return as_jpeg(small), ImageStat.Stat(small.convert("L")).mean[0]


def make_sheet(title: str, thumbnails: Sequence[bytes]) -> bytes:
    """Return a contact sheet: the title, and below it the pictures in their order."""
    width, height = SMALL[0] + GAP, SMALL[1] + GAP
    columns = min(COLUMNS, len(thumbnails))
    rows = ceil(len(thumbnails) / COLUMNS)
    sheet = Image.new("RGB", (GAP + columns * width, HEAD + rows * height), "#fbfaf6")
    font = ImageFont.load_default(size=34)
    ImageDraw.Draw(sheet).text((GAP, HEAD / 2), title, "#1d2521", font, anchor="lm")
    for number, thumbnail in enumerate(thumbnails):
        row, column = divmod(number, COLUMNS)
        with Image.open(BytesIO(thumbnail)) as picture:
            sheet.paste(picture, (GAP + column * width, HEAD + row * height))
    return as_jpeg(sheet)


def as_jpeg(picture: Image.Image) -> bytes:
    """Return a picture as the bytes of a file."""
    out = BytesIO()
    picture.save(out, "JPEG", quality=88)
    return out.getvalue()
