"""Results for people: a table in the terminal, a plot in a file. And for programs: JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.harness import Result


def table(results: Sequence[Result]) -> None:
    """Print one line a result; ratios below 1 are red."""
    out = Table(title="Median microseconds; ratio: the best peer over ours (in brackets: of the smallest times)")
    for name in ("workload", "config", "dtype"):
        out.add_column(name, no_wrap=True)
    for name in ("ours", "peers", "ratio", "of bound", "error"):
        out.add_column(name, justify="right")
    previous = None
    order = {r.workload: i for i, r in reversed([*enumerate(item.record for item in results)])}
    for item in sorted(results, key=lambda item: order[item.record.workload]):
        r = item.record
        if previous not in (None, r.workload):
            out.add_section()
        previous = r.workload
        peers = ", ".join(f"{name} {number(us)}" for name, us in r.peers.items())
        out.add_row(
            r.workload, r.config, r.dtype, number(r.ours_us), peers, _ratio(item), _share(r.bound_frac), _error(r)
        )
    Console().print(out)


def write_json(results: Sequence[Result], path: Path) -> None:
    """The records as a list, one object each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.dumps(dataclasses.asdict(item.record)) for item in results]
    path.write_text("[\n  " + ",\n  ".join(rows) + "\n]\n")


def plot(results: Sequence[Result], path: Path) -> None:
    """A bar of the ratio for every record that has a peer; the line at 1 is the peer."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [item.record for item in results if item.record.ratio is not None]
    labels = [f"{r.workload} {r.config} {r.dtype}" for r in rows]
    figure, axes = plt.subplots(figsize=(8, 0.6 + 0.26 * len(rows)), layout="constrained")
    colours = ["#2a7f62" if r.ratio and r.ratio >= 1 else "#b5483a" for r in rows]
    bars = axes.barh(labels, [r.ratio or 0 for r in rows], color=colours)
    axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.margins(x=0.1, y=0.01)
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel(f"best peer's time / jtile's time, {rows[0].device if rows else ''} (higher is better)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def number(us: float) -> str:
    """Three or four digits, whatever the size."""
    return f"{us:,.0f}" if us >= 100 else f"{us:.3g}"


def _ratio(item: Result) -> str:
    ratio = item.record.ratio
    if ratio is None:
        return "-"
    colour = "red" if ratio < 0.97 else "green"
    return f"[{colour}]{ratio:.2f}[/{colour}]" + (f" ({item.min_ratio:.2f})" if item.min_ratio is not None else "")


def _share(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.0f} %"


def _error(record) -> str:
    return "-" if record.error is None else f"{record.error:.1e}"
