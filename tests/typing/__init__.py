"""Type checkers and the public names: mypy checks ``uses``, which is never run."""
