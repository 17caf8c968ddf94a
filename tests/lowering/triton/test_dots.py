"""Matrix products as TTIR: evaluated against the interpreter, and the instructions that they become."""

from __future__ import annotations

import numpy as np
import pytest
from device import run_device
from draws import thorough
from machines import card
from ttir import run_ttir

from jtile import ir
from jtile.errors import UnsupportedError
from jtile.interpret import interpret
from jtile.lowering.triton import versions
from jtile.lowering.triton.compile import compile_kernel
from jtile.testing import relative_error


def kernel(arrays: dict[str, tuple[tuple[int, ...], str]], line: str, out: tuple[tuple[int, ...], str]) -> ir.Kernel:
    """Load whole arrays, run one line that makes %d of them, store it."""
    spell = lambda shape, dt: "x".join([*map(str, shape), dt])
    at = lambda shape: ", ".join(f"tile(%z, {n})" for n in shape)
    refs = [f"%r{k}: ref<{spell(*a)}>" for k, a in arrays.items()] + [f"%o: ref<{spell(*out)}, out>"]
    loads = [f"%{k} = load %r{k}[{at(s)}] : tile<{spell(s, d)}>" for k, (s, d) in arrays.items()]
    body = ["%z = full 0 : i32", *loads, f"%d = {line} : tile<{spell(*out)}>", f"store %o[{at(out[0])}], %d"]
    return ir.parse_kernel(f"kernel @d({', '.join(refs)}) grid(1) {{\n  " + "\n  ".join(body) + "\n}")


def dot(m, n, k, a, b, out, *, batch=(), trans=(False, False), acc=True, precision="default") -> ir.Kernel:
    arrays = {
        "a": ((*batch, *((k, m) if trans[0] else (m, k))), a),
        "b": ((*batch, *((n, k) if trans[1] else (k, n))), b),
    }
    arrays |= {"c": ((*batch, m, n), out)} if acc else {}
    flags = "".join([" acc=%c" * acc, " trans_a=true" * trans[0], " trans_b=true" * trans[1]])
    return kernel(arrays, f'dot %a, %b{flags} precision="{precision}"', ((*batch, m, n), out))


def numbers(k: ir.Kernel, seed: int = 0) -> list[np.ndarray]:
    rng, out = np.random.default_rng(seed), []
    for v in k.inputs:
        info = v.type.info
        if info.kind == "f":
            x = rng.standard_normal(v.shape)
            out.append((np.exp2(rng.integers(-3, 4, v.shape)) if v.dtype == "float8_e8m0fnu" else x).astype(info.numpy))
        else:
            least = -(2 ** (info.bits - 1)) if info.kind == "i" else 0
            out.append(rng.integers(least, least + 2**info.bits - 1, v.shape, info.numpy, endpoint=True)
                       if info.bits >= 8 else (rng.integers(0, 16, v.shape) + least).astype(info.numpy))  # fmt: skip
    return out


def check(k: ir.Kernel, arch: str = "sm_90", tolerance: float = 1e-6, run=run_ttir) -> None:
    inputs = numbers(k)
    if run is not run_ttir:  # mma.sync saturates where a sum of bytes leaves 32 bits
        inputs = [x >> 3 if x.dtype == np.int32 else x for x in inputs]
    (got,), (want,) = run(k, inputs, arch), interpret(k, inputs)
    if want.dtype.kind in "iu":
        np.testing.assert_array_equal(got, want)
    else:
        assert relative_error(got, want) <= tolerance


FLOATS = ["f16", "bf16", "f32", "f8e4m3fn", "f8e5m2", "f8e8m0fnu", "f4e2m1fn"]
INTS = ["i4", "u4", "i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64"]


def some(cases: list, turn: int) -> list:
    """All of some cases that know nothing of what `turn` counts, or one of them in turn outside of `make test-all`."""
    return cases if thorough() else [cases[turn % len(cases)]]


@pytest.mark.parametrize("a", FLOATS)
def test_every_pair_of_floats(a, garbage):
    for turn, b in enumerate(FLOATS):
        for arch in some(["sm_80", "sm_90", "gfx942"], turn + FLOATS.index(a)):
            check(dot(5, 9, 7, a, b, "f32"), arch)
    check(dot(5, 9, 7, a, "f64", "f64"))


@pytest.mark.parametrize("a", INTS)
def test_every_pair_of_integers_wraps(a, garbage):
    for turn, b in enumerate(INTS):
        out = "i64" if "64" in a + b else "i32"
        for arch in some(["sm_75", "sm_90", "gfx1100"], turn + INTS.index(a)):
            check(dot(4, 8, 6, a, b, out), arch)


@pytest.mark.parametrize("trans", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("sides", [(1, 1, 1), (1, 24, 40), (17, 1, 5), (3, 7, 1), (16, 16, 16), (33, 20, 50)])
def test_sizes_layouts_and_batches(sides, trans, garbage):
    kinds = [("bf16", "bf16", "f32", True), ("u8", "i8", "i32", False), ("i32", "i32", "i32", True)]
    for turn, batch in enumerate(((), (1,), (3,), (2, 3))):
        for a, b, out, acc in some(kinds, turn + sum(sides) + trans[0]):
            check(dot(*sides, a, b, out, batch=batch, trans=trans, acc=acc), "gfx942" if a == "i32" else "sm_90")


def test_large_integer_products_go_in_parts(garbage):
    check(dot(32, 64, 100, "i32", "i16", "i32", trans=(True, False)), "gfx942")
    check(dot(32, 64, 100, "i64", "i64", "i64", trans=(True, True)), "gfx942")


def test_parts_of_a_transposed_operand_compile_for_amd():
    """It took 32 s, and a thread spilled 4052 bytes; with triton 3.6, whose layouts differ, it still does."""
    check(k := dot(32, 64, 64, "i32", "i32", "i32", trans=(False, True), acc=False), "gfx942")
    if versions.version() >= (3, 9):
        assert compile_kernel(k, card("gfx942"), texts=True).launch["resources"]["spills"] < 1000


def test_exact_where_both_have_few_bits():
    """bfloat16 by float16 goes through tf32, which holds both."""
    check(dot(16, 16, 16, "bf16", "f16", "f32"), tolerance=1e-7)


SCALED = [
    # (m, n, k), dtypes of a, its scales, b, its scales, numbers of scales along k
    ((32, 32, 64), "f8e4m3fn", "f8e8m0fnu", "f8e4m3fn", "f8e8m0fnu", (2, 2)),
    ((32, 64, 128), "f4e2m1fn", "f8e8m0fnu", "f8e5m2", "f8e8m0fnu", (4, 4)),
    ((32, 32, 64), "f4e2m1fn", "f8e8m0fnu", "f4e2m1fn", "f8e8m0fnu", (2, 2)),
    ((5, 9, 96), "f8e4m3fn", "f8e8m0fnu", "f4e2m1fn", "f8e8m0fnu", (3, 2)),
    ((5, 9, 64), "f8e4m3fn", "f32", "f8e4m3fn", "f32", (1, 1)),
    ((5, 9, 64), "f8e4m3fn", "f32", "f8e4m3fn", "f32", (4, 2)),
    ((1, 9, 30), "bf16", None, "i4", "f16", (1, 3)),
    ((1, 9, 30), "bf16", None, "f4e2m1fn", "f8e8m0fnu", (1, 5)),
    ((6, 9, 30), "f16", None, "i8", "bf16", (1, 1)),
    ((6, 9, 32), "f32", "f8e8m0fnu", "f16", None, (4, 1)),
    ((6, 9, 32), "f64", None, "i32", None, (1, 1)),
]


def scaled(case) -> ir.Kernel:
    (m, n, k), a, sa, b, sb, blocks = case
    arrays = {"a": ((m, k), a), "b": ((k, n), b), "c": ((m, n), "f32")}
    arrays |= {"s": ((m, blocks[0]), sa)} if sa else {}
    arrays |= {"t": ((blocks[1], n), sb)} if sb else {}
    line = "dot_scaled %a, %b" + " sa=%s" * bool(sa) + " sb=%t" * bool(sb) + " acc=%c"
    return kernel(arrays, line, ((m, n), "f32"))


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("case", SCALED, ids=lambda c: "-".join(map(str, c)))
def test_block_scaled_products(case, arch, garbage):
    check(scaled(case), arch)


# ---- on the device --------------------------------------------------------------------------------------------------


def narrow(k: int, a: str, b: str) -> ir.Kernel:
    """A product of an operand that was loaded with narrower elements and made wider."""
    out = "f64" if b == "f64" else "f32"
    return ir.parse_kernel(f"""kernel @d(%x: ref<5x{k}x{a}>, %y: ref<{k}x6x{b}>, %o: ref<5x6x{out}, out>) {{
      %z = full 0 : i32
      %u = load %x[tile(%z, 5), tile(%z, {k})] : tile<5x{k}x{a}>
      %v = load %y[tile(%z, {k}), tile(%z, 6)] : tile<{k}x6x{b}>
      %w = cast %u : tile<5x{k}x{b}>
      %d = dot %w, %v : tile<5x6x{out}>
      store %o[tile(%z, 5), tile(%z, 6)], %d
    }}""")


ON_DEVICE = [
    *(dot(24, 40, 48, a, b, "f32") for a in FLOATS for b in FLOATS),
    *(dot(64, 64, 64, a, a, "f32", trans=t) for a in FLOATS for t in ((False, False), (True, True), (False, True))),
    *(dot(24, 40, 48, a, b, "i32") for a in INTS[:8] for b in ("i4", "u8", "i32")),
    *(dot(64, 64, 96, a, b, "i32", trans=(False, True)) for a in ("i8", "u8") for b in ("i8", "u8")),
    *(dot(5, 9, 33, a, "i64", "i64") for a in INTS),
    *(dot(*s, a, a, "f64" if a == "f64" else "f32", batch=b)
      for s in ((1, 64, 128), (64, 1, 33), (16, 16, 1), (2, 8, 4), (128, 64, 20), (64, 64, 64))
      for a in ("bf16", "f32", "f64") for b in ((), (3,))),
    *(dot(128, 128, 64, a, a, "f64" if a == "f64" else "f32") for a in ("bf16", "f32", "f64")),
    *(narrow(k, a, b) for a in ("i8", "f16", "f8e4m3fn") for b in ("f32", "f64", "bf16") for k in (2, 8, 17)),
    *(dot(64, 64, 64, "f32", "f32", "f32", precision=p) for p in ("high", "highest")),
    *map(scaled, SCALED),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("k", ON_DEVICE, ids=lambda k: "-".join(str(v.type) for v in (*k.inputs[:2], *k.outputs)))
def test_products_on_the_device(k, garbage):
    """fp8 sums are short on Hopper: 14 bits between two promotions to float32."""
    narrow = all(v.dtype in ("float8_e4m3fn", "float8_e5m2") for v in k.inputs[:2])
    check(k, tolerance=3e-4 if narrow else 2e-6, run=lambda k, inputs, _: run_device(k, inputs))


@pytest.mark.parametrize("arch", ["gfx942", "gfx1100"])
@pytest.mark.parametrize("sizes", [(4, 64, 32), (64, 2, 20), (3, 5, 7), (8, 9, 33)], ids=str)
@pytest.mark.parametrize(("a", "out"), [("bf16", "f32"), ("f32", "f32"), ("i8", "i32"), ("u8", "i32")])
def test_sides_shorter_than_the_units_of_amd(arch, sizes, a, out, garbage):
    for batch, acc, trans in (((), True, (False, True)), ((3,), False, (True, False))):
        check(dot(*sizes, a, a, out, batch=batch, acc=acc, trans=trans), arch)


def test_the_zeros_beside_short_sides_meet_no_infinity(garbage):
    k = dot(4, 4, 16, "bf16", "bf16", "f32", acc=False)
    a, b = numbers(k)
    a[0, 0], b[1, 1] = np.inf, np.nan
    (got,), (want,) = run_ttir(k, [a, b], "gfx942"), interpret(k, [a, b])
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
    assert np.isfinite(got).sum() == 9


# ---- instructions ---------------------------------------------------------------------------------------------------

INSTRUCTIONS = [
    ("sm_90", dot(64, 64, 64, "bf16", "bf16", "f32"), "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"),
    ("sm_90", dot(64, 64, 64, "f8e4m3fn", "f8e5m2", "f32", trans=(False, True)), "m64n64k32.f32.e4m3.e5m2"),
    ("sm_90", dot(64, 64, 32, "f32", "f32", "f32"), "m64n64k8.f32.tf32.tf32"),
    ("sm_90", dot(64, 64, 16, "f32", "f32", "f32", precision="highest"), "fma.rn.f32"),
    ("sm_90", dot(1, 64, 64, "bf16", "bf16", "f32"), "fma.rn.f32"),
    ("sm_80", dot(64, 64, 32, "f8e4m3fn", "f8e4m3fn", "f32"), "m16n8k16.row.col.f32.f16.f16.f32"),
    ("sm_80", dot(16, 8, 5, "u8", "i8", "i32"), "m16n8k32.row.col.satfinite.s32.s8.s8.s32"),
    ("sm_80", dot(16, 16, 3, "f64", "f64", "f64"), "m8n8k4.row.col.f64"),
    ("sm_100", dot(128, 64, 64, "f16", "f16", "f32"), "tcgen05.mma"),
    ("gfx942", dot(64, 64, 64, "bf16", "bf16", "f32"), "v_mfma_f32_32x32x8_bf16"),
    ("gfx942", dot(64, 64, 32, "i8", "u8", "i32"), "v_mfma_i32"),
    ("gfx1100", dot(64, 64, 64, "f16", "f16", "f32"), "v_wmma_f32_16x16x16_f16"),
    *(
        pytest.param(arch, dot(m, n, 32, a, a, out), f"v_{unit}_{out}_16x16x", marks=[pytest.mark.slow] * (k % 3 != s))
        for s, (m, n) in enumerate([(4, 64), (64, 2), (3, 5)])
        for k, (arch, a, out, unit) in enumerate([
            ("gfx90a", "f16", "f32", "mfma"), ("gfx942", "bf16", "f32", "mfma"), ("gfx942", "f32", "f32", "mfma"),
            ("gfx950", "i8", "i32", "mfma"), ("gfx1100", "bf16", "f32", "wmma"), ("gfx1201", "i8", "i32", "wmma"),
        ])
    ),
]  # fmt: skip


def test_fast_products_keep_their_sums_in_the_tensor_cores():
    products = lambda p, kind, k: dot(64, 64, k, kind, kind, "f32", trans=(False, True), precision=p)
    ptx = lambda p, kind, k: compile_kernel(products(p, kind, k), card("sm_90"), texts=True).texts["ptx"]
    assert ptx("fast", "f8e4m3fn", 256).count("add.f32") == 0 < ptx("default", "f8e4m3fn", 256).count("add.f32")
    terms = [ptx(p, "f32", 64).count("m64n64k8.f32.tf32.tf32") for p in ("fast", "default")]
    assert terms[1] == 3 * terms[0] > 0


@pytest.mark.parametrize(("arch", "k", "instruction"), INSTRUCTIONS, ids=lambda x: x if isinstance(x, str) else "")
def test_matrix_instructions(arch, k, instruction):
    texts = compile_kernel(k, card(arch), texts=True).texts
    assert instruction in (texts.get("ptx") or texts["amdgcn"])


def test_a_box_whose_single_sides_stand_between_others_compiles():
    """Rows of one head of [batch, row, head, column], which may hang over: triton drops leading sides of 1 only."""
    text = """kernel @heads(%q: ref<2x60x3x64xbf16>, %k: ref<2x60x3x64xbf16>, %o: ref<2x64x64xf32, out>) grid(2) {
  %b = program_id 0
  %0 = full 0 : i32
  %1 = full 1 : i32
  %z = full 0.0 : tile<64x64xf32>
  %r = for %h in %0..%b step %1 carry (%acc = %z) {
    %x = load %q[%b, tile(%0, 64), %h, tile(%0, 64)] : tile<64x64xbf16>
    %y = load %k[%b, tile(%0, 64), %h, tile(%0, 64)] : tile<64x64xbf16>
    %d = dot %x, %y acc=%acc trans_b=true : tile<64x64xf32>
    yield %d
  }
  store %o[%b, tile(%0, 64), tile(%0, 64)], %r
}"""
    k = ir.parse_kernel(text)
    check(k)
    assert compile_kernel(k, card("sm_90")).image


def test_a_product_that_no_registers_hold():
    """It compiled for minutes, once for each number of stages."""
    with pytest.raises(UnsupportedError, match="products of at most 262144 elements, and this one has 524288"):
        compile_kernel(dot(1024, 500, 64, "bf16", "bf16", "f32", acc=False), card("sm_90"))


def test_operands_that_no_shared_memory_holds():
    """The compiler took half an hour of ptxas to find that out."""
    with pytest.raises(UnsupportedError, match=r"166912 bytes of shared memory for operands .* takes 524288: sum"):
        compile_kernel(dot(512, 512, 512, "bf16", "bf16", "f32", acc=False), card("sm_80"))


def of_reshaped(dtype: str, side: int, left: bool) -> ir.Kernel:
    """A product of 64 x 64 matrices; one was loaded with a last axis of `side` elements."""
    wide, out = f"64x{64 // side}x{side}x{dtype}", "i32" if dtype[0] in "iu" else "f32"
    at = f"tile(%z, 64), tile(%z, {64 // side}), tile(%z, {side})"
    sides = ("%w", "%s") if left else ("%s", "%w")
    return ir.parse_kernel(f"""kernel @d(%x: ref<{wide}>, %y: ref<64x64x{dtype}>, %o: ref<64x64x{out}, out>) grid(1) {{
      %z = full 0 : i32
      %v = load %x[{at}] : tile<{wide}>
      %w = reshape %v : tile<64x64x{dtype}>
      %s = load %y[tile(%z, 64), tile(%z, 64)] : tile<64x64x{dtype}>
      %d = dot {", ".join(sides)} precision="default" : tile<64x64x{out}>
      store %o[tile(%z, 64), tile(%z, 64)], %d
    }}""")


SHORT = [(dtype, side, left) for dtype in ("bf16", "i8") for side in (2, 4) for left in (False, True)]
NARROW_INTS = [(a, b) for a in ("i4", "u4", "i8", "u8") for b in ("i4", "u4", "i8", "u8")]


@pytest.mark.parametrize(("dtype", "side", "left"), SHORT)
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_operands_with_a_short_last_axis_compile(dtype, side, left, arch):
    """Triton 3.6 fails on those of bf16, triton 3.9 on bytes, where nothing stands between reshape and product."""
    k = of_reshaped(dtype, side, left)
    if thorough() or (arch == "sm_90") == ((side == 2) == left):
        assert compile_kernel(k, card(arch)).image
    check(k, arch)


@pytest.mark.parametrize(
    ("a", "b"),
    [pytest.param(a, b, marks=[pytest.mark.slow] * ((a, b) in (("i4", "u4"), ("u4", "i4"), ("i8", "i4"))))
     for a in ("i4", "u4", "i8") for b in ("i4", "u4")],
)  # fmt: skip
def test_halves_of_bytes_in_wgmma(a, b):
    artifact = compile_kernel(dot(64, 64, 64, a, b, "i32", acc=False), card("sm_90"), texts=True)
    assert "IGMMA" in artifact.texts["sass"]


@pytest.mark.gpu
@pytest.mark.parametrize(("a", "b"), NARROW_INTS)
def test_narrow_integers_in_large_tiles_on_a_gpu(a, b):
    for m, n, k in ((64, 64, 64), (128, 16, 96), (100, 70, 130)):
        check(dot(m, n, k, a, b, "i32", trans=(n == 16, n == 70)), run=lambda k, inputs, _: run_device(k, inputs))


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "side", "left"), SHORT)
def test_operands_with_a_short_last_axis_on_a_gpu(dtype, side, left):
    check(of_reshaped(dtype, side, left), tolerance=2e-6, run=lambda k, inputs, _: run_device(k, inputs))
