"""Writes the generated parts of docs/reference: ``python -m tests.docs``."""

import os

import django

from .pages import ROOT

if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()
    from .reference import PAGES, renewed  # models can be imported only now

    for name in PAGES:
        path = ROOT / f"docs/reference/{name}.md"
        path.write_text(renewed(name, path.read_text("utf-8")), "utf-8")
