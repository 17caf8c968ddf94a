"""Native code for sizes that are known when it runs: the same bits as the code for the sizes themselves."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from draws import draws
from hypothesis import given
from native import run_artifact, run_native
from random_kernels import Case, kernels

from jtile import ir, passes
from jtile.errors import UnsupportedError
from jtile.ffi import FfiError, LoadedImage
from jtile.interpret import interpret
from jtile.lowering.cpu import compile_kernel

# Every kind of access of arrays with dynamic dimensions, in one grid; `{N}`, `{M}` are the sizes.
KERNEL = """\
kernel @everything(
    %a: ref<{N}x{M}xf32>,
    %q: ref<{N}x{M}xi4>,
    %at: ref<{N}xi32>,
    %o: ref<{N}x{M}xf32, out>,
    %t: ref<{M}x{N}xf32, out>,
    %s: ref<{N}xf32, out>,
    %p: ref<{N}x{M}xi4, out>,
    %g: ref<{N}x3xf32, out>,
    %c: ref<{M}xi32, out>) grid({cdiv(N, 8)}, {cdiv(M, 5)}) init(%s = 0, %c = 0) {
  %i = program_id 0 : i32
  %j = program_id 1 : i32
  %c0 = full 0 : i32
  %c5 = full 5 : i32
  %c8 = full 8 : i32
  %x = load %a[tile(%i, 8), tile(%j, 5)] pad=3.0 : tile<8x5xf32>
  %y = transpose %x perm=(1, 0) : tile<5x8xf32>
  store %t[tile(%j, 5), tile(%i, 8)], %y
  %n = size {N} : i32
  %m = size {cdiv(M, 5)} : i32
  %np = num_programs 1 : i32
  %same = eq %m, %np : bool
  assert %same message="the grid"
  %nf = cast %n : f32
  %ns = broadcast %nf dims=() : tile<8x5xf32>
  %z = mul %x, %ns : tile<8x5xf32>
  store %o[tile(%i, 8), tile(%j, 5)], %z
  %first = eq %j, %c0 : bool
  if %first {
    %r0 = mul %i, %c8 : i32
    %rows = load %at[%r0:+8] pad=-1 : tile<8xi32>
    %zero = full 0.0 : tile<8xf32>
    %c1 = full 1 : i32
    %sum = for %k in %c0..%m step %c1 carry (%acc = %zero) {
      %k5 = mul %k, %c5 : i32
      %b = load %a[take(%rows), %k5:+5] pad=1.0 : tile<8x5xf32>
      %bs = reduce sum %b axes=(1) : tile<8xf32>
      %next = add %acc, %bs : tile<8xf32>
      yield %next
    }
    %three = broadcast %sum dims=(0) : tile<8x3xf32>
    store %g[tile(%i, 8), %c0:+3], %three
    %old = atomic add %s[take(%rows)], %sum : tile<8xf32>
  }
  %nib = load %q[tile(%i, 8), tile(%j, 5)] : tile<8x5xi4>
  store %p[tile(%i, 8), tile(%j, 5)], %nib
  %ones = full 1 : tile<5xi32>
  %was = atomic add %c[tile(%j, 5)], %ones : tile<5xi32>
}
"""


def kernel(n, m):
    """The kernel with the text of two sizes."""
    text = KERNEL
    for fn in ("cdiv(N, 8)", "cdiv(M, 5)"):
        text = text.replace(
            f"{{{fn}}}", str(ir.parse_size(fn.replace("N", f"({n})").replace("M", f"({m})"))).join("{}")
        )
    text = text.replace("{N}", f"{{{n}}}").replace("{M}", f"{{{m}}}")
    k = ir.parse_kernel(text)
    ir.verify(k)
    return passes.run_pipeline(k, passes.TILE)


def arrays(n, m):
    rng = np.random.default_rng(n * 100 + m)
    at = rng.integers(-1, n + 1, n).astype("i")
    return [rng.integers(-4, 5, (n, m)).astype("f"), rng.integers(-8, 8, (n, m)).astype(ir.DTYPES["int4"].numpy), at]


@pytest.fixture(scope="module")
def images():
    kernels = {"any": kernel("n", "m"), "even": kernel("8*n", "5*m"), "square": kernel("n", "n")}
    return {name: (k, compile_kernel(k)) for name, k in kernels.items()}


@pytest.mark.parametrize("n", [1, 7, 8, 16, 33])
@pytest.mark.parametrize("m", [1, 5, 13, 20])
def test_native_is_the_interpreter_and_the_static_code(images, n, m):
    values = arrays(n, m)
    k, _ = images["any"]
    fixed = ir.concrete(k, {"n": n, "m": m})
    want = interpret(k, values, check=False)
    static = run_artifact(compile_kernel(passes.run_pipeline(fixed, passes.TILE)), fixed, values)
    names = ["any", *["even"] * (n % 8 == 0 and m % 5 == 0), *["square"] * (n == m)]
    for name in names:
        for x, y, z in zip(run_artifact(images[name][1], images[name][0], values), want, static, strict=True):
            np.testing.assert_array_equal(x.astype("f"), y.astype("f"))
            np.testing.assert_array_equal(x.astype("f"), z.astype("f"))


def test_multiples_have_no_checks(images):
    accesses = [
        line for line in ir.print_kernel(images["even"][0]).splitlines() if " load " in line or "store " in line
    ]
    assert [("checked=false" in line, "take" in line) for line in accesses] == [(True, False)] * 4 + [
        (False, True), (True, False), (True, False), (True, False),
    ]  # fmt: skip
    assert "checked=false" not in ir.print_kernel(images["any"][0])


def test_many_threads(images):
    k, artifact = images["any"]
    artifact = dataclasses.replace(artifact, launch=artifact.launch | {"cost": 1_000_000})
    values = arrays(64, 50)
    for x, y in zip(run_artifact(artifact, k, values, threads=4), interpret(k, values, check=False), strict=True):
        np.testing.assert_array_equal(x.astype("f"), y.astype("f"))


def test_sizes_that_do_not_fit_are_refused(images):
    _, artifact = images["even"]
    launch = {n: artifact.launch[n] for n in ("programs", "workspace", "isa", "sites", "name", "dims")}
    loaded = LoadedImage(artifact.image, **launch)
    shapes = [(8, 5), (8, 5), (8,), (8, 5), (5, 8), (8,), (8, 5), (8, 3), (5,)]
    at = lambda **changes: [np.zeros(changes.get(f"x{k}", s), "f") for k, s in enumerate(shapes)]
    with pytest.raises(FfiError, match="axis 0 of operand 0 has 12 elements; it was compiled for a multiple of 8"):
        loaded.run(at(x0=(12, 5)))
    with pytest.raises(FfiError, match=r"axis 1 of operand 1 has 10 elements.*the same as another dimension, 5"):
        loaded.run(at(x1=(8, 10)))
    with pytest.raises(FfiError, match="axis 0 of operand 0 has 0 elements"):
        loaded.run(at(x0=(0, 5)))
    with pytest.raises(FfiError, match="is damaged"):
        LoadedImage(artifact.image, **(launch | {"dims": [0, 0, 99, 1]}))
    fixed = compile_kernel(ir.parse_kernel("kernel @k(%a: ref<4xf32>) grid(1) {\n}"))
    with pytest.raises(FfiError, match="does not compute a grid"):
        LoadedImage(fixed.image, **(launch | {"dims": [0, 0, 0, 1]}))


@pytest.mark.parametrize("grid", ["n - 5", "n*n*n*n*n*n*n*n*n*n*n*n", "n*100000000"])
def test_grids_that_cannot_be(grid):
    k = ir.parse_kernel(f"kernel @k(%a: ref<{{n}}xf32>) grid({{{grid}}}) {{\n}}")
    artifact = compile_kernel(k)
    with pytest.raises(FfiError, match="axis 0 of its grid has"):
        run_artifact(
            artifact,
            ir.parse_kernel("kernel @k(%a: ref<{n}xf32>) grid(1) {\n}"),
            [np.zeros(4 if "5" in grid else 60, "f")],
        )


def generalised(kernel: ir.Kernel) -> ir.Kernel:
    """The same kernel for any sizes of its inputs; outputs have the sizes of inputs where they agree."""
    names = {n: f"n{n}" for v in kernel.inputs for n in v.shape if n}
    env = {}
    for v in kernel.params:
        open_ = v.type.role != "scratch"
        shape = tuple(ir.symbol(names[n]) if open_ and n in names else n for n in v.shape)
        env[v] = ir.Value(dataclasses.replace(v.type, shape=shape), v.name)
    body = ir.copy_block(kernel.body, lambda v: env.get(v, v))
    return dataclasses.replace(kernel, params=tuple(env.values()), body=body)


@draws(8)
@given(kernels())
def test_random_kernels(case: Case):
    k = generalised(case.kernel)
    ir.verify(k)
    got = run_native(passes.run_pipeline(k, passes.TILE), case.inputs)
    want = run_native(passes.run_pipeline(case.kernel, passes.TILE), case.inputs)
    for v, x, y in zip(case.kernel.outputs, got, want, strict=True):
        same = x.reshape(-1).view(np.uint8) == y.reshape(-1).view(np.uint8)
        assert same.all(), f"{v!r}: {(~same).sum()} bytes differ"


def test_private_memory_of_dynamic_size_is_refused():
    k = ir.parse_kernel("kernel @k(%a: ref<{n}xf32>, %s: ref<{n}xf32, scratch>) grid(1) {\n}")
    with pytest.raises(UnsupportedError, match="no memory of dynamic size"):
        compile_kernel(k)


def test_too_many_sizes_are_refused():
    params = ", ".join(f"%a{k}: ref<{{n{k}}}xf32>" for k in range(65))
    with pytest.raises(UnsupportedError, match="has 65 dynamic sizes"):
        compile_kernel(ir.parse_kernel(f"kernel @k({params}) grid(1) {{\n}}"))
