"""Results for people: a table in the terminal, a plot in a file. And for programs: JSON.

`python -m benchmarks.report FILE ...` puts the records of files, written elsewhere, into those kept here, and redraws.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.harness import Record, Result

KEPT = "records.json"
APART = {"llm": "llm.json"}  # workloads whose records have a file of their own: long ones, which pages do not show


def table(results: Sequence[Result]) -> None:
    """Prints a line for each result; ratios below 1 are red."""
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
    Console(width=None if sys.stdout.isatty() else 180).print(out)


def write_json(results: Sequence[Result], path: Path) -> None:
    """The records as a list, one object each."""
    _write([dataclasses.asdict(item.record) for item in results], path)


def merge(results: Sequence[Result], path: Path, *, without: Collection[tuple[str, str, str]] = ()) -> None:
    """Puts records into a file that may hold others: each replaces the one of its workload, config and dtype, new ones
    come last; records whose key is in `without` are removed."""
    merge_rows([dataclasses.asdict(item.record) for item in results], path, without=without)


def merge_rows(new: Sequence[dict], path: Path, *, without: Collection[tuple[str, str, str]] = ()) -> None:
    """Does what `merge` does, with records as JSON has them."""
    old = json.loads(path.read_text()) if path.exists() else []
    rows = {_key(row): row for row in old} | {_key(row): row for row in new}
    _write([row for key, row in rows.items() if key not in without], path)


def _key(row: dict) -> tuple[str, str, str]:
    return row["workload"], row["config"], row["dtype"]


def _write(rows: Sequence[dict], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n  " + ",\n  ".join(map(json.dumps, rows)) + "\n]\n")


def plot_file(records: Path, path: Path) -> None:
    """Plots a file of records; without matplotlib it prints a line that says so."""
    if importlib.util.find_spec("matplotlib") is None:
        print(f"no plot: matplotlib is not installed; later: python -m benchmarks.report {records}", file=sys.stderr)
        return
    plot([Result(Record(**row)) for row in json.loads(records.read_text())], path)


def plot(results: Sequence[Result], path: Path) -> None:
    """Plots a bar of the ratio for every record that has a peer; the line at 1 is the peer."""
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
    """A time in three or four digits, whatever its size."""
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


def main(files: Sequence[str]) -> None:
    """Merges files of records into the folders of their devices."""
    for file in files:
        rows = json.loads(Path(file).read_text())
        for device in dict.fromkeys(row["device"] for row in rows):
            folder = Path(__file__).parent / "records" / device
            for name in dict.fromkeys(APART.get(row["workload"], KEPT) for row in rows):
                of = lambda row, name=name: APART.get(row["workload"], KEPT) == name
                merge_rows([row for row in rows if row["device"] == device and of(row)], folder / name)
            plot_file(folder / KEPT, folder / "ratios.png")
            print(f"{file}: merged into {folder}")


if __name__ == "__main__":
    main(sys.argv[1:])
