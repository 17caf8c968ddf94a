"""`python -m benchmarks cpu|gpu [--json FILE] [--only NAME ...] [--plot FILE]`: run the workloads, show the results;
`python -m benchmarks serve [--gpu]`: an engine and servers under load; `python -m benchmarks devices`: collectives;
`python -m benchmarks compile`: how long array programs take to compile;
`python -m benchmarks graph`: a decoding step as separate kernels and as an execution graph."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path

from benchmarks.gpu import ONLY as GPU_ONLY
from benchmarks.gpu import WORKLOADS as GPU_WORKLOADS

WORKLOADS = (
    "elementwise", "softmax", "norms", "matmul", "attention", "backward", "memory", "quantized", "llm", "overhead",
    "recurrences", "zoo", "fuse", "numpy",
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
    if options.device == "gpu":
        _on_gpu(options)
    elif options.device == "serve":
        _serve(options)
    elif options.device == "devices":
        _devices(options)
    elif options.device == "compile":
        _compile(options)
    elif options.device == "graph":
        _graph(options)
    else:
        _on_cpu(options)


def _on_gpu(options: argparse.Namespace) -> None:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch's peers need memory too
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no children beside the threads of JAX
    from benchmarks.gpu import suite

    suite.main(options)


def _serve(options: argparse.Namespace) -> None:
    if not options.gpu:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from benchmarks.serve import suite

    suite.main(options)


def _devices(options: argparse.Namespace) -> None:
    if options.host:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["XLA_FLAGS"] = (
            f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={options.devices or 2}"
        )
    from benchmarks import devices

    devices.main(options)


def _compile(options: argparse.Namespace) -> None:
    if not options.gpu:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes may share a GPU
    from benchmarks import compile as times

    times.main(options)


def _graph(options: argparse.Namespace) -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from benchmarks import graph

    graph.main(options)


def _on_cpu(options: argparse.Namespace) -> None:
    if any(name not in os.environ for name in _MALLOC):
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks", *sys.argv[1:]], {**os.environ, **_MALLOC})
    os.environ.setdefault("JAX_PLATFORMS", options.device)
    from benchmarks import harness, report
    from jtile.tune import host

    machine = host.measure()
    load = os.getloadavg()[0]
    if load > 0.5:
        # Threads that wait by spinning, as llama.cpp's do, then lose far more than ours: ratios mean nothing.
        print(f"warning: the machine is busy (load {load:.1f}); do not keep these numbers", file=sys.stderr)
    modules = {name: importlib.import_module(f"benchmarks.{name}") for name in options.only or WORKLOADS}
    results = []
    for item in harness.run(modules, machine, repeats=options.repeats):
        results.append(item)
        r = item.record
        how = f"; {r.timed}" if r.timed else ""
        print(
            f"{r.workload} {r.config} {r.dtype}: {report.number(r.ours_us)} us, ratio {r.ratio}{how}", file=sys.stderr
        )
    folder = Path(__file__).parent / "records" / machine.device
    report.table(results)
    json_file = options.json or (None if options.only else folder / "records.json")
    plot_file = options.plot or (None if options.only else folder / "ratios.png")
    if json_file:
        report.write_json(results, json_file)
    if plot_file:
        report.plot(results, plot_file)
    print(", ".join(f"wrote {file}" for file in (json_file, plot_file) if file), file=sys.stderr)


def _arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    devices = parser.add_subparsers(dest="device", required=True)
    for device, names, repeats in (("cpu", WORKLOADS, 30), ("gpu", (*GPU_WORKLOADS, *GPU_ONLY), 15)):
        sub = devices.add_parser(device)
        sub.add_argument(
            "--only", nargs="+", action="extend", choices=names, metavar="NAME", help=f"some of: {', '.join(names)}"
        )
        sub.add_argument(
            "--json", type=_records, metavar="FILE", help="where the records go (default: benchmarks/records)"
        )
        sub.add_argument(
            "--plot", type=_picture, metavar="FILE", help="where the plot goes (default: benchmarks/records)"
        )
        sub.add_argument(
            "--repeats", type=_count, default=repeats, help=f"samples of each function (default {repeats})"
        )
    sub.add_argument(
        "--without", nargs="+", action="extend", default=[], metavar="PEER", help="leave out peers that start so"
    )
    sub.add_argument(
        "--limit", type=_seconds, default=530, metavar="SECONDS", help="start no case after this (default 530)"
    )
    sub.add_argument(
        "--budget", type=_seconds, default=3, metavar="SECONDS", help="of samples a case, but three rounds (default 3)"
    )
    sub.add_argument(
        "--match", nargs="+", action="extend", default=[], metavar="TEXT",
        help="only lines whose size and dtype have one of these in them",
    )  # fmt: skip
    sub.add_argument("--profile", action="store_true", help="of language models, what each of their kernels takes")
    sub.add_argument("--tiny", action="store_true", help="tiny sizes and no torch: tries the code, on the CPU too")
    _add_serve(devices.add_parser("serve"))
    _add_devices(devices.add_parser("devices"))
    sub = devices.add_parser("graph")
    sub.add_argument("--steps", type=int, default=1000, help="of each form")
    sub = devices.add_parser("compile")
    sub.add_argument("--gpu", action="store_true", help="for the GPU of this machine, instead of its CPU")
    sub.add_argument("--turns", type=int, default=4, help="processes of each side, of which the least counts")
    sub.add_argument("--only", nargs="+", action="extend", metavar="NAME", help="programs of benchmarks.fuse")
    sub.add_argument("--json", type=_records, metavar="FILE", help="where the numbers go")
    return parser.parse_args(argv)


def _add_serve(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--gpu", action="store_true", help="random weights of Llama-3.1-8B, instead of SmolLM2 on a CPU")
    sub.add_argument(
        "--only",
        nargs="+",
        action="extend",
        metavar="TEXT",
        help="only loads (on a GPU: dtypes) with this in their name",
    )
    sub.add_argument(
        "--without", nargs="+", action="extend", default=[], metavar="PEER", help="leave out what starts so"
    )
    sub.add_argument("--json", type=_records, metavar="FILE", help="where the records go (default: benchmarks/records)")
    sub.add_argument(
        "--limit", type=_seconds, metavar="SECONDS", help="start no load after this (default 530, with --gpu 100)"
    )
    sub.add_argument(
        "--chunk", type=_count, metavar="TOKENS", help="with --gpu: of a step at most (default: as the engine's)"
    )
    sub.add_argument(
        "--cache-dtype", metavar="DTYPE", help="with --gpu: of the cache, as float8_e4m3fn (default: bfloat16)"
    )
    sub.add_argument("--tiny", action="store_true", help="with --gpu: a tiny model, which tries the code, on a CPU too")


def _add_devices(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--devices", type=_count, metavar="N", help="how many; all of this host otherwise")
    sub.add_argument("--host", action="store_true", help="devices that a CPU pretends to be, with --tiny for a trial")
    sub.add_argument("--only", nargs="+", action="extend", metavar="NAME", help="functions of jtile.ops.collectives")
    sub.add_argument("--json", type=_records, metavar="FILE", help="where the records go")
    sub.add_argument("--repeats", type=_count, default=7, help="samples of each function (default 7)")
    sub.add_argument("--tiny", action="store_true", help="small sizes, which try the code")
    sub.add_argument("--mosaic", action="store_true", help="beside XLA's, Pallas's kernels for Hopper, where they run")
    sub.add_argument("--paper", action="store_true", help="measure nothing: 8, 72 and 1024 cards by rates of targets")


# Wrong files and numbers are refused before the benchmarks run, which takes minutes.


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return seconds


def _records(text: str) -> Path:
    """A file of records, into which others can be put, or one that does not exist yet."""
    path = Path(text)
    try:
        if path.exists() and not isinstance(json.loads(path.read_text()), list):
            raise ValueError("no list")
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text} holds no records ({error})") from error
    return path


def _picture(text: str) -> Path:
    if Path(text).suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text} is no .png, .svg or .pdf")
    return Path(text)


if __name__ == "__main__":
    main()
