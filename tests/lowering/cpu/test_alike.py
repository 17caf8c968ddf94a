"""What all programs of a row of the grid compute alike, a worker on a CPU computes once; results are the same bits
wherever a program runs, and nothing stays from one call to the next."""

from __future__ import annotations

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile import ir
from jtile.ffi import FfiError, run_image
from jtile.interpret import interpret
from jtile.lowering.cpu import compile_kernel
from jtile.lowering.cpu.alike import alike
from jtile.lowering.cpu.isa import ISAS
from jtile.passes import TILE, run_pipeline

LAUNCH = ("programs", "workspace", "isa", "sites", "name")
ROWS, COLUMNS, WIDE = 3, 5, 320
T, Y = f"tile<2x{WIDE}xf32>", "tile<2x16xf32>"
HEAD = f"""%i = program_id 0 : i32   %j = program_id 1 : i32   %c0 = full 0 : i32   %e = full 0.00390625 : tile<2xf32>
    %x0 = load %x[tile(%i, 2), tile(%c0, {WIDE})] : {T}
    %y0 = load %y[tile(%i, 2), tile(%j, 16)] : {Y}
    """
SUM = "%sq = mul %x0, %x0 : T   %s = reduce sum %sq axes=(1) : tile<2xf32>   %t = mul %s, %e : tile<2xf32>   "
OUT = f"%w = broadcast %t dims=(0) : {Y}   %z = mul %w, %y0 : {Y}   store %o[tile(%i, 2), tile(%j, 16)], %z"
# Bodies behind `HEAD`, and how many values are kept.
CASES = {
    "a sum": (SUM + OUT, 1),
    "a sum of another sum": (
        SUM + "%b = broadcast %t dims=(0) : T   %d = sub %x0, %b : T   %d2 = abs %d : T   "
        "%s2 = reduce max %d2 axes=(1) : tile<2xf32>   "
        + OUT.replace("broadcast %t", "broadcast %s2"), 1,
    ),
    "both": (
        SUM + f"%m = reduce max %x0 axes=(1) : tile<2xf32>   %v = broadcast %m dims=(0) : {Y}   "
        + OUT.replace("%z = mul %w, %y0", f"%z0 = mul %w, %v : {Y}   %z = mul %z0, %y0"), 2,
    ),
    "in a branch": (
        SUM + f"%k = eq %j, %c0 : bool   %w = broadcast %t dims=(0) : {Y}   "
        f"%z = if %k {{\n %z1 = mul %w, %y0 : {Y}\n yield %z1\n }} else {{\n yield %y0\n }}\n"
        "store %o[tile(%i, 2), tile(%j, 16)], %z", 1,
    ),
    "by its place": (
        f"%jf = cast %j : f32   %jb = broadcast %jf dims=() : {T}   %xj = add %x0, %jb : {T}   "
        + SUM.replace("mul %x0, %x0", "mul %xj, %xj") + OUT, 0,
    ),
    "a few numbers": (
        "%n = slice %x0 starts=(0, 0) stops=(2, 8) strides=(1, 1) : tile<2x8xf32>   "
        "%s = reduce sum %n axes=(1) : tile<2xf32>   "
        "%t = mul %s, %e : tile<2xf32>   " + OUT, 0,
    ),
}  # fmt: skip


def kernel_of(body: str, grid=(ROWS, COLUMNS), alias=""):
    x, y = f"ref<{2 * ROWS}x{WIDE}xf32", f"ref<{2 * ROWS}x{16 * COLUMNS}xf32"
    head = f"kernel @k(%x: {x}>, %y: {y}>, %o: {y}, out>) grid({', '.join(map(str, grid))}){alias}"
    return run_pipeline(ir.parse_kernel(f"{head} {{\n{(HEAD + body).replace(': T ', f': {T} ')}\n}}"), TILE)


def arrays(seed=0):
    draw = np.random.default_rng(seed).normal
    return draw(size=(2 * ROWS, WIDE)).astype(np.float32), draw(size=(2 * ROWS, 16 * COLUMNS)).astype(np.float32)


def run(art, x, y, threads=1):
    out = np.full_like(y, 7)
    run_image(art.image, [x, y, out], **{k: art.launch[k] for k in LAUNCH}, threads=threads)
    return out


@pytest.mark.parametrize("isa", [None, "avx2", "sse2"])
@pytest.mark.parametrize("case", list(CASES))
def test_computed_once(case, isa):
    body, kept = CASES[case]
    kernel = kernel_of(body)
    found = alike(kernel)
    assert (len(found.values) if found else 0) == kept
    art = compile_kernel(kernel, ISAS[isa] if isa else None, texts=True, coarse=False)
    assert ("@jtile_entry_keeping(" in art.texts["llvm"]) == bool(kept)
    for seed in range(2):  # the second call finds the workspace of the first
        x, y = arrays(seed)
        want = interpret(kernel, [x, y])[0]
        one = run(art, x, y)
        np.testing.assert_allclose(one, want, rtol=2e-6)
        for _ in range(5):
            np.testing.assert_array_equal(run(art, x, y, threads=4), one)


@pytest.mark.parametrize(
    ("grid", "alias"), [((ROWS, 1), ""), ((1, 1), ""), ((ROWS, COLUMNS), " alias(%y = %o)")], ids=str
)
def test_not_alike(grid, alias):
    """One program a row keeps nothing for others, and what the kernel writes over is not the same in all programs."""
    body = SUM + OUT if not alias else SUM.replace("%x0", "%y1").replace(": T ", f": tile<2x{16 * COLUMNS}xf32> ") + OUT
    read = f"%y1 = load %y[tile(%i, 2), tile(%c0, {16 * COLUMNS})] : tile<2x{16 * COLUMNS}xf32>   "
    assert alike(kernel_of(read + body if alias else body, grid, alias)) is None


def test_sizes_that_are_not_known():
    """The rows of the grid, and how long they are, come with the call."""

    @jt.kernel(out_type=lambda x, y: jt.like(y), grid=lambda x, y: (jt.cdiv(y.shape[0], 2), jt.cdiv(y.shape[1], 16)))
    def scaled(x, y, o):
        i, j = jt.program_id(0), jt.program_id(1)
        X = x.tiles(2, WIDE)[i, 0]
        o.tiles(2, 16)[i, j] = y.tiles(2, 16)[i, j] * (X * X).sum(1, keepdims=True)

    m, n = jax.export.symbolic_shape("m, n")
    exported = jax.export.export(jax.jit(scaled), disabled_checks=jt.export_checks())
    shapes = jax.ShapeDtypeStruct((m, WIDE), jnp.float32), jax.ShapeDtypeStruct((m, n), jnp.float32)
    for m in (1, 6):
        x, y = (jnp.asarray(a[:m]) for a in arrays(m))
        np.testing.assert_array_equal(exported(*shapes).call(x, y), scaled(x, y))


def test_the_memory_is_there():
    art = compile_kernel(kernel_of(CASES["a sum"][0]), coarse=False)
    x, y = arrays()
    launch = {k: art.launch[k] for k in LAUNCH} | {"workspace": 0}
    with pytest.raises(FfiError, match="it keeps values in a workspace of 0 bytes"):
        run_image(art.image, [x, y, y.copy()], **launch)


def test_tasks_of_a_graph():
    """Bands of several tasks have one workspace a thread."""

    @jt.kernel(out_type=lambda x, y: jt.like(y), grid=(COLUMNS,))
    def scaled(x, y, o):
        j = jt.program_id(0)
        o.tiles(2 * ROWS, 16)[0, j] = y.tiles(2 * ROWS, 16)[0, j] * (x[...] * x[...]).sum(1, keepdims=True)

    x, y = map(jnp.asarray, arrays())
    assert "keeping" in scaled.lower(x, y, target="cpu").texts["llvm"]
    both = lambda x, y: (scaled(x, y), scaled(x + 1, y), scaled(x * 2, y))
    for run in (jt.graph(both, cores=2), jax.jit(both)):
        for got, of in zip(run(x, y), (x, x + 1, x * 2), strict=True):
            np.testing.assert_allclose(got, y * (of * of).sum(1, keepdims=True), rtol=1e-5)
