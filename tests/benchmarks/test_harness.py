"""The benchmark harness: what a record holds, what is refused, what the roofline says."""

import dataclasses
import json

import jax.numpy as jnp
import pytest

import jtile as jt
from benchmarks import fuse, harness, report
from jtile.testing import Timing
from jtile.tune import host

FIELDS = [
    "workload",
    "config",
    "dtype",
    "device",
    "ours_us",
    "peers",
    "ratio",
    "bound_us",
    "bound_frac",
    "error",
    "timed",
    "peer_error",
    "kernels",
]


class Machine:
    device = "test"

    def bound_us(self, bytes_moved, flops, unit):
        return 0.5


def case(ours, **more):
    x = jnp.arange(1000, dtype=jnp.float32)
    return harness.Case("add", "1000", "float32", ours, {"xla": lambda x: x + 1}, (x,), **more)


def test_a_record_has_the_fields_of_the_format():
    got = harness.measure(case(lambda x: 1 + x, bytes=8000), Machine(), repeats=3).record
    assert [f.name for f in dataclasses.fields(got)] == FIELDS
    assert got.error == 0
    assert got.ratio == pytest.approx(got.peers["xla"] / got.ours_us, rel=1e-2)
    assert got.bound_frac == pytest.approx(0.5 / got.ours_us, rel=1e-2)


def test_a_wrong_result_ends_the_benchmark():
    with pytest.raises(harness.WrongResultError, match="add 1000 float32: relative error"):
        harness.measure(case(lambda x: x + 2), Machine(), repeats=1)
    with pytest.raises(harness.WrongResultError):
        harness.measure(case(lambda x: x * jnp.float32(jnp.nan)), Machine(), repeats=1)


def test_the_reference_and_the_arguments_of_a_peer():
    x = jnp.ones(8, jnp.float32)
    got = harness.Case(
        "a", "b", "c", lambda x: x * 2, {"p": lambda x, y: x}, (x,), peer_args={"p": (x, x)}, reference=lambda x: x * 2
    )
    assert harness.measure(got, Machine(), repeats=1).record.error == 0


def test_the_ratio_is_the_best_peers():
    times = {"ours": Timing(10, 8), "a": Timing(30, 24), "b": Timing(20, 4)}
    got = harness.result("w", "c", "d", "test", times)
    assert got.record.ratio == 2
    assert got.min_ratio == 0.5
    assert got.record.peers == {"a": 30, "b": 20}
    alone = harness.result("w", "c", "d", "test", {"ours": Timing(12.3456, 12)})
    assert (alone.record.ratio, alone.record.ours_us, alone.min_ratio) == (None, 12.35, None)


def test_a_peer_with_our_program_has_our_time():
    fused = jt.fuse(lambda x: x + 1)  # one step, which stays XLA's
    same = harness.measure(case(fused), Machine(), repeats=3)
    assert (same.record.ratio, same.min_ratio, same.record.timed) == (1, 1, "ours is the program of xla")
    (adam,) = [c for c in fuse.cases() if c.config == "Adam"]
    assert harness.measure(adam, Machine(), repeats=1).record.timed == "ours is the program of xla"
    other = harness.measure(case(lambda x: x + 0.5 + 0.5), Machine(), repeats=3).record
    assert other.timed is None and other.peers["xla"] != other.ours_us


def test_files(tmp_path):
    results = [
        harness.result("w", f"{n}", "f32", "test", {"ours": Timing(10, 9), "xla": Timing(n, n)}, bound_us=1, error=0)
        for n in (5, 20)
    ]
    report.write_json(results, tmp_path / "new" / "records.json")
    rows = json.loads((tmp_path / "new" / "records.json").read_text())
    assert [list(row) for row in rows] == [FIELDS, FIELDS]
    assert [row["ratio"] for row in rows] == [0.5, 2]
    report.plot(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    report.table(results)


def test_the_roofline_of_this_machine():
    machine = host.measure(threads=1)
    assert 1e8 < machine.bandwidth(1 << 16) < 1e13
    for unit in ("f32", "bf16", "int8"):
        assert 1e8 < machine.peak(unit) < 1e14
    assert machine.bound_us(0, 0, "f32") == 0
    few, many = machine.bound_us(0, 10**9, "f32"), machine.bound_us(0, 2 * 10**9, "f32")
    assert many == pytest.approx(2 * few)


@pytest.mark.parametrize("features", [set(), {"avx2"}, {"avx2", "avx512f", "avx512bf16", "avx512vnni"}])
@pytest.mark.parametrize("unit", ["f32", "bf16", "int8"])
def test_the_peak_loop_is_ir_that_llvm_takes(unit, features):
    import llvmlite.binding as llvm

    text, flops = host._text(unit, features)
    llvm.parse_assembly(text).verify()
    assert flops > 0
