"""Ascend without the tools: targets, what is refused, what TTIR says for an NPU, what HIVM text tells."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import zipfile

import jax
import jax.numpy as jnp
import op_matrix
import pytest
from ascend_cases import kernels, longest, normalised

import jtile as jt
from jtile.errors import KernelValueError, UnsupportedError
from jtile.lowering import targets
from jtile.lowering.ascend import compile as back_end
from jtile.lowering.ascend import hivm, install, tools
from jtile.lowering.ascend.targets import ARCHS, ascend_target, cores, names, resolve

f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)


def test_targets():
    assert targets.resolve("ascend:910b1") == resolve("ascend:910b1")
    assert {"ascend:910b3", "ascend:9382"} <= set(names()) <= set(targets.names())
    assert cores(resolve("ascend:910b3")) == (20, 40)
    assert resolve("ascend:910B1").arch == "Ascend910B1"
    assert {m.name: m.size for m in resolve("ascend:9392").memories}["l0c"] == 128 << 10
    with pytest.raises(UnsupportedError, match="names no NPU: write 'ascend:910b1'"):
        resolve("ascend:")
    with pytest.raises(KernelValueError, match="unknown Ascend NPU '910c': jtile knows 910b1"):
        resolve("ascend:910c")
    with pytest.raises(KernelValueError, match="'ascend:910b1' does not say how many units 'cluster' and 'dev"):
        cores(dataclasses.replace(resolve("ascend:910b1"), scales=()))
    with jt.config(arch="910b3"):
        assert (jt.platform(), jt.target().name) == ("ascend", "ascend:910b3")


@jt.kernel(out_type=jt.like, grid=1)
def gamma(x, o):
    o[...] = jax.lax.lgamma(x[...])


@jt.kernel(out_type=jt.like, grid=1)
def thirds(x, o):
    o[...] = jax.lax.div(x[...], x[...])


def wide_thirds():
    with jax.enable_x64(True):
        return kernels(thirds, (jax.ShapeDtypeStruct((8,), jnp.uint64),))[0]


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (lambda: op_matrix.CASES["copy-float64"]().kernel, "with dtype float64; use float32"),
        (wide_thirds, "on uint64; cast to int64"),
        (lambda: kernels(gamma, (f32(8),))[0], "op 'map.lgamma'; the vendor's compiler has no such operation"),
    ],
)
def test_capabilities(kernel, message):
    with pytest.raises(UnsupportedError, match=re.escape(message)):
        targets.check_capabilities(kernel(), resolve("ascend:910b1"))


def test_reductions_of_two_values_are_refused():
    @jt.kernel(out_type=lambda x: jt.like(x, shape=()), grid=1)
    def body(x, o):
        t = x[...]
        both = lambda a, b: (a[0] + b[0], jnp.maximum(a[1], b[1]))
        o[()] = jt.reduce((t, t), 0, both, (jnp.float32(0), jnp.float32(0)))[0]

    (kernel,) = kernels(body, (f32(64),))
    with pytest.raises(UnsupportedError, match="combiners of one value only"):
        back_end.emit(kernel, resolve("ascend:910b1"))


def ttir(fn, *args) -> str:
    (kernel,) = kernels(fn, args)
    return back_end.emit(kernel, ascend_target("910b1"))[0]


def test_the_text_has_nothing_of_gpus_and_of_what_is_translated_wrong():
    @jt.kernel(out_type=lambda x, u: (jt.like(x), jt.like(u)), grid=100)
    def body(x, u, o, p):
        t, n = x[...], u[...]
        o[...] = jnp.tanh(jnp.exp2(t) / jnp.log1p(t)) + jax.lax.erf(t) + n.astype(jnp.float32)
        p[...] = jnp.where(n < 7, n // 3, n >> 2)

    text = ttir(body, f32(256), jax.ShapeDtypeStruct((256,), jnp.uint32))
    tensors = "\n".join(line for line in text.splitlines() if "tensor<" in line)
    for word in ("shrui", "divui", "uitofp", "extui", "divsi %", " ult", "extern", "inline_asm", "precise", "log1p",
                 "math.exp2", "map_elementwise", "gpu.barrier"):  # fmt: skip
        found = [line for line in tensors.splitlines() if word in line and "xi64>" not in line]
        assert not found, found
    assert "scf.for" in text  # 100 programs on 48 cores


def test_programs_loop_over_the_cores_that_they_need():
    text = ttir(normalised, f32(500, 64))
    assert "tt.get_num_programs" in text and "scf.for" in text
    assert "scf.for" not in ttir(normalised, f32(48, 64))
    (kernel,) = kernels(normalised, (f32(500, 64),))
    for name, vectors in (("910b1", 48), ("910b3", 40)):
        assert back_end.emit(kernel, ascend_target(name))[1].grid == vectors


def test_long_names_are_cut():
    @jt.kernel(out_type=jt.like, grid=1, name="a_kernel_whose_name_is_longer_than_the_run_time_takes")
    def body(x, o):
        o[...] = x[...]

    (kernel,) = kernels(body, (f32(8),))
    _, _, symbol = back_end.emit(kernel, ascend_target("910b1"))
    assert len(symbol) <= 49 and symbol.startswith("jtile_a_kernel_whose_name")


def test_without_the_tools(monkeypatch, tmp_path):
    monkeypatch.setattr(tools, "folder", lambda: tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    for variable in tools.VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)
    assert tools.find(tools.ADAPTER) is None and tools.versions() == ("", "")
    (kernel,) = kernels(longest, (f32(3, 2000),))
    with pytest.raises(UnsupportedError, match="triton-adapter-opt, which was not found: `make ascend-tools`"):
        back_end.compile_kernel(kernel, ascend_target("910b1"))
    monkeypatch.setenv("JTILE_BISHENGIR", str(tmp_path / "none"))
    with pytest.raises(UnsupportedError, match=r"JTILE_BISHENGIR=.*is no file"):
        tools.find(tools.COMPILER)
    (tmp_path / "bishengir-compile").write_text("")
    monkeypatch.setenv("JTILE_BISHENGIR", str(tmp_path / "bishengir-compile"))
    assert tools.find(tools.COMPILER) == tmp_path / "bishengir-compile"


@pytest.mark.parametrize("right", [True, False])
def test_only_the_files_that_are_known_are_kept(tmp_path, right):
    path, data = tmp_path / "w.whl", b"a program"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("bin/tool", data)
        archive.writestr("lib/other.bc", b"not this one")
    digest = hashlib.sha256(data if right else b"another").hexdigest()
    problem = install.unpack(path, install.Wheel("w", "1", "", (("bin/tool", digest),)), tmp_path)
    assert (problem is None) == right
    assert (tmp_path / "tool").exists() == right and not (tmp_path / "other.bc").exists()
    assert right or "is not the file that jtile knows" in str(problem)


def test_facts_of_hivm():
    text = """module {
  func.func @k_infer_workspace_shape_function() -> index { %c2496 = arith.constant 2496 : index
    return %c2496 : index }
  func.func @k_infer_task_type_function() -> i8 { %c32_i8 = arith.constant 32 : i8
    return %c32_i8 : i8 }
  func.func @k_mix_aic() {
    %c64_i64 = arith.constant 64 : i64
    %c0_i64 = arith.constant 0 : i64
    %1 = hivm.hir.pointer_cast(%c0_i64, %c64_i64) : memref<4x8xf16, #hivm.address_space<cbuf>>
    %2 = hivm.hir.pointer_cast(%c64_i64) : memref<1x2x16x16xf32, #hivm.address_space<cc>>
  }
}"""
    facts = hivm.facts(text, "k")
    assert facts == hivm.Facts(32, 2496, 0, {"l1": 128, "l0c": 64 + 2048}) and facts.kind == "mix"


def test_every_name_is_one_of_the_compiler():
    assert all(re.fullmatch(r"Ascend910(B\d\w?|_9\d{3})", arch) for arch, _ in ARCHS.values())
