"""A strict Content-Security-Policy on every response, of the admin's pages too."""

from collections.abc import Callable
from typing import Final

from django.http import HttpRequest, HttpResponse

#: Scripts, styles and pictures are files of this site, none of them stands in a page, and no
#: other site can show these pages in a frame. Django's error pages with DEBUG lose their style.
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)


def content_security_policy(
    get_response: Callable[[HttpRequest], HttpResponse],
) -> Callable[[HttpRequest], HttpResponse]:
    """Return the middleware; Django 6.0 has its own, with the setting ``SECURE_CSP``."""

    def middleware(request: HttpRequest) -> HttpResponse:
        response = get_response(request)
        response.headers["Content-Security-Policy"] = POLICY
        return response

    return middleware
