"""
Mutations of the package: small faults that the tests must catch.

Each says what it breaks for a user, and is applied to a function by name, not by line, so that
it can be carried over when the code around it is rebuilt. ``python -m tests.mutations`` applies
each of them to a copy of the project and runs the tests of its room.
"""

import ast
from pathlib import Path
from typing import NamedTuple

#: The tests that hold the promises of each room.
TESTS = {
    "ground": "tests/test_databases.py tests/test_pruning.py tests/test_exceptions.py "
    "tests/test_signals.py tests/test_texts.py tests/test_checks.py tests/sending/test_relay.py "
    "tests/locks/test_fork.py",
    "leases": "tests/locks tests/contract tests/idempotency",
    "locks": "tests/locks tests/contract",
    "delivery": "tests/delivery tests/concurrency tests/worker tests/sending/test_carried.py",
    "concurrency": "tests/concurrency tests/sending/test_unique.py tests/worker",
    "sending": "tests/sending tests/worker tests/tasks_backend",
    "idempotency": "tests/idempotency",
    "resuming": "tests/resuming",
    "stages": "tests/stages",
    "models": "tests/sending tests/stages tests/idempotency",
    "outer": "tests/test_checks.py tests/test_locks_command.py "
    "tests/test_outbox_command.py tests/test_stages_command.py tests/admin tests/testing",
}


class Mutation(NamedTuple):
    """
    One fault.

    Attributes:
        where: The module below the package and the qualified name of a function, a class or an
            assigned name, ``leases.claim:Claim.end_by``; or of a statement,
            ``queries.sql:end_message``.
        old: A text that the source of this place has exactly once.
        new: The text that replaces it.
        breaks: The fault that a user would see.
    """

    where: str
    old: str
    new: str
    breaks: str

    @property
    def path(self) -> Path:
        """The file, relative to the package."""
        module = self.where.partition(":")[0]
        is_sql = module.endswith(".sql")
        return Path(module) if is_sql else Path(*module.split(".")).with_suffix(".py")

    def apply(self, source: str) -> str:
        """
        Return the source of the file with the fault.

        Raises:
            LookupError: The place is gone, or does not have the old text exactly once.
        """
        name = self.where.partition(":")[2]
        lines = source.splitlines(keepends=True)
        if self.path.suffix == ".sql":
            first = lines.index(f"-- {name} --\n") + 1
            last = first + next(n for n, line in enumerate(lines[first:]) if not line.strip())
        else:
            first, last = _find_lines(ast.parse(source), name.split("."))
        place = "".join(lines[first - 1 : last])
        if place.count(self.old) != 1:
            raise LookupError(f"{self.where} has {place.count(self.old)} times: {self.old!r}")
        return "".join([*lines[: first - 1], place.replace(self.old, self.new), *lines[last:]])


def read(text: str) -> dict[str, list[Mutation]]:
    """
    Return the mutations of each room, which stands in brackets above them.

    A mutation is its place and its fault in one line, and then, as in a patch, the lines that are
    there once behind ``-``, and those that replace them behind ``+``.
    """
    rooms: dict[str, list[Mutation]] = {}
    for line in text.strip().splitlines():
        kind, rest = line[0], line[1:]
        if kind == "[":
            found = rooms[rest.rstrip("]")] = []
        elif kind in "-+":
            one = found.pop()
            name = {"-": "old", "+": "new"}[kind]
            before = getattr(one, name)
            found.append(one._replace(**{name: f"{before}\n{rest}" if before else rest}))
        else:
            where, _, breaks = line.partition(": ")
            found.append(Mutation(where, "", "", breaks))
    return rooms


def _find_lines(tree: ast.AST, names: list[str]) -> tuple[int, int]:
    """Return the first and last line of a nested definition."""
    for name in names:
        found = [node for node in ast.iter_child_nodes(tree) if name in _names_of(node)]
        if len(found) != 1:
            raise LookupError(f"there are {len(found)} definitions of {'.'.join(names)}")
        (tree,) = found
    return tree.lineno, tree.end_lineno or tree.lineno  # type: ignore[attr-defined]


def _names_of(node: ast.AST) -> list[str]:
    """Return the names that a statement defines."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.Assign():
            return [target.id for target in node.targets if isinstance(target, ast.Name)]
        case ast.AnnAssign(target=ast.Name()):
            return [node.target.id]
    return []
