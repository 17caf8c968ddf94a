"""`python -m benchmarks.readme`: the few speeds in README.md, and the tables in docs/speeds.md, one for each device."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks import pictures
from benchmarks.report import number

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "benchmarks" / "records"
BEGIN, END = "<!-- speeds: begin -->\n", "<!-- speeds: end -->\n"

# (device, workload, config, dtype) of the records that stand in the README, and what the README calls the work
FEW = {
    ("h200", "gemm", "8192 NN", "bfloat16"): "Matrix product, 8192 x 8192 x 8192, bf16",
    ("h200", "attention", "B4 H32 S4096 D128, causal", "bfloat16"): "Causal attention, 4 x 32 heads, 4096 x 128, bf16",
    ("znver5-2t", "smollm2", "decode 128 after 16", "q4_1, us/token"): "One token of SmolLM2-135M, 4-bit weights",
}
DEVICES = {
    "h200": "NVIDIA H200", "znver5-2t": "two threads of a Zen 5 CPU", "znver4-2t": "two threads of a Zen 4 CPU",
    "emeraldrapids-2t": "two threads of a Xeon with AMX",
}  # fmt: skip
PEERS = {"xla": "XLA", "cublas": "cuBLAS", "cudnn": "cuDNN"}

# (workload, config, dtype) of the records that stand in docs/speeds.md
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
    ("smollm2", "decode 64 after 16, 8 rows", "q4_1, us/token"),
    ("overhead", "eager call", "us"),
    ("overhead", "one kernel inside jit", "us"),
    ("linear_cross_entropy", "512x512x32000", "float32"),
    ("linear_cross_entropy_gradient", "512x512x32000", "float32"),
    ("segment_sum", "131072x64 of 4096", "float32"),
    ("segment_sum", "131072x64 of 4096, sorted", "float32"),
    ("adamw", "2048x2048, 8 steps", "float32"),
    ("stencil", "2048x2048, 3x3", "float32"),
    ("stencil", "2048x2048, 3x3, 4 steps", "float32"),
    ("convolution", "2 x 3x3 of 64 channels", "float32"),
    ("convolution", "2 x depthwise 7x7 of 128 channels", "float32"),
    ("fft", "1024x1024", "complex64"),
    ("rfft", "256x4096", "float32"),
    ("csr_matmul", "4096x4096, 40 a row, times 64", "float32"),
    ("sparse24_matmul", "16x4096x4096", "float32"),
    ("sparse24_matmul", "256x4096x4096", "float32"),
    ("n_body", "2048", "float32"),
    ("sample_top_p", "16x32000", "float32"),
    ("native_sparse_attention", "1024, 8 heads of 64", "float32"),
    ("linear_attention", "gated delta, 2048, 8 heads of 64", "float32"),
    ("linear_attention_gradient", "gated delta, 2048, 8 heads of 64", "float32"),
    ("rwkv7", "2048 x 512", "float32"),
    ("selective_scan", "2048 x 512", "float32"),
    ("fuse", "causal attention", "float32"),
    ("fuse", "layer norm gradient", "float32"),
    ("fuse", "gated MLP", "float32"),
    ("fuse", "Black-Scholes", "float32"),
    ("numpy", "k_means", "float64"),
    ("numpy", "lorenz", "float64"),
    ("numpy", "game_of_life", "float64"),
    # GPUs
    ("gemm", "2048 NN", "bfloat16"),
    ("gemm", "4096 NN", "bfloat16"),
    ("gemm", "8192 NN", "bfloat16"),
    ("gemm_fp8", "8192 NT", "float8_e4m3fn"),
    ("gemm_fp8_blocks", "8192 NT", "float8_e4m3fn"),
    ("gated_mlp", "4096x4096x14336", "bfloat16"),
    ("grouped", "8192x4096 to 14336, 8 experts", "bfloat16"),
    ("grouped", "4096x2048 to 1408, 64 experts", "bfloat16"),
    ("attention", "B4 H32 S4096 D128", "bfloat16"),
    ("attention", "B4 H32 S4096 D128, causal", "bfloat16"),
    ("attention", "B4 H32 S4096 D128, causal", "float16"),
    ("attention_backward", "B4 H32 S4096 D128", "bfloat16"),
    ("attention_backward", "B4 H32 S4096 D128, causal", "bfloat16"),
    ("matmul_user_gradient", "4096", "bfloat16"),
    ("matmul_user_gradient", "16 x 1024", "bfloat16"),
    ("linear_gelu_residual_user_gradient", "4096", "bfloat16"),
    ("attention_user_gradient", "B2 H16 S4096 D128, causal", "bfloat16"),
    ("attention_user_gradient", "B2 H16 S4096 D64, causal", "bfloat16"),
    ("rms_norm_user_gradient", "16384x4096", "bfloat16"),
    ("layer_norm_user_gradient", "16384x4096", "bfloat16"),
    ("softmax_user_gradient", "16384x4096", "bfloat16"),
    ("cross_entropy_user_gradient", "16384x4096", "bfloat16"),
    ("decode_attention", "B64 H32/8 S8192 D128", "bfloat16"),
    ("mla_decode", "B132 H128 S8192 512+64", "bfloat16"),
    ("gemv", "1x14336x4096 NT", "bfloat16"),
    ("quantized_gemv", "1x14336x4096", "int8"),
    ("quantized_gemv", "1x14336x4096", "q4_0"),
    ("quantized_gemm", "16x14336x4096", "q4_0"),
    ("softmax", "8192x4096", "bfloat16"),
    ("softmax", "131072x1024", "bfloat16"),
    ("rms_norm", "8192x4096", "bfloat16"),
    ("rms_norm", "131072x1024", "bfloat16"),
    ("layer_norm", "131072x1024", "bfloat16"),
    ("cross_entropy", "4096x128256", "bfloat16"),
    ("cross_entropy_memory", "4096x128256", "bfloat16, KiB"),
    ("launch", "a kernel of 200 in one jit", "us"),
    ("launch", "a kernel of 200 in a fori_loop", "us"),
)


def few(records: list[dict]) -> str:
    """Markdown: the work of `FEW`, with the best peer of each and the device."""
    rows = ["| work | jtile | best peer | device |", "|---|---:|---:|---|"]
    found = {(r["device"], r["workload"], r["config"], r["dtype"]): r for r in records}
    for key, work in FEW.items():
        if key not in found:
            continue
        r = found[key]
        peer = min(r["peers"], key=r["peers"].__getitem__)
        theirs = f"{number(r['peers'][peer])} µs ({PEERS.get(peer, peer)})"
        rows.append(f"| {work} | {number(r['ours_us'])} µs | {theirs} | {DEVICES.get(key[0], key[0])} |")
    return "\n".join(rows) + "\n"


def table(records: list[dict]) -> str:
    """Markdown: work, ours, peers, ratio of the best peer's time to ours, relative error; with several devices, a
    table for each under its name."""
    devices = list(dict.fromkeys(r["device"] for r in records))
    if len(devices) <= 1:
        return _table(records)
    names = {device: DEVICES.get(device, device) for device in devices}
    parts = (
        f"## {name}\n\n![Speeds on {name}](pictures/speeds_{device}.svg)\n\n"
        f"{_table([r for r in records if r['device'] == device])}"
        for device, name in names.items()
    )
    return "\n".join(parts)


def _table(records: list[dict]) -> str:
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


def update(page: str, text: str) -> str:
    """A page with what stands between its two marks replaced by `text`."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + text + END + after


def drawings(records: list[dict]) -> dict[Path, str]:
    """The pictures of docs/speeds.md, by their files: one for each device."""
    found = {}
    for device in dict.fromkeys(r["device"] for r in records):
        own = [r for r in records if r["device"] == device]
        found[ROOT / "docs" / "pictures" / f"speeds_{device}.svg"] = pictures.speeds(
            own, str(DEVICES.get(device, device))
        )
    return found


def main(argv: list[str]) -> None:
    files = [Path(name) for name in argv] or sorted(RECORDS.glob("*/records.json"), reverse=True)
    missing = [str(file) for file in files if not file.is_file()]
    if missing or not files:
        found = f"there is no file {missing[0]}" if missing else f"found none under {RECORDS}"
        sys.exit(f"usage: python -m benchmarks.readme [RECORDS.json ...] ({found})")
    records = [row for file in files for row in json.loads(file.read_text())]
    for path, text in ((ROOT / "README.md", few(records)), (ROOT / "docs" / "speeds.md", table(records))):
        path.write_text(update(path.read_text(), text))
        print(f"{path.relative_to(ROOT)}: speeds from {', '.join(map(str, files))}")
    for path, text in drawings(records).items():
        path.write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
