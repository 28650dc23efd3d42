#!/usr/bin/env python
"""Django's command line for the example site."""

import os
import sys


def main() -> None:
    """Run the command that the arguments name; ``demo`` has settings and a folder of its own."""
    if sys.argv[1:2] == ["demo"]:
        os.environ["DJANGO_SETTINGS_MODULE"] = "demo.settings"
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")

    from django.core.management import execute_from_command_line

    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
