"""The admin's pages as a browser reads them: texts, tables, forms and messages."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any, NamedTuple

from django.contrib.admin.utils import quote
from django.contrib.contenttypes.models import ContentType
from django.db import connections
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from django_celery_safe.models import IdempotencyRecord, OutboxMessage, StageRun, StageStep

#: Elements that have no end, of those that the admin has.
VOID = frozenset({"area", "base", "br", "col", "hr", "img", "input", "link", "meta"})
#: Attributes that hold a URL, which must not be a script.
URLS = frozenset({"href", "src", "action", "formaction"})


class Element:
    """An element of a page: its attributes, and what is in it."""

    def __init__(self, tag: str, attributes: dict[str, str]) -> None:
        self.tag, self.attributes = tag, attributes
        self.children: list[Element | str] = []

    @property
    def text(self) -> str:
        """Its text, with single spaces."""
        parts = [each if isinstance(each, str) else f" {each.text} " for each in self.children]
        return re.sub(r"\s+([,.:;])", r"\1", " ".join("".join(parts).split()))

    @property
    def classes(self) -> list[str]:
        """Its classes."""
        return self.attributes.get("class", "").split()

    def find(self, tag: str = "", **attributes: str) -> list[Element]:
        """Return all elements in it of this tag, with these attributes (``class_``: one of it)."""
        wanted = attributes.pop("class_", None)
        found = []
        for each in self.children:
            if isinstance(each, str):
                continue
            fits = not tag or each.tag == tag
            fits = fits and all(each.attributes.get(k) == v for k, v in attributes.items())
            if fits and (wanted is None or wanted in each.classes):
                found.append(each)
            inner = {**attributes, **({"class_": wanted} if wanted else {})}
            found += each.find(tag, **inner)
        return found


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("", {})
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        for index in range(len(self.open) - 1, 0, -1):
            if self.open[index].tag == tag:
                del self.open[index:]
                return

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


class Page:
    """An answer of the admin."""

    def __init__(self, response: Any) -> None:
        self.response = response
        self.status: int = response.status_code
        self.html: str = response.content.decode()
        parser = _Parser()
        parser.feed(self.html)
        self.root = parser.root

    @property
    def text(self) -> str:
        """Its text."""
        return self.root.text

    @property
    def content(self) -> str:
        """The text below its title."""
        return " ".join(each.text for each in self.root.find(id="content"))

    @property
    def messages(self) -> list[str]:
        """Its messages about the last decision."""
        lists = self.root.find("ul", class_="messagelist")
        return [item.text for each in lists for item in each.find("li")]

    @property
    def error(self) -> str:
        """Its error messages."""
        return " ".join(each.text for each in self.root.find("p", class_="errornote"))

    @property
    def links(self) -> list[str]:
        """Where its links lead."""
        return [each.attributes.get("href", "") for each in self.root.find("a")]

    @property
    def columns(self) -> list[str]:
        """The heads of its list."""
        lists = self.root.find("table", id="result_list")
        return [cell.text for each in lists for cell in each.find("thead")[0].find("th")]

    @property
    def rows(self) -> list[dict[str, str]]:
        """The rows of its list, by the heads of the columns."""
        lists = self.root.find("table", id="result_list")
        rows = [row for each in lists for row in each.find("tbody")[0].find("tr")]
        texts = [[cell.text for cell in cells_of(row)] for row in rows]
        return [dict(zip(self.columns, cells, strict=True)) for cells in texts]

    @property
    def selections(self) -> list[str]:
        """The form values of the rows that can be selected, or that the page asks about."""
        return [each.attributes["value"] for each in self.root.find(name="_selected_action")]

    @property
    def decisions(self) -> list[str]:
        """The names of the decisions that it offers."""
        options = [
            o for each in self.root.find("select", name="action") for o in each.find("option")
        ]
        hidden = self.root.find("input", type="hidden", name="action")
        return [each.attributes["value"] for each in options + hidden if each.attributes["value"]]

    @property
    def fields(self) -> dict[str, str]:
        """The values on a page of one row, by their labels."""
        shown = {}
        for row in self.root.find("div", class_="form-row"):
            for label in row.find("label"):
                values = row.find("div", class_="readonly")
                shown[label.text.rstrip(":")] = values[0].text if values else ""
        for table in self.root.find("table", class_="safe-details"):
            for line in table.find("tr"):
                head, value = cells_of(line)
                shown[head.text] = value.text
        return shown

    def find_inline(self) -> list[str]:
        """Return what a strict Content-Security-Policy would forbid."""
        found = []
        for each in self.root.find():
            what = each.attributes
            if each.tag == "style":
                found.append("<style>")
            if (
                each.tag == "script"
                and "src" not in what
                and what.get("type") != "application/json"
            ):
                found.append(f"<script> {each.text[:60]}")
            for name, value in what.items():
                scripted = value.strip().lower().startswith(("javascript:", "data:"))
                if name == "style" or name.startswith("on") or (name in URLS and scripted):
                    found.append(f"<{each.tag} {name}={value}>")
        return found


def cells_of(row: Element) -> list[Element]:
    """Return the cells of a row."""
    inner = (each for each in row.children if isinstance(each, Element))
    return [each for each in inner if each.tag in ("td", "th")]


class Visitor(NamedTuple):
    """Somebody at a browser."""

    client: Client
    user: Any

    def get(self, url: str, **query: str) -> Page:
        """Open a page."""
        return Page(self.client.get(url, query or None))

    def open(self, row: Any) -> Page:
        """Open the page of a row."""
        name = f"admin:django_celery_safe_{row._meta.model_name}_change"
        return self.get(reverse(name, args=[quote(row.pk)]))

    def post(self, url: str, **data: Any) -> Page:
        """Send a form; where that leads elsewhere, the page there is not opened."""
        return Page(self.client.post(url, data))

    def take(self, url: str, decision: str, *selected: Any, **more: Any) -> Page:
        """Take a decision about rows of a list, without a confirmation if none is in ``more``."""
        chosen = [str(each) for each in selected]
        return self.post(url, action=decision, _selected_action=chosen, **more)

    def confirm(self, url: str, decision: str, *selected: Any, **more: Any) -> Page:
        """Take a decision and confirm it; return the page that tells what came of it."""
        page = self.take(url, decision, *selected, confirmed="1", **more)
        return self.get(page.response["Location"]) if page.status == 302 else page


def count_queries(ask: Callable[[], Page]) -> int:
    """Return how many queries a page needs, the session's and the user's included."""
    for model in (
        IdempotencyRecord,
        OutboxMessage,
        StageRun,
        StageStep,
    ):  # Django asks for these once in each process
        ContentType.objects.get_for_model(model, for_concrete_model=False)
    with CaptureQueriesContext(connections["site"]) as queries:
        assert ask().status == 200
    return len(queries)
