"""The tag of the admin's first page."""

from __future__ import annotations

from typing import Any

from django import template

register = template.Library()


@register.simple_tag(takes_context=True)
def celery_safe_overview(context: Any) -> Any:
    """
    Return what the first page shows of the models in its list; see ``admin.overview``.

    A template is rendered after the view's transaction has ended, so that locks which live in
    a database can be asked under ``ATOMIC_REQUESTS``, too.
    """
    # Django imports this module in projects without the admin, too.
    from ..admin.overview import make_overview

    return make_overview(context["app_list"])
