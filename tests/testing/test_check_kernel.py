"""check_kernel: good kernels pass, and each way of being wrong is found by the check that is there for it."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import textwrap
from pathlib import Path

import forked
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile.testing import Check, Report, check_kernel
from jtile.testing.report import TRANSFORMS

X = jnp.asarray(np.random.default_rng(0).uniform(-1, 1, (5, 7)).astype(np.float32))
W = jnp.asarray(np.random.default_rng(1).uniform(0.5, 1.5, 7).astype(np.float32))
N = jnp.asarray([0, 4, 2, 2, 1], jnp.int32)
HERE = Path(__file__).parent
FEW = ("value", "jit")


def rows(x, **_):
    return x.shape[0]


@jt.kernel(out_type=lambda x, w: jt.like(x), grid=rows)
def scaled(x, w, o):
    i = jt.program_id(0)
    o[i, :] = jnp.sin(x[i, :]) * w[:]


def scaled_reference(x, w):
    return jnp.sin(x) * w[None, :]


@jt.kernel(out_type=lambda x, n: jt.like(x), grid=rows)
def taken(x, n, o):
    i = jt.program_id(0)
    o[i, :] = x[n[i], :] * x[n[i], :]


def taken_reference(x, n):
    return x[n] ** 2


def failures(kernel, reference, *args, **options) -> dict[str, Check]:
    """Failed checks by name."""
    with pytest.raises(AssertionError) as e:
        check_kernel(kernel, reference, args, **options)
    report = e.value.report
    assert str(report) in str(e.value)
    assert all(f"{c.name}: {c.detail}" in str(e.value) for c in report.failed)
    return {c.name: c for c in report.failed}


def test_a_right_kernel_passes_everything():
    report = check_kernel(scaled, scaled_reference, (X, W), dtypes=("bfloat16", "float64"), order=2)
    assert not report.failed
    names = [c.name for c in report.checks]
    assert names == [
        "value", "jit", "interpreter", "poison", "dtype bfloat16", "dtype float64", "jvp", "vjp x", "vjp w", "numeric",
        "checkpoint", "vmap x", "vmap w", "vmap all", "grad of vmap", "vmap of grad", "second order", "shard_map",
        "partitioned jit", "export",
    ]  # fmt: skip
    assert report["vjp w"].error <= report["vjp w"].limit == 8e-6
    assert report.row()["dtype"] == "bfloat16, float64"
    if jax.device_count() == 1:
        assert report["shard_map"].status == "skipped"
        assert "one device" in report["shard_map"].detail
    lines = str(report).splitlines()
    assert lines[0] == "check_kernel scaled"
    assert lines[1].split()[:2] == ["value", "passed"]
    assert Report.from_dict(report.as_dict()) == report


def test_integers_take_part_in_vjp_with_float0():
    report = check_kernel(taken, taken_reference, (X, N))
    assert report["vjp of integers"].status == "passed"
    assert report["vmap n"].status == "passed"
    assert "vjp n" not in [c.name for c in report.checks]


def test_a_wrong_value():
    found = failures(lambda x, w: scaled(x, w) * 1.001, scaled_reference, X, W, only=FEW)
    assert list(found) == ["value", "jit"]
    assert found["value"].error == pytest.approx(1e-3, rel=1e-2)
    assert "relative error 1.00e-03 > 2e-06" in found["value"].detail


def test_a_forgotten_tile():
    @jt.kernel(out_type=lambda x, w: jt.like(x), grid=lambda x, w: x.shape[0] - 1)
    def short(x, w, o):
        i = jt.program_id(0)
        o[i, :] = jnp.sin(x[i, :]) * w[:]

    found = failures(short, scaled_reference, X, W, only=("value", "jit", "poison", "interpreter"))
    assert "poison" in found
    assert "furthest at [4, 0]: nan" in found["poison"].detail
    assert "7 of 35 elements are far off" in found["poison"].detail


def test_an_access_out_of_bounds_is_found_by_the_interpreter():
    @jt.kernel(out_type=lambda x, w: jt.like(x), grid=rows)
    def beyond(x, w, o):
        i = jt.program_id(0)
        o[i, :] = jnp.sin(x[i, :]) * w[:] + 0 * x[i + 1, 0]

    found = failures(beyond, scaled_reference, X, W, only=("interpreter",))
    assert "index 5 is outside axis 0" in found["interpreter"].detail


def wrong_vjp(x, w):
    """The value of `scaled` with a reverse rule that forgets the factor of x's cotangent."""

    @jax.custom_vjp
    def f(x, w):
        return scaled(x, w)

    f.defvjp(lambda x, w: (scaled(x, w), (x, w)), lambda r, g: (jnp.cos(r[0]) * g, (jnp.sin(r[0]) * g).sum(0)))
    return f(x, w)


def test_a_wrong_reverse_rule():
    found = failures(
        wrong_vjp,
        scaled_reference,
        X,
        W,
        only=("value", "vjp", "numeric", "checkpoint", "grad of vmap", "vmap of grad"),
    )
    assert set(found) == {"vjp x", "numeric", "checkpoint", "grad of vmap", "vmap of grad"}
    assert "differences with step 0.03125 give" in found["numeric"].detail


def test_a_wrong_rule_by_defvjp():
    @jt.kernel(out_type=lambda x: jt.like(x), grid=rows)
    def doubled(x, o):
        i = jt.program_id(0)
        o[i, :] = 2.0 * x[i, :]

    doubled.defvjp(lambda x: (doubled(x), ()), lambda residuals, g: (3.0 * g,))
    found = failures(doubled, lambda x: 2 * x, X, only=("value", "jvp", "vjp"))
    assert list(found) == ["vjp x"]
    assert found["vjp x"].error == pytest.approx(0.5)


def test_a_rule_that_is_wrong_for_one_slice_of_a_batch():
    @jax.custom_batching.custom_vmap
    def f(x, w):
        return scaled(x, w)

    @f.def_vmap
    def _(size, batched, x, w):
        x = x if batched[0] else jnp.stack([x] * size)
        w = w if batched[1] else jnp.stack([w] * size)
        return jnp.stack([scaled(x[k], w[min(k, 1)]) for k in range(size)]), True

    found = failures(f, scaled_reference, X, W, only=("value", "vmap"))
    assert set(found) == {"vmap w", "vmap all"}


def test_a_kernel_that_raises_is_a_finding_and_the_rest_runs():
    @jt.kernel(out_type=lambda x: jt.like(x), grid=rows, init=-10.0)
    def largest(x, o):
        i = jt.program_id(0)
        jt.atomic_max(o, (i, slice(None)), x[i, :])

    found = failures(largest, lambda x: x, X, only=("value", "jvp", "vjp", "vmap"))
    assert set(found) == {"jvp", "vjp x"}
    assert found["jvp"].detail.startswith("TransformError: ")
    assert "atomic_max" in found["vjp x"].detail


def test_another_dtype_or_number_of_results():
    found = failures(lambda x, w: scaled(x, w).astype(jnp.float16), scaled_reference, X, W, only=("value",))
    assert found["value"].detail == "result 0 is float16[5, 7], the reference gives float32[5, 7]"
    found = failures(lambda x, w: (scaled(x, w),) * 2, scaled_reference, X, W, only=("value",))
    assert found["value"].detail == "2 results, the reference gives 1"


def test_checks_are_left_out_by_name_with_a_reason():
    options = {"only": ("value", "vjp", "vmap"), "skip": {"vmap": "not today", "vjp w": "frozen"}}
    report = check_kernel(wrong_vjp, scaled_reference, (X, W), constant={"x": "data"}, **options)
    assert [(c.name, c.status, c.detail) for c in report.checks] == [
        ("value", "passed", ""), ("vjp x", "skipped", "data"), ("vjp w", "skipped", "frozen"),
        ("vmap x", "skipped", "not today"), ("vmap w", "skipped", "not today"), ("vmap all", "skipped", "not today"),
    ]  # fmt: skip
    assert report.row()["vmap"] == "no: not today"
    with pytest.raises(ValueError, match=r"no check \['vmap z'\]; there are value, .*vmap x"):
        check_kernel(scaled, scaled_reference, (X, W), skip={"vmap z": "?"})


def test_pytrees_and_tolerances():
    def tree(p):
        return {"y": scaled(p["x"], p["w"])}

    report = check_kernel(
        tree, lambda p: {"y": scaled_reference(p["x"], p["w"]) + 1e-4}, ({"x": X, "w": W},), only=("value", "vjp"),
        tolerance={"float32": 1e-3},
    )  # fmt: skip
    assert [c.name for c in report.checks] == ["value", "vjp p['w']", "vjp p['x']"]
    assert report["value"].limit == 1e-3


FOLDERS = Path(__file__).parent, Path(forked.__file__).parent


def test_over_devices(subprocess_env):
    code = """
        from test_check_kernel import *
        report = check_kernel(scaled, scaled_reference, (X, W), only=("shard_map", "partitioned jit"))
        assert [c.status for c in report.checks] == ["passed", "passed"], report
        assert report["partitioned jit"].detail == "4 devices, nothing gathered"
        local = lambda x, w: scaled(x, w) * (1 + jax.lax.axis_index("d"))  # right on the first device only
        found = failures(local, scaled_reference, X, W, only=("shard_map",))
        assert "relative error" in found["shard_map"].detail
    """
    flags = subprocess_env.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    env = subprocess_env | {"XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join([*map(str, FOLDERS)])}
    run = [sys.executable, "-c", textwrap.dedent(code)]
    done = forked.run(run, env=env)
    assert done.returncode == 0, done.stderr


def test_a_table_of_parts():
    checks = (Check("vjp", "x"), Check("vjp", "n", "skipped", detail="an index"), Check("jvp", "", "failed"))
    assert Report("k", checks).row() == {"jvp": "failed", "vjp": "x; not n: an index"}


def test_the_page_runs(tmp_path, capsys):
    page = (HERE.parents[1] / "docs" / "testing.md").read_text()
    code, *_ = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)  # others are fragments
    path = tmp_path / "page.py"
    path.write_text(code)
    spec = importlib.util.spec_from_file_location("page", path)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    table = capsys.readouterr().out
    assert table.splitlines()[0] == "check_kernel scaled"
    first = " ".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    assert [t for t in TRANSFORMS if f"`{t}" not in first] == []
