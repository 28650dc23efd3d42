"""The key, the name and the link of a run, which are checked before anything is written."""

from __future__ import annotations

from typing import Any, Final

from ..exceptions import ConfigurationError

#: Most characters of a key and of a name, as the columns have them, and of a URL.
LONGEST_LABEL: Final = 255
LONGEST_URL: Final = 2000
#: Allowed starts of a URL. A click on another, such as ``javascript:``, could run code.
URL_STARTS: Final = ("/", "http://", "https://")


def make_labels(key: Any, name: Any, url: Any) -> dict[str, str]:
    """
    Return the texts by which people and programs identify a run, as its row takes them.

    Args:
        key: A text that has to fit uncut.
        name: A text, which may be lazy; a name that is too long is cut.
        url: A URL, or an object with ``get_absolute_url()``.

    Raises:
        ConfigurationError: A label can't be stored.
    """
    if name is None:
        raise _invalid("name is None", "Give a text, or leave it out.")
    return {"key": _check_key(key), "name": _cut(str(name)), "url": _find_url(url)}


def _check_key(key: Any) -> str:
    if not isinstance(key, str):
        raise _invalid(f"key is {key!r:.200}", 'Give a text, such as "album:7".')
    if len(key) > LONGEST_LABEL:
        raise _invalid(f"key has {len(key)} characters", f"Give {LONGEST_LABEL} at most.")
    if not key.isprintable():
        raise _invalid(f"key is {key!r}, with characters that can't be seen", "Leave those out.")
    return key


def _cut(name: str) -> str:
    shown = "".join(letter if letter.isprintable() else " " for letter in name)
    return shown if len(shown) <= LONGEST_LABEL else f"{shown[: LONGEST_LABEL - 1]}…"


def _find_url(url: Any) -> str:
    found = str(url.get_absolute_url() if hasattr(url, "get_absolute_url") else url)
    if found and not (found.startswith(URL_STARTS) and found.isprintable()):
        raise _invalid(
            f"url is {found!r:.200}, which is not an address",
            'Give a path such as "/albums/7/", or an object with get_absolute_url().',
        )
    if len(found) > LONGEST_URL:
        raise _invalid(f"url has {len(found)} characters", f"Give {LONGEST_URL} at most.")
    return found


def _invalid(reason: str, hint: str) -> ConfigurationError:
    return ConfigurationError(f"The run can't be started: its {reason}. {hint}")
