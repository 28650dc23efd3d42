"""
Getting a feed's bytes over HTTP, within limits of time and size.

It does not read the bytes: :mod:`feeds.parsing` does. A site on the open
internet would also refuse addresses of its own network here.
"""

from __future__ import annotations

from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from time import monotonic
from typing import IO, Any, Final
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from django.conf import settings
from django.utils.encoding import iri_to_uri

from .errors import FeedRefused, FeedUnreachable

#: Longest URL, characters: the length of the column.
MAX_URL_LENGTH: Final = 500
#: Bytes read at a time.
CHUNK: Final = 64 * 1024
HEADERS: Final = {
    "User-Agent": "django-celery-safe-example/1.0",
    "Accept": "application/rss+xml, application/atom+xml, application/xml;q=0.9, */*;q=0.1",
}


@dataclass(frozen=True)
class Document:
    """The answer of a server."""

    url: str
    content_type: str
    body: bytes


def fetch(url: str) -> Document:
    """
    Fetch ``url``; redirects are followed.

    Raises:
        FeedRefused: No http or https URL, here or after a redirect.
        FeedUnreachable: No answer, an error status, one cut short, one larger
            than ``FEEDS_MAX_BYTES`` or slower than ``FEEDS_TIMEOUT``.
    """
    check_url(url)
    request = Request(iri_to_uri(url), headers=HEADERS)  # noqa: S310 - the scheme was checked
    opener = build_opener(_CheckedRedirects)
    try:
        with opener.open(request, timeout=settings.FEEDS_TIMEOUT) as response:
            body = _read(url, response)
            return Document(url, response.headers.get("Content-Type", ""), body)
    except HTTPError as error:
        with error:
            raise FeedUnreachable(url, f"the server answered {error.code} {error.reason}") from None
    except URLError as error:
        raise FeedUnreachable(url, f"no answer ({error.reason})") from error
    except (OSError, HTTPException, UnicodeError) as error:
        raise FeedUnreachable(url, f"no answer ({error or type(error).__name__})") from error


def check_url(url: str) -> None:
    """
    Let only http and https URLs pass.

    Raises:
        FeedRefused: It is another kind of URL, or none.
    """
    try:
        parts = urlsplit(url)
        is_ours = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        is_ours = False
    if not is_ours:
        raise FeedRefused(url, "only http:// and https:// URLs are fetched")
    if len(url) > MAX_URL_LENGTH:
        raise FeedRefused(url, f"longer than {MAX_URL_LENGTH} characters")


def _read(url: str, response: HTTPResponse) -> bytes:
    deadline = monotonic() + settings.FEEDS_TIMEOUT
    announced = response.length
    body = bytearray()
    while chunk := response.read1(CHUNK):
        body += chunk
        if len(body) > settings.FEEDS_MAX_BYTES:
            raise FeedUnreachable(url, f"larger than {settings.FEEDS_MAX_BYTES:,} bytes")
        if monotonic() > deadline:
            raise FeedUnreachable(url, f"not complete after {settings.FEEDS_TIMEOUT:g} s")
    if announced is not None and len(body) < announced:
        raise FeedUnreachable(url, f"cut off after {len(body):,} of {announced:,} bytes")
    return bytes(body)


class _CheckedRedirects(HTTPRedirectHandler):
    """Follows redirects, to http and https only."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> Request | None:
        check_url(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)
