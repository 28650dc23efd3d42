"""The admin's pages as a browser reads them: texts, tables, forms and messages."""

import re
from typing import Any, NamedTuple

from bs4 import BeautifulSoup, Tag
from django.contrib.admin.utils import quote
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.test import Client
from django.urls import reverse


def text_of(tag: Tag) -> str:
    """Return the text in an element, with single spaces."""
    return re.sub(r"\s+([,.:;])", r"\1", " ".join(tag.get_text(" ").split()))


class Page:
    """An answer of the admin."""

    def __init__(self, response: Any) -> None:
        self.response, self.status = response, response.status_code
        self.html: str = response.content.decode()
        self.soup = BeautifulSoup(self.html, "html.parser")
        self.content = " ".join(self.texts("#content"))
        self.messages = self.texts("ul.messagelist li")
        self.error = " ".join(self.texts("p.errornote"))
        #: The form values of the rows that can be selected, or that the page asks about.
        self.selections = self.values("[name=_selected_action]", "value")
        offered = "select[name=action] option, input[type=hidden][name=action]"
        #: The names of the decisions that it offers.
        self.decisions = list(filter(None, self.values(offered, "value")))

    def texts(self, selector: str) -> list[str]:
        """Return the texts of the elements that a CSS selector names."""
        return list(map(text_of, self.soup.select(selector)))

    def values(self, selector: str, attribute: str) -> list[str]:
        """Return an attribute of these elements."""
        return [str(each.get(attribute, "")) for each in self.soup.select(selector)]

    @property
    def rows(self) -> list[dict[str, str]]:
        """The rows of its list, by the heads of the columns."""
        heads = self.texts("#result_list thead .text")
        cells = [each.find_all(["td", "th"]) for each in self.soup.select("#result_list tbody tr")]
        return [dict(zip(heads, map(text_of, row), strict=True)) for row in cells]

    @property
    def fields(self) -> dict[str, str]:
        """The values on a page of one row, by their labels."""
        heads, texts = self.texts(".form-row label"), self.texts(".form-row .readonly")
        return {head.rstrip(":"): text for head, text in zip(heads, texts, strict=True)}

    def find_inline(self) -> list[str]:
        """Return what a strict Content-Security-Policy would forbid."""
        found = self.texts("style, script:not([src], [type='application/json'])")
        for each in self.soup.find_all(True):
            for name, value in each.attrs.items():
                scripted = str(value).strip().lower().startswith(("javascript:", "data:"))
                if name == "style" or name.startswith("on") or scripted:
                    found.append(f"<{each.name} {name}={value}>")
        return found


class Visitor(NamedTuple):
    """Somebody at a browser."""

    client: Client
    user: Any

    def get(self, url: str, **query: str) -> Page:
        """Open a page."""
        return Page(self.client.get(url, query or None))

    def open(self, row: Any) -> Page:
        """Open the page of a row."""
        return self.get(every_page(row, row.pk)["change"])

    def take(self, url: str, decision: str, *selected: Any, **more: Any) -> Page:
        """Take a decision about rows of a list; return the question, or the list with messages."""
        form = {"action": decision, "_selected_action": list(map(str, selected)), **more}
        page = Page(self.client.post(url, form))
        return self.get(page.response["Location"]) if page.status == 302 else page

    def confirm(self, url: str, decision: str, *selected: Any, **more: Any) -> Page:
        """Take a decision that was confirmed; return the page with the outcome."""
        return self.take(url, decision, *selected, confirmed="1", **more)


def make_visitor(*permissions: str, **attributes: Any) -> Visitor:
    """
    Log somebody in.

    Args:
        permissions: Codenames, such as ``release_lock``.
        attributes: Of the user; without any it is staff.
    """
    users: Any = get_user_model()
    given = {"is_staff": True, **attributes}
    user = users._default_manager.create(username=f"user-{users._default_manager.count()}", **given)
    found = Permission.objects.filter(codename__in=permissions)
    assert found.count() == len(permissions)
    user.user_permissions.set(found)
    client = Client()
    client.force_login(user)
    return Visitor(client, user)


def every_page(model: Any, pk: Any) -> dict[str, str]:
    """Return the URLs of all pages about a row, by name."""
    name = f"admin:django_celery_safe_{model._meta.model_name}"
    args = [quote(pk)]
    pages = {each: reverse(f"{name}_{each}", args=args) for each in ("change", "history")}
    return {"list": reverse(f"{name}_changelist"), **pages}
