"""Every page of a test is watched: its console, its errors, and its policy."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import BrowserContext, ConsoleMessage, Response

from tests.example.site import POLICY

#: Tells us of what the policy kept from happening. Playwright's, so no policy holds for it.
REPORT = """
document.addEventListener("securitypolicyviolation", (event) =>
  reportViolation(`${event.effectiveDirective}: ${event.blockedURI} ${event.sample}`));
"""


class Troubles:
    """The errors on the pages of a test, and the ones that it expects."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._allowed: list[str] = []

    def allow(self, text: str) -> None:
        """Expect troubles with this text in them: a page that is to be forbidden, say."""
        self._allowed.append(text)

    @property
    def unexpected(self) -> list[str]:
        """The errors that the test did not expect."""
        return [each for each in self.seen if not any(text in each for text in self._allowed)]

    def watch(self, context: BrowserContext) -> None:
        """Note from now on what goes wrong on the pages of a context."""
        context.on("console", self._note_message)
        context.on("weberror", lambda error: self.seen.append(f"error: {error.error}"))
        context.on("response", self._check_policy)
        context.expose_binding("reportViolation", self._note_violation)
        context.add_init_script(REPORT)

    def _note_message(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            url = message.location.get("url", "")
            self.seen.append(f"console {message.type}: {message.text} ({url})")

    def _note_violation(self, source: dict[str, Any], violation: str) -> None:
        self.seen.append(f"policy: {violation} on {source['page'].url}")

    def _check_policy(self, response: Response) -> None:
        # Files that runserver serves from /static/ are no pages, and pass no middleware.
        if response.request.resource_type in ("document", "fetch"):
            policy = response.headers.get("content-security-policy")
            if policy != POLICY:
                self.seen.append(f"policy: {response.url} came with {policy!r}")
