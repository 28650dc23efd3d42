"""Errors of feeds. Each sentence names the URL and the reason."""

from __future__ import annotations


class FeedError(Exception):
    """A feed could not be imported."""

    def __init__(self, feed_url: str, reason: str) -> None:
        # Both go up as they are, so that the error survives pickling on its way out of a worker.
        super().__init__(feed_url, reason)
        self.feed_url = feed_url
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.feed_url or '(no URL)'}: {self.reason}"


class FeedRefused(FeedError):
    """The URL is not one that this site fetches; nothing was sent."""


class FeedUnreachable(FeedError):
    """The server gave no complete answer."""


class NotAFeed(FeedError):
    """The server answered with something that is neither RSS nor Atom."""
