"""What type checkers make of the public names: ``uses`` is checked by mypy, and never run."""
