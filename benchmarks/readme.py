"""`python -m benchmarks.readme`: the table of speeds in README.md, from the records of one device."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.report import number

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- speeds: begin -->\n", "<!-- speeds: end -->\n"

# (workload, config, dtype) of the records that stand in the README
SHOWN = (
    ("chain", "1048576", "float32"),
    ("softmax", "4096x1024", "float32"),
    ("rms_norm", "4096x1024", "float32"),
    ("layer_norm", "4096x1024", "float32"),
    ("matmul", "512", "float32"),
    ("matmul", "1024", "float32"),
    ("matmul", "2048", "float32"),
    ("matmul", "1024", "bfloat16"),
    ("matmul", "2048", "bfloat16"),
    ("attention", "1024, 8 heads of 64, causal", "float32"),
    ("attention", "4096, 8 heads of 64, causal", "float32"),
    ("attention", "4096, 8 heads of 64, causal", "bfloat16"),
    ("softmax_backward", "4096x1024", "float32"),
    ("rms_norm_backward", "4096x1024", "float32"),
    ("matmul_backward", "1024", "float32"),
    ("cross_entropy_backward", "512x32000", "float32"),
    ("attention_backward", "2048, 8 heads of 64", "float32"),
    ("attention_backward", "2048, 8 heads of 64, causal", "float32"),
    ("attention_backward", "2048, 8 heads of 64, causal", "bfloat16"),
    ("gemv", "4096x4096", "q4_0"),
    ("smollm2", "prefill 512", "q4_1, us/token"),
    ("smollm2", "decode 128 after 16", "q4_1, us/token"),
    ("overhead", "eager call", "us"),
    ("overhead", "one kernel inside jit", "us"),
)


def table(records: list[dict]) -> str:
    """Markdown: work, ours, peers, ratio of the best peer's time to ours, relative error."""
    rows = ["| work | jtile us | peers us | best peer / jtile | error |", "|---|---:|---:|---:|---:|"]
    found = {(r["workload"], r["config"], r["dtype"]): r for r in records}
    for key in SHOWN:
        if key not in found:
            continue
        r = found[key]
        peers = ", ".join(f"{name} {number(us)}" for name, us in r["peers"].items()) or "-"
        ratio = "-" if r["ratio"] is None else f"{r['ratio']:.2f}"
        error = "-" if r["error"] is None else f"{r['error']:.0e}"
        rows.append(
            f"| {r['workload']} {r['config']}, {r['dtype']} | {number(r['ours_us'])} | {peers} | {ratio} | {error} |"
        )
    return "\n".join(rows) + "\n"


def update(readme: str, records: list[dict]) -> str:
    """README's text with the table between its two marks replaced."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table(records) + END + after


def main(argv: list[str]) -> None:
    files = [Path(argv[0])] if argv else sorted((ROOT / "benchmarks" / "records").glob("*/records.json"))
    if len(files) != 1:
        sys.exit(f"usage: python -m benchmarks.readme RECORDS.json (found {len(files)} under benchmarks/records)")
    path = ROOT / "README.md"
    path.write_text(update(path.read_text(), json.loads(files[0].read_text())))
    print(f"{path.name}: speeds from {files[0]}")


if __name__ == "__main__":
    main(sys.argv[1:])
