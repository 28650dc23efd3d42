"""The generated parts of the pages of figures."""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.benchmarks.report import Figure, shown
from tests.evidence.files import Evidence
from tests.faults.oracle import PARTS, percentile

#: Figures of a result that are no counts of what happened.
PLANNED = ("scenario", "found", "violations", "scarce", "measured", "error")


def evidence_part(faults: Sequence[Evidence]) -> str:
    """Return the tables of the runs in which things fail on purpose."""
    intact: dict[str, list[Any]] = defaultdict(list)
    broken: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for evidence in faults:
        for result in evidence.results:
            if result.get("--broken", "nothing") == "nothing":
                intact[command_of(result)].append(result)
            else:
                broken[result["scenario"], result["--broken"]].append(result)
    lines = ["## The runs", "", *table_of_files(faults), "", "## Promises", ""]
    results = [result for some in intact.values() for result in some]
    scarce = [
        f"- `{command}`, seed {result['--seed']}: {text}"
        for command, some in intact.items()
        for result in some
        for text in result.get("scarce", ())
    ]
    violations = sum(result.get("violations", 1) for result in results) - len(scarce)
    verdict = f"**{violations} broken promises**"
    lines += [f"{len(results)} runs without a deliberate fault: {verdict}.", ""]
    if scarce:
        lines += ["Too little happened for one of the checks in:", "", *scarce, ""]
    for command, results in intact.items():
        lines += [f"### `{command}`", "", *table_of_figures(results), ""]
        if any(result.get("measured") for result in results):
            lines += [*table_of_recoveries(results), ""]
    lines += ["## Deliberate faults", "", "| scenario | fault | found in |", "|---|---|---|"]
    for (scenario, fault), results in broken.items():
        found = sum(result.get("found", False) for result in results)
        undone = sum("error" in result for result in results)
        rest = f"; {undone} could not be done" if undone else ""
        lines.append(f"| {scenario} | `{fault}` | {found} of {len(results) - undone} runs{rest} |")
    return "\n".join(lines) + "\n"


def performance_part(benchmarks: Sequence[Evidence]) -> str:
    """Return the tables of the benchmarks: the median of each figure, least and most."""
    lines = ["## The runs", "", *table_of_files(benchmarks), ""]
    figures: dict[str, dict[str, list[Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for evidence in benchmarks:
        for result in evidence.results:
            figures[result["benchmark"]][result["name"]].append(result)
    for benchmark, named in figures.items():
        lines += [f"## {benchmark}", "", "| figure | median | least to most | limit | note |",
                  "|---|---:|---:|---:|---|"]  # fmt: skip
        for name, results in named.items():
            values = sorted(result["value"] for result in results)
            last = {key: value for key, value in results[-1].items() if key != "benchmark"}
            figure = Figure(**{**last, "value": statistics.median(values)})
            limit = "" if figure.limit is None else shown(figure.limit)
            cells = (
                name,
                shown(figure.value),
                f"{shown(values[0])} to {shown(values[-1])}" if values[1:] else "one run",
                limit if figure.ok else f"{limit}, missed",
                figure.note,
            )
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def table_of_files(files: Sequence[Evidence]) -> Iterator[str]:
    """Yield a table of when what was run where."""
    yield "| date | command | of | machine |"
    yield "|---|---|---|---|"
    for evidence in files:
        versions = ", ".join(f"{name} {number}" for name, number in evidence.versions.items())
        yield f"| {evidence.date} | `{evidence.command}` | {versions} | {evidence.machine} |"


def table_of_figures(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a table of what happened, with a column for each seed."""
    yield f"| | {' | '.join('seed ' + str(result['--seed']) for result in results)} |"
    yield f"|---|{'---:|' * len(results)}"
    names = dict.fromkeys(name for result in results for name in result if is_count(name))
    for name in (*names, "violations"):
        cells = (result.get(name, "not done") for result in results)
        texts = (cell if isinstance(cell, str) else shown(cell) for cell in cells)
        yield f"| {name} | {' | '.join(texts)} |"


def table_of_recoveries(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a table of how long it took, in all runs together, until killed tasks began again."""
    found: dict[str, list[float]] = defaultdict(list)
    for result in results:
        for who, values in result.get("measured", {}).items():
            found[who] += values
    yield f"| s from a kill to the next start | kills | {' | '.join(PARTS)} |"
    yield f"|---|{'---:|' * (1 + len(PARTS))}"
    for who, values in found.items():
        shares = (percentile(sorted(values), part) for part in PARTS.values())
        cells = (shown(share) if values else "" for share in shares)
        yield f"| {who} | {len(values):,} | {' | '.join(cells)} |"


def is_count(name: str) -> bool:
    """Return whether a result's entry says what happened, not what was planned or measured."""
    is_measured = name.rpartition(", ")[2] in PARTS
    return name not in PLANNED and not name.startswith("--") and not is_measured


def command_of(result: Mapping[str, Any]) -> str:
    """Return a scenario with the options that differ between its runs."""
    options = ("--broker", "--database", "--limit", "--nemesis", "--store")
    given = [f"{name} {result[name]}" for name in options if name in result]
    return " ".join((result["scenario"], *given))
