"""What a GPU cannot run is refused by an error of jtile's, before triton or a driver sees it, and with a way out."""

from __future__ import annotations

import importlib.util
import sys

import jax
import jax.numpy as jnp
import pytest
from machines import card
from op_matrix import Bench, array

import jtile as jt
from jtile import ir
from jtile.errors import KernelValueError, UnsupportedError
from jtile.lowering.triton import stages, versions
from jtile.lowering.triton.compile import compile_kernel


@jt.kernel(out_type=lambda x, **_: jt.like(x), grid=lambda x, **_: jt.cdiv(x.shape[0], 64))
def double(x, o):
    i = jt.program_id(0)
    o.tiles(64)[i] = x.tiles(64)[i] * 2


@jt.kernel(out_type=lambda a, b: jt.like(a, shape=(a.shape[0], b.shape[1]), dtype=jnp.float32), grid=(1,))
def matmul(a, b, o):
    o[...] = jt.dot(a[...], b[...])


def floats(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_no_triton(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    versions.version.cache_clear()
    try:
        with pytest.raises(UnsupportedError, match=r"not installed: pip install 'jtile\[cuda13\]'"):
            double.lower(floats(71), target="cuda:sm_90").image
    finally:
        versions.version.cache_clear()


BROKEN = {
    "raise ImportError('libtriton.so: cannot open')": r"cannot be imported \(ImportError: libtriton.so: cannot open\)",
    "__version__ = '3.6.0'": r"cannot be imported \(ModuleNotFoundError: No module named 'triton.backends'\)",
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_triton_that_cannot_be_imported(monkeypatch, tmp_path, text):
    """It was called a defect of jtile."""
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text(text + "\n")
    for name in [n for n in sys.modules if n.partition(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    versions.version.cache_clear()
    try:
        with pytest.raises(UnsupportedError, match=BROKEN[text]):
            double.lower(floats(72), target="cuda:sm_90").image
    finally:
        versions.version.cache_clear()
        for name in [n for n in sys.modules if n.partition(".")[0] == "triton"]:
            del sys.modules[name]


@pytest.mark.parametrize("name", ["cuda:sm_70", "cuda:sm_91", "rocm:gfx906"])
def test_unknown_architectures(name):
    with pytest.raises(KernelValueError, match=r"jtile compiles for sm_75, sm_80"):
        double.lower(floats(64), target=name).image


def test_an_architecture_of_the_other_vendor():
    with pytest.raises(KernelValueError, match="an architecture of platform 'rocm'"):
        double.lower(floats(64), target="cuda:gfx942").image


@pytest.mark.parametrize("arch", ["sm_80", "gfx942"])
def test_clusters_where_there_are_none(arch):
    kernel = ir.parse_kernel("kernel @k(%o: ref<f32, out>) { %x = full 1.0 : f32 store %o[], %x }")
    with pytest.raises(KernelValueError, match=f"num_ctas is 1 on {arch}"):
        compile_kernel(kernel, card(arch), {"num_ctas": 2})


def test_blocks_of_a_cluster_share_no_written_memory():
    """Half of the scratch was read before the other block of the cluster had written it."""

    @jt.kernel(out_type=lambda x: x, grid=(2,), scratch=[floats(256)])
    def reverse(x, o, s):
        i = jt.program_id(0)
        s[...] = x[i, :]
        o[i, :] = s[255 - jnp.arange(256)]

    with pytest.raises(KernelValueError, match="num_ctas=2 shares a program among several blocks"):
        reverse.with_options(num_ctas=2).lower(floats(2, 256), target="cuda:sm_90").image
    assert double.with_options(num_ctas=2).lower(floats(256), target="cuda:sm_90").image


@pytest.mark.parametrize("warps", [3, 64, 12])
def test_warps(warps):
    kernel = ir.parse_kernel("kernel @k(%o: ref<f32, out>) { %x = full 1.0 : f32 store %o[], %x }")
    with pytest.raises(KernelValueError, match=f"power of two from 1 to 32 on sm_90, got {warps}"):
        compile_kernel(kernel, card("sm_90"), {"num_warps": warps})
    with pytest.raises(KernelValueError, match=f"num_warps={warps}"):
        double.with_options(num_warps=warps).lower(floats(64), target="cuda:sm_90").image


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_products_of_fp8_that_hardware_lacks(dtype):
    shapes = (floats(64, 64, dtype=dtype), floats(64, 64, dtype=dtype))
    with pytest.raises(UnsupportedError, match=r"op 'dot' on float8_.*; cast the operands to bfloat16 or float16"):
        matmul.lower(*shapes, target="cuda:sm_80").image


def test_more_arrays_than_a_launch_takes():
    last = jt.call(
        lambda *refs: refs[-1].__setitem__(..., refs[0][...]), out_type=lambda *xs: jt.like(xs[0]), grid=1, name="last"
    )
    with pytest.raises(UnsupportedError, match=r"kernel last has 51\d parameters .* takes 510: stack arrays"):
        last.lower(*[floats(4)] * 510, target="cuda:sm_80").image


def test_shared_memory_is_known_before_the_assembler_runs(monkeypatch):
    """ptxas took minutes over code that could not be launched, once for each number of stages."""
    monkeypatch.setattr(stages.ptx, "mended", lambda text: pytest.fail("the assembler is reached"))
    shapes = (floats(32, 1024, dtype=jnp.bfloat16), floats(1024, 32, dtype=jnp.bfloat16))
    with pytest.raises(UnsupportedError, match=r"bytes of shared memory, but sm_86 has 101376; use smaller tiles"):
        matmul.lower(*shapes, target="cuda:sm_86").image


DEEP = floats(64, 2048, dtype=jnp.bfloat16), floats(2048, 64, dtype=jnp.bfloat16)


@jt.kernel(out_type=lambda a, b, **_: jt.like(a, shape=(64, 64), dtype=jnp.float32), grid=(1,))
def deep(a, b, o, *, stages=5):
    A, B = a.tiles(64, 128), b.tiles(128, 64)
    acc = jt.zeros((64, 64), jnp.float32)
    for k in jt.range(A.shape[1], stages=stages):
        acc = jt.dot(A[0, k], B[k, 0], acc)
    o[...] = acc


def test_the_deepest_pipeline_that_fits_is_found_at_once(monkeypatch):
    """Each attempt is a whole compilation, and there were as many as stages too many."""
    attempts, build = [], stages._build
    monkeypatch.setattr(stages, "_build", lambda *args: attempts.append(args) or build(*args))
    low = deep.lower(*DEEP, stages=12, target="cuda:sm_86")
    assert "tt.num_stages = 4 :" in low.texts["ttir"]  # 32 KiB each but for one; it has 99
    assert len(attempts) == 2
    with pytest.raises(UnsupportedError, match="but sm_86 has 101376"):
        deep.with_options(num_stages=5).lower(*DEEP, target="cuda:sm_86").image


def test_an_option_that_does_not_fit_is_no_hint():
    """Loops give way where shared memory is short, a number that the user gave does not; it goes before theirs."""
    assert deep.lower(*DEEP, target="cuda:sm_86").image
    low = deep.with_options(num_stages=2).lower(*DEEP, target="cuda:sm_86")
    assert "tt.num_stages = 2 :" in low.texts["ttir"] and "tt.num_stages = 5 :" not in low.texts["ttir"]
    with pytest.raises(UnsupportedError, match=r"but sm_86 has 101376; use .* fewer stages \(num_stages=5\)"):
        deep.with_options(num_stages=5).lower(*DEEP, target="cuda:sm_86").image


def test_tiles_of_a_kernel():
    @jt.kernel(out_type=lambda x: jt.like(x), grid=(1,))
    def whole(x, o):
        o[...] = x[...] + 1

    with pytest.raises(UnsupportedError, match=r"a tile of 2097152 elements .*; at most 1048576 are possible"):
        whole.lower(floats(1025, 1024), target="cuda:sm_90").image


def test_tiles_that_only_an_emitter_makes():
    tile = "tile<1025x1024xf32>"
    text = f"""kernel @big(%o: ref<4xf32, out>) {{
      %z = full 0 : i32
      %x = full 1.0 : {tile}
      %s = reduce sum %x axes=(0, 1) : f32
      %b = broadcast %s dims=() : tile<4xf32>
      store %o[tile(%z, 4)], %b
    }}"""
    with pytest.raises(UnsupportedError, match=r"tiles of at most 1048576 elements, and 'full' takes one of 2097152"):
        compile_kernel(ir.parse_kernel(text), card("sm_90"))


def test_a_sort_in_one_warp():
    bench = Bench(array((1024,), "float32"))
    for r in bench.b.add(ir.Sort((bench.loads()[0],), 0)).results:
        bench.store(r)
    with pytest.raises(KernelValueError, match="takes minutes to compile; use num_warps=2"):
        compile_kernel(bench.case().kernel, card("sm_90"), {"num_warps": 1})


def test_no_gpu():
    if jax.default_backend() != "cpu":
        pytest.skip("this machine has a GPU")
    with pytest.raises(UnsupportedError, match="cuda"):
        double.lower(floats(64), target="cuda").image
