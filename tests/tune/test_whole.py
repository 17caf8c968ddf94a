"""`jt.profile_program`: shares of kernels and ops, gaps, and the trace."""

import gzip
import json

import jax
import jax.numpy as jnp
import pytest

import jtile as jt
from jtile.errors import KernelTypeError, KernelValueError
from jtile.tools.cli import main
from jtile.tune import whole

X = jax.ShapeDtypeStruct((32, 64), jnp.float32)


@jt.kernel(out_type=lambda x: jt.like(x), grid=lambda x: x.shape[0])
def halved(x, o):
    o[jt.program_id(0), :] = x[jt.program_id(0), :] * 0.5


def program(x):
    y = jax.lax.fori_loop(0, 3, lambda k, y: halved(y), x)
    return jnp.cumsum(halved(y), 1)


@pytest.mark.cpu
def test_a_program_on_a_cpu(tmp_path):
    found = jt.profile_program(program, X, calls=3)
    kernel = next(p for p in found.parts if p.name == "halved")
    assert (kernel.kind, kernel.runs, found.calls) == ("kernel", 4, 3)
    assert {p.kind for p in found.parts} == {"kernel", "xla"}
    one = jt.profile_program(program, X, calls=1)
    spent = sum(p.time_us for p in one.parts) + one.gaps_us + one.outside_us
    assert 0 < one.kernels_us < one.time_us and 0.3 * one.time_us < spent < 3 * one.time_us
    assert "of it in jtile's kernels" in str(found) and "gaps between them" in str(found)
    found.save(tmp_path / "trace.json.gz")
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    assert sum(e["name"].startswith("halved (") for e in events) == 12
    assert sum(e["name"] == "halved" for e in events) == 12
    with pytest.raises(KernelValueError, match="cannot be written"):
        found.save(tmp_path / "none" / "x.json" / "y")


TEXT = """HloModule jit_step, is_scheduled=true
  %call.1 = f32[2] custom-call(%a), custom_call_target="jtile_cuda", backend_config={grid = "x", name = "matmul"}
  ROOT call.2 = f32[2] custom-call(%b), custom_call_target="jtile_cuda", backend_config={name = "norm", x = 3 : i64}
  %other = f32[2] custom-call(%b), custom_call_target="cublas", backend_config={name = "gemm"}
"""


def events(*spans):
    about = [("process_name", 1, 0, "/device:GPU:0"), ("process_name", 2, 0, "/host:CPU")]
    about += [("thread_name", 1, 7, "Stream #7(Compute)"), ("thread_name", 1, 8, "XLA Ops"), ("thread_name", 2, 1, "h")]
    out = [{"ph": "M", "name": n, "pid": p, "tid": t, "args": {"name": x}} for n, p, t, x in about]
    keys = ("pid", "tid", "name", "ts", "dur", "args")
    return out + [{"ph": "X", **dict(zip(keys, span, strict=True))} for span in spans]


def test_streams_of_a_gpu():
    """As an H200 writes it: kernels of a recorded graph have the graph for their op, and may begin before those in
    front have ended; lines that repeat the streams are not counted."""
    op = lambda name: {"hlo_op": name, "hlo_module": "jit_step"}
    step = lambda at: [
        (2, 1, f"{whole._MARK} {at}", at, 100, {}),
        (1, 7, "jtile_matmul", at + 10, 30, op("command_buffer_1")),
        (1, 7, "loop_fusion", at + 12, 38, op("command_buffer_1")),
        (1, 7, "jtile_norm", at + 55, 15, op("call.2")),
        (1, 7, "gemm", at + 70, 10, op("other")),
        (1, 8, "call.1", at + 10, 30, op("call.1")),
    ]
    found = whole.of_trace(events(*step(0), *step(1000)), TEXT, "gpu")
    assert [(p.name, p.kind, p.runs, p.time_us) for p in found.parts] == [
        ("matmul", "kernel", 1, 30), ("norm", "kernel", 1, 15), ("loop_fusion", "xla", 1, 10), ("other", "xla", 1, 10),
    ]  # fmt: skip
    assert (found.time_us, found.gaps_us, found.outside_us, found.kernels_us) == (100, 5, 30, 45)


def test_the_parts_add_up_to_a_call_whatever_holds_up_some_calls():
    """The longest and the shortest quarter of the calls are left out; what is held up differs from call to call."""
    op = lambda name: {"hlo_op": name, "hlo_module": "jit_step"}
    calls = [(30, 10), (34, 10), (30, 16), (900, 10), (30, 700), (20, 5), (31, 10), (30, 12)]
    spans = []
    for k, (a, b) in enumerate(calls):
        at = 10_000 * k
        spans += [(2, 1, f"{whole._MARK} {k}", at, a + b + 25, {}), (1, 7, "jtile_matmul", at + 10, a, op("call.1"))]
        spans += [(1, 7, "gemm", at + 15 + a, b, op("other"))]
    found = whole.of_trace(events(*spans), TEXT, "gpu")
    assert found.time_us == pytest.approx(25 + (41 + 42 + 44 + 46) / 4)
    assert sum(p.time_us for p in found.parts) + found.gaps_us + found.outside_us == pytest.approx(found.time_us)


def test_what_runs_inside_of_an_op_is_not_counted_twice():
    of = lambda op: {"hlo_op": op, "hlo_module": "jit_step"}
    spans = [(2, 1, f"{whole._MARK} 0", 0, 100, {}), (2, 1, "while", 10, 60, of("while"))]
    spans += [(2, 1, "call.1", 10 + 20 * k, 15, of("call.1")) for k in range(3)]
    spans += [(2, 1, "call.1", 80, 15, {"hlo_op": "call.1", "hlo_module": "jit_other"})]
    found = whole.of_trace(events(*spans), TEXT, "cpu")
    assert [(p.name, p.runs, p.time_us) for p in found.parts] == [("matmul", 3, 45), ("while", 1, 15)]
    assert whole.of_trace([], "", "cpu").parts == ()


def test_errors():
    with pytest.raises(KernelTypeError, match="a function and arrays"):
        jt.profile_program(3)
    with pytest.raises(KernelTypeError, match=r"outside of jax\.jit"):
        jax.jit(lambda x: jt.profile_program(jnp.sin, x))(1.0)
    with pytest.raises(KernelValueError, match="at least 1, got 0"):
        jt.profile_program(jnp.sin, X, calls=0)


@pytest.mark.cpu
def test_the_command(capsys, tmp_path):
    trace = tmp_path / "t.json"
    with pytest.raises(SystemExit) as status:
        main(
            ["profile", "jtile.ops:softmax", "--args", "f32[8,16]", "--program", "--calls", "2", "--trace", str(trace)]
        )
    assert not status.value.code
    assert "softmax" in capsys.readouterr().out and json.loads(trace.read_text())["traceEvents"]
