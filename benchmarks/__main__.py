"""`python -m benchmarks cpu [--json FILE] [--only NAME ...] [--plot FILE]`: run the workloads and show the results."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

WORKLOADS = (
    "elementwise", "softmax", "norms", "matmul", "attention", "backward", "memory", "quantized", "llm", "overhead",
)  # fmt: skip

# glibc gives large blocks back to the system after every call and page-faults them in again on the next, at random:
# that noise is larger than what is measured here. The settings are read when a process starts.
_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 36),
    "MALLOC_TOP_PAD_": str(1 << 28),
}


def main() -> None:
    options = _arguments()
    if any(name not in os.environ for name in _MALLOC):
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks", *sys.argv[1:]], {**os.environ, **_MALLOC})
    os.environ.setdefault("JAX_PLATFORMS", options.device)
    from benchmarks import harness, report, roofline

    machine = roofline.measure()
    load = os.getloadavg()[0]
    if load > 0.5:
        # Threads that wait by spinning, as llama.cpp's do, then lose far more than ours: ratios mean nothing.
        print(f"warning: the machine is busy (load {load:.1f}); do not keep these numbers", file=sys.stderr)
    modules = {name: importlib.import_module(f"benchmarks.{name}") for name in options.only or WORKLOADS}
    results = []
    for item in harness.run(modules, machine, repeats=options.repeats):
        results.append(item)
        r = item.record
        print(f"{r.workload} {r.config} {r.dtype}: {report.number(r.ours_us)} us, ratio {r.ratio}", file=sys.stderr)
    folder = Path(__file__).parent / "records" / machine.device
    report.table(results)
    json_file = options.json or (None if options.only else folder / "records.json")
    plot_file = options.plot or (None if options.only else folder / "ratios.png")
    if json_file:
        report.write_json(results, json_file)
    if plot_file:
        report.plot(results, plot_file)
    print(", ".join(f"wrote {file}" for file in (json_file, plot_file) if file), file=sys.stderr)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("device", choices=["cpu"], help="where to run")
    parser.add_argument("--only", action="append", choices=WORKLOADS, metavar="NAME", help=", ".join(WORKLOADS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the records go (default: benchmarks/records)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="where the plot goes (default: benchmarks/records)")
    parser.add_argument("--repeats", type=int, default=30, help="samples of each function (default 30)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
