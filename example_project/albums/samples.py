"""Sample pictures, painted when they are asked for, so that there is something to upload."""

from __future__ import annotations

from io import BytesIO
from math import sin
from typing import Final, NamedTuple

from PIL import Image, ImageDraw, ImageFilter

#: Width and height, pixels.
SIZE: Final = (1200, 900)


class Scenery(NamedTuple):
    """The colours of a landscape, from the top down, and where its sun stands."""

    zenith: str
    horizon: str
    sun: str
    far: str
    near: str
    #: In parts of the width and the height.
    sun_at: tuple[float, float]


SCENERIES: Final = {
    "first-light.jpg": Scenery("#2b3a67", "#f7b267", "#fff1c9", "#6d5a7e", "#2f2a44", (0.3, 0.6)),
    "north-bay.jpg": Scenery("#5fa8d3", "#dff2f7", "#ffffff", "#3f7d8c", "#1b4b5a", (0.75, 0.25)),
    "heather.jpg": Scenery("#9aa5d6", "#f3d9e5", "#fff6ea", "#8d5a97", "#54305f", (0.6, 0.4)),
    "noon.jpg": Scenery("#3c91e6", "#d5ecff", "#fffbe0", "#79b473", "#3f7a46", (0.5, 0.18)),
    "dunes.jpg": Scenery("#70b8d6", "#fbe7c6", "#fffdf3", "#e0ac69", "#b77b3c", (0.2, 0.3)),
    "pine-ridge.jpg": Scenery("#8fb9a8", "#f1f4e8", "#ffffff", "#4f7d63", "#1e3d2f", (0.7, 0.35)),
    "red-hills.jpg": Scenery("#7a1f2b", "#f2955d", "#ffe0a3", "#a2392c", "#4d1720", (0.45, 0.62)),
    "moonrise.jpg": Scenery("#0b132b", "#3a506b", "#e8ecf4", "#1c2541", "#070b1a", (0.65, 0.3)),
}


def paint(name: str) -> bytes:
    """
    Return a sample picture.

    Raises:
        KeyError: There is none of that name.
    """
    scenery = SCENERIES[name]
    picture = _sky(scenery)
    _draw_sun(picture, scenery)
    width, height = SIZE
    _draw_hills(picture, scenery.far, 0.66 * height, 0.07 * height, 2.6 / width)
    _draw_hills(picture, scenery.near, 0.82 * height, 0.09 * height, 4.1 / width)
    out = BytesIO()
    picture.save(out, "JPEG", quality=90)
    return out.getvalue()


def cut_off(name: str) -> bytes:
    """Return the first half of a sample picture, as a broken transfer leaves it."""
    whole = paint(name)
    return whole[: len(whole) // 2]


def _sky(scenery: Scenery) -> Image.Image:
    shade = Image.linear_gradient("L").resize(SIZE)
    return Image.composite(
        Image.new("RGB", SIZE, scenery.horizon), Image.new("RGB", SIZE, scenery.zenith), shade
    )


def _draw_sun(picture: Image.Image, scenery: Scenery) -> None:
    width, height = SIZE
    x, y = scenery.sun_at[0] * width, scenery.sun_at[1] * height
    for radius, blur, strength in ((150, 60, 150), (62, 2, 255)):
        glow = Image.new("L", SIZE, 0)
        box = (x - radius, y - radius, x + radius, y + radius)
        ImageDraw.Draw(glow).ellipse(box, fill=strength)
        picture.paste(scenery.sun, mask=glow.filter(ImageFilter.GaussianBlur(blur)))


def _draw_hills(
    picture: Image.Image, colour: str, level: float, rise: float, frequency: float
) -> None:
    width, height = SIZE
    crest = [
        (x, level + rise * (sin(frequency * x) + 0.4 * sin(2.7 * frequency * x + level)))
        for x in range(0, width + 8, 8)
    ]
    outline: list[tuple[float, float]] = [(0, height), *crest, (width, height)]
    ImageDraw.Draw(picture).polygon(outline, fill=colour)
