"""The pictures of the pages of figures, as SVG."""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from xml.sax.saxutils import escape

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from tests.benchmarks.growth import RELAYS, SIZES
from tests.benchmarks.stages import GROWTH, one_stage
from tests.evidence.files import Evidence

#: With these settings the same figures give the same file, and its text can be searched.
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "evidence", "font.family": "sans-serif"}

#: The colours of a dark screen, as in the drawn pictures; they win over those of the elements.
DARK = """<style>
  @media (prefers-color-scheme: dark) {
    text { fill: #e8eef1; }
    [style*="fill: #ffffff"] { fill: #1e2429 !important; }
    [style*="stroke: #000000"] { stroke: #b9c7ce !important; }
  }
 </style>"""

#: Lines are known by these, also without colours.
MARKERS = {"lock, Redis": "o", "lock, table": "s", "first run": "D"}
STYLES = {"redis": "-", "rabbitmq": "--", "filesystem": ":"}


def draw_all(faults: Sequence[Evidence], benchmarks: Sequence[Evidence], folder: Path) -> None:
    """Write each picture for which there are figures."""
    medians = find_medians(benchmarks)
    if medians:
        with picture(folder / "growth.svg", "others held or kept", "µs of one, median") as axes:
            for kind, marker in MARKERS.items():
                axes.loglog(SIZES, growth_of(medians, kind), marker=marker, label=kind)
        with picture(folder / "relays.svg", "relays on one outbox", "messages a second") as axes:
            rates = [medians[f"{number} relays: messages/s"] for number in RELAYS]
            axes.plot(RELAYS, rates, marker="o", label="relays")
            axes.set_xticks(RELAYS)
            axes.set_ylim(bottom=0)
        with picture(folder / "stage-time.svg", "steps of one stage", "s of a run") as axes:
            seconds = [medians[f"{one_stage(size)}, s"] for size in GROWTH]
            axes.loglog(GROWTH, seconds, marker="o", label="one stage, two processes")
    if recoveries := find_recoveries(faults):
        across = "s from a kill to the next beginning"
        with picture(folder / "recovery.svg", across, "share of the killed tasks") as axes:
            for label, values in recoveries.items():
                shares = [(place + 1) / len(values) for place in range(len(values))]
                name, style = f"{label}, {len(values):,} kills", STYLES[label]
                axes.step(values, shares, where="post", label=name, linestyle=style)


@contextmanager
def picture(path: Path, across: str, up: str) -> Iterator[Axes]:
    """Yield axes to draw on, and save them."""
    with mpl.rc_context(STYLE):
        drawing = Drawing(figsize=(6.4, 3.6), layout="constrained")
        axes = drawing.subplots()
        axes.set_xlabel(across)
        axes.set_ylabel(up)
        axes.grid(visible=True, alpha=0.3)
        yield axes
        axes.legend(frameon=False)
        drawing.savefig(path, metadata={"Date": None, "Title": f"{up}, over {across}"})
    _, labels = axes.get_legend_handles_labels()
    described = f"<desc>Lines: {escape('; '.join(labels))}.</desc>\n {DARK}\n <metadata>"
    path.write_text(path.read_text("utf-8").replace("<metadata>", described, 1), "utf-8")


def find_medians(benchmarks: Sequence[Evidence]) -> dict[str, float]:
    """Return the median of each figure over all files."""
    values: dict[str, list[float]] = defaultdict(list)
    for evidence in benchmarks:
        for figure in evidence.results:
            values[figure["name"]].append(figure["value"])
    return {name: statistics.median(some) for name, some in values.items()}


def growth_of(medians: dict[str, float], kind: str) -> list[float]:
    """Return the µs at each size: the first, and what stands as a ratio to it."""
    first, *others = [f"{size:,}" for size in SIZES]
    floor = medians[f"{kind}: {first}, µs"]
    return [floor, *(floor * medians[f"{kind}: {other} / {first}"] for other in others)]


def find_recoveries(faults: Sequence[Evidence]) -> dict[str, list[float]]:
    """Return the sorted seconds from the kills of carried tasks, by broker."""
    found: dict[str, list[float]] = defaultdict(list)
    for result in (one for evidence in faults for one in evidence.results):
        is_carried = result["scenario"] == "carried" and result["--broken"] == "nothing"
        if is_carried and "error" not in result:
            found[result["--broker"]] += result["measured"]["of all"]
    return {broker: sorted(values) for broker, values in sorted(found.items()) if values}
