"""Block-scaled products of integers: every source of B, number of rows and instruction set against NumPy in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fenced import Fenced

import jtile as jt
from jtile.ffi import run_image
from jtile.lowering.cpu.isa import host_isa
from jtile.testing import relative_error

pytestmark = pytest.mark.cpu


def codes_of(b, r, rows: int, nibbles: bool):
    """The codes of a tile of B, one a byte: [rows, k]."""
    tile = b.tiles(rows, b.shape[1])[r, 0]
    if b.dtype == "int32":
        return codes_of_panels(tile, rows, nibbles)
    if not nibbles:
        return tile
    wide = (rows, b.shape[1] // 16, 2, 16)
    pairs = jnp.broadcast_to(tile.reshape(rows, wide[1], 1, 16), wide)
    shift = jax.lax.broadcasted_iota(jnp.uint8, wide, 2) * np.uint8(4)
    return ((pairs >> shift) & np.uint8(15)).reshape(rows, -1)


def codes_of_panels(tile, rows: int, nibbles: bool):
    """The codes of words int32 [rows, words of a row], which stand as [words of a row, 16] in panels of 16 rows."""
    words = tile.shape[1]
    wide = (rows // 16, words // 4, 2, 4, 16, 4) if nibbles else (rows // 16, words, 16, 4)
    place = lambda axis: jax.lax.broadcasted_iota(jnp.int32, wide, axis)
    at = place(2) * 4 + place(5) * 8 if nibbles else place(3) * 8
    one = tile.reshape(wide[0], words // 4, 1, 4, 16, 1) if nibbles else tile.reshape(*wide[:3], 1)
    field = jnp.broadcast_to(one, wide) >> at
    if nibbles:
        return (field & 15).astype(jnp.uint8).transpose(0, 4, 1, 2, 3, 5).reshape(rows, 8 * words)
    return field.astype(jnp.int8).transpose(0, 2, 1, 3).reshape(rows, 4 * words)


def numbers_of(x, r, rows: int, panels: bool):
    """A tile [rows, groups] of scales or lows."""
    tile = x.tiles(rows, x.shape[1])[r, 0]
    return tile.reshape(rows // 16, -1, 16).transpose(0, 2, 1).reshape(tile.shape) if panels else tile


def in_panels(x):
    """Rows of bytes as words in panels, and rows of floats in panels."""
    if x is None:
        return None
    rows = np.asarray(x).view(np.int32) if x.dtype in (np.int8, np.uint8) else np.asarray(x)
    return np.ascontiguousarray(rows.reshape(len(x) // 16, 16, -1).swapaxes(1, 2)).reshape(rows.shape)


@jt.kernel(
    out_type=lambda a, sa, b, sb, *_, **__: jax.ShapeDtypeStruct((a.shape[0], b.shape[0]), jnp.float32),
    grid=lambda a, sa, b, sb, *_, rows, **__: jt.cdiv(b.shape[0], rows),
)
def scaled(a, sa, b, sb, sums, low, y, *, rows: int, nibbles: bool, acc: bool, panels: bool = False):
    """A Bᵀ of scaled blocks, plus sums . lowᵀ if there are lows, plus 1 if `acc`."""
    r = jt.program_id(0)
    C, S = codes_of(b, r, rows, nibbles), numbers_of(sb, r, rows, panels)
    L = None if low is None else numbers_of(low, r, rows, panels).astype(jnp.float32)
    X = None if low is None else sums[...]
    one = jnp.full((a.shape[0], rows), 1.0, jnp.float32) if acc else None
    Y = jt.dot_scaled(a[...], sa[...], C.T, S.T, one)
    y.tiles(a.shape[0], rows)[0, r] = Y if low is None else jt.dot(X, L.T, Y)


def operands(seed: int, kind: str, m: int, n: int, blocks: int, shared: int, dtype: str, lows: bool):
    rng = np.random.default_rng(seed)
    k, groups = 32 * blocks, blocks // shared
    a = rng.integers(-32768, 32768, (m, k)).astype(np.int16)
    a[0, :3] = -32768, 32767, 32640
    shape, ends = (
        ((n, k // 2), (0, 256)) if kind == "nibbles" else ((n, k), (-128, 128) if kind == "int8" else (0, 256))
    )
    b = rng.integers(*ends, shape).astype("int8" if kind == "int8" else "uint8")
    scale = lambda *s: jnp.asarray(rng.normal(size=s), dtype)
    sa = rng.random((m, blocks), np.float32)
    extra = (rng.normal(size=(m, groups)).astype(np.float32), scale(n, groups)) if lows else (None, None)
    return a, sa, b, scale(n, groups), *extra


def expected(a, sa, b, sb, sums, low, nibbles: bool, acc: bool):
    wide = lambda x: np.asarray(x).astype(np.float64)
    if nibbles:
        halves = b.reshape(len(b), -1, 16)
        b = np.concatenate([halves & 15, halves >> 4], axis=-1).reshape(len(b), -1)
    each = b.shape[1] // sb.shape[1]
    y = (wide(a) * np.repeat(wide(sa), 32, axis=1)) @ (wide(b) * np.repeat(wide(sb), each, axis=1)).T
    return y + acc + (0 if low is None else wide(sums) @ wide(low).T)


CASES = [  # kind, m, n, rows of a program, blocks, blocks with one scale, dtype of scales, lows, acc
    ("nibbles", 1, 48, 48, 18, 1, "float16", True, False),
    ("nibbles", 3, 40, 20, 4, 2, "float32", False, True),
    ("nibbles", 8, 32, 32, 9, 1, "bfloat16", True, True),
    ("nibbles", 13, 34, 17, 10, 1, "float16", True, False),
    ("int8", 2, 33, 33, 8, 8, "float16", False, False),
    ("int8", 4, 16, 16, 3, 1, "float16", True, True),
    ("int8", 25, 20, 10, 2, 1, "bfloat16", False, False),
    ("uint8", 1, 5, 5, 1, 1, "float32", True, False),
    ("uint8", 9, 17, 17, 5, 1, "float16", False, True),
]


@pytest.mark.parametrize(
    ("case", "isa"),
    [(case, None) for case in CASES]
    + [(case, "avx512") for case in (*CASES[1:4], CASES[4], CASES[8])]
    + [(CASES[2], "avx2"), (CASES[4], "avx2")],
    ids=lambda x: "-".join(map(str, x)) if isinstance(x, tuple) else str(x),
)
def test_against_numpy(case, isa):
    kind, m, n, rows, blocks, shared, dtype, lows, acc = case
    given = operands(m, kind, m, n, blocks, shared, dtype, lows)
    meta = dict(rows=rows, nibbles=kind == "nibbles", acc=acc)
    with jt.config(isa=isa):
        got = jax.jit(lambda *x: scaled(*x, **meta))(*given)
    want = expected(*given, nibbles=kind == "nibbles", acc=acc)
    assert relative_error(got, want) < 1e-6
    if isa is None and m < 4:
        assert relative_error(scaled.interpret(*given, **meta), want) < 1e-6


@pytest.mark.parametrize(("kind", "m", "n", "rows", "blocks", "shared", "dtype", "lows", "acc"), [
    ("nibbles", 1, 96, 32, 18, 1, "float16", True, False), ("nibbles", 2, 48, 48, 3, 1, "bfloat16", False, True),
    ("nibbles", 7, 80, 48, 4, 2, "float32", True, False), ("nibbles", 12, 32, 16, 9, 1, "float16", True, False),
    ("int8", 1, 64, 16, 5, 1, "float16", False, False), ("int8", 8, 48, 32, 2, 2, "float16", True, True),
    ("int8", 33, 32, 32, 3, 1, "bfloat16", False, False),
])  # fmt: skip
@pytest.mark.parametrize("isa", [None, "avx512bf16", "avx512", "avx2"])
def test_panels_have_the_bits_of_rows(kind, m, n, rows, blocks, shared, dtype, lows, acc, isa):
    """Arrays whose 16 rows stand side by side are read as they are; in the last program rows may be missing."""
    a, sa, b, sb, sums, low = operands(m, kind, m, n, blocks, shared, dtype, lows)
    meta = dict(rows=rows, nibbles=kind == "nibbles", acc=acc)
    turned = a, sa, in_panels(b), in_panels(sb), sums, in_panels(low)
    with jt.config(isa=isa):
        got = jax.jit(lambda *x: scaled(*x, panels=True, **meta))(*turned)
        want = jax.jit(lambda *x: scaled(*x, **meta))(a, sa, b, sb, sums, low)
    np.testing.assert_array_equal(got, want)
    assert relative_error(got, expected(a, sa, b, sb, sums, low, kind == "nibbles", acc)) < 1e-6
    if isa is None and m < 4:
        assert relative_error(scaled.interpret(*turned, panels=True, **meta), got) < 1e-6


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize(("kind", "m", "isa"), [
    ("nibbles", 1, "amx"), ("nibbles", 20, "amx"), ("int8", 8, "avx512bf16"), ("int8", 20, "amx"),
    ("nibbles", 2, "avx512"), ("nibbles", 8, "amx"), ("int8", 16, "amx"),
])  # fmt: skip
def test_panels_are_read_inside_of_their_arrays(kind, m, isa, at_end):
    """A cache is asked for what lies behind them, which is no access."""
    a, sa, b, sb, sums, low = operands(m, kind, m, 80, 3, 1, "float16", True)
    given = [np.asarray(x) for x in (a, sa, in_panels(b), in_panels(sb), sums, in_panels(low))]
    meta = dict(rows=32, nibbles=kind == "nibbles", acc=False, panels=True)
    with jt.config(poison=False):  # that would be one more operand
        art = scaled.lower(*given, target=f"cpu:{isa}", **meta).artifact
    if not set(art.launch["isa"].split(":")[-1].split(",")[1:]) <= set(host_isa().features):
        pytest.skip("this machine has no such instructions")
    fenced = Fenced()
    *inputs, y = (fenced.copy(x, at_end) for x in (*given, np.full((m, 80), 7, np.float32)))
    run_image(art.image, [*inputs, y], **{k: art.launch[k] for k in ("programs", "workspace", "isa", "sites", "name")})
    assert relative_error(y, expected(a, sa, b, sb, sums, low, kind == "nibbles", False)) < 1e-6


@jt.kernel(
    out_type=lambda a, sa, b, *_, **__: jax.ShapeDtypeStruct((2, a.shape[0], b.shape[0]), jnp.float32),
    grid=lambda *_, **__: 1,
)
def scaled_and_added(a, sa, b, sb, sums, low, y, *, panels: bool, twice: bool):
    """A Bᵀ of scaled blocks, and that plus sums . lowᵀ. Lows alone are in panels; `twice`: the first one is stored."""
    rows = b.shape[0]
    Y = jt.dot_scaled(a[...], sa[...], codes_of(b, 0, rows, True).T, numbers_of(sb, 0, rows, False).T)
    y[1] = jt.dot(sums[...], numbers_of(low, 0, rows, panels).astype(jnp.float32).T, Y)
    y[0] = Y if twice else jnp.zeros_like(Y)


@pytest.mark.parametrize("twice", [False, True])
def test_panels_that_no_product_of_integers_takes(twice):
    """Lows beside scales in rows, or of a product of floats of its own, are brought to rows."""
    a, sa, b, sb, sums, low = operands(0, "nibbles", 4, 32, 3, 1, "float16", True)
    got, want = (
        scaled_and_added(a, sa, b, sb, sums, x, panels=panels, twice=twice)
        for x, panels in ((in_panels(low), True), (low, False))
    )
    np.testing.assert_array_equal(got, want)
    assert relative_error(got[1], expected(a, sa, b, sb, sums, low, True, False)) < 1e-6


@pytest.mark.parametrize("codes", [False, True])
def test_what_is_read_in_panels(codes):
    """Nothing is brought to rows where codes, scales and lows are in panels; scales may be so alone."""
    a, sa, b, sb, sums, low = operands(0, "nibbles", 1, 32, 2, 1, "float16", True)
    given = a, sa, in_panels(b) if codes else b, in_panels(sb), sums, in_panels(low)
    lowered = scaled.lower(*given, target="cpu:avx512bf16", rows=32, nibbles=True, acc=False, panels=True)
    assert f"@scaled_digits_1x16x2_{'panels_' * codes}nibbles_panels_float16_float16_1" in lowered.texts["llvm"]
    assert "scratch in all: 0 bytes" in lowered.texts["resources"]
    assert "prefetcht1" in lowered.texts["asm"]


@pytest.mark.parametrize("kind", ["nibbles", "int8"])
def test_a_row_has_the_same_bits_in_any_company(kind):
    a, sa, *rest, sums, low = operands(0, kind, 40, 20, 6, 1, "float16", True)
    run = jax.jit(lambda a, sa, sums: scaled(a, sa, *rest, sums, low, rows=20, nibbles=kind == "nibbles", acc=False))
    every = run(a, sa, sums)
    for m in (1, 2, 5, 9):
        np.testing.assert_array_equal(run(a[:m], sa[:m], sums[:m]), every[:m])


@pytest.mark.parametrize(("kind", "m", "n", "rows", "blocks", "shared", "lows", "acc"), [
    ("nibbles", 9, 16, 16, 1, 1, False, False), ("nibbles", 16, 32, 32, 2, 1, True, False),
    ("nibbles", 17, 5, 5, 3, 1, False, True), ("nibbles", 40, 80, 80, 18, 1, True, True),
    ("nibbles", 33, 51, 17, 4, 2, True, False), ("int8", 64, 34, 34, 6, 3, False, True),
    ("int8", 20, 48, 48, 5, 1, False, False), ("uint8", 31, 40, 20, 2, 2, True, True),
])  # fmt: skip
def test_tiles_have_the_bits_of_vectors(kind, m, n, rows, blocks, shared, lows, acc):
    """Tiles sum integers in float32, which no sum of a block is too large for: largest numbers and codes, too."""
    if not host_isa().has("amx-bf16"):
        pytest.skip("this machine has no matrix tiles, or this process may not use them")
    a, sa, b, *rest = operands(m, kind, m, n, blocks, shared, "float16", lows)
    a[1], a[2], b[0], b[-1] = -32768, 32767, np.iinfo(b.dtype).max, np.iinfo(b.dtype).min
    run = lambda: jax.jit(lambda *x: scaled(*x, rows=rows, nibbles=kind == "nibbles", acc=acc))(a, sa, b, *rest)
    with jt.config(isa="avx512bf16"):
        want = run()
    np.testing.assert_array_equal(run(), want)
    assert relative_error(want, expected(a, sa, b, *rest, nibbles=kind == "nibbles", acc=acc)) < 1e-6


@pytest.mark.parametrize(("kind", "m", "blocks", "shared", "lows", "acc"), [
    ("nibbles", 7, 1, 1, True, False), ("nibbles", 8, 18, 1, True, True), ("nibbles", 16, 6, 3, False, False),
    ("int8", 5, 2, 1, False, True), ("int8", 8, 18, 1, False, False), ("int8", 16, 4, 2, True, False),
])  # fmt: skip
def test_tiles_of_bytes_have_the_bits_of_vectors(kind, m, blocks, shared, lows, acc):
    """Largest numbers and codes, too; the last of two programs has 16 of 48 rows."""
    if not host_isa().has("amx-int8"):
        pytest.skip("this machine has no matrix tiles, or this process may not use them")
    a, sa, b, sb, sums, low = operands(m, kind, m, 64, blocks, shared, "float16", lows)
    a[1], a[2], b[0], b[-1] = -32768, 32767, np.iinfo(b.dtype).max, np.iinfo(b.dtype).min
    turned = a, sa, in_panels(b), in_panels(sb), sums, in_panels(low)
    meta = dict(rows=48, nibbles=kind == "nibbles", acc=acc, panels=True)
    run = lambda: jax.jit(lambda *x: scaled(*x, **meta))(*turned)
    with jt.config(isa="avx512bf16"):
        want = run()
    np.testing.assert_array_equal(run(), want)
    assert relative_error(want, expected(a, sa, b, sb, sums, low, kind == "nibbles", acc)) < 1e-6


@pytest.mark.parametrize(("kind", "m", "panels", "wanted"), [
    ("nibbles", 9, False, "tdpbf16ps"), ("nibbles", 8, False, None), ("int8", 9, False, "tdpbf16ps"),
    ("uint8", 8, False, None), ("nibbles", 6, True, None), ("nibbles", 7, True, "tdpbsud"),
    ("nibbles", 16, True, "tdpbuud"), ("nibbles", 17, True, "tdpbf16ps"), ("int8", 4, True, None),
    ("int8", 5, True, "tdpbssd"), ("int8", 8, True, "tdpbusd"),
])  # fmt: skip
def test_what_tiles_are_used_for(kind, m, panels, wanted):
    """Columns that meet many rows, and panels that meet several; tiles have the sizes behind that they had before."""
    a, sa, b, sb, sums, low = operands(0, kind, m, 48, 2, 1, "float16", True)
    given = (a, sa, in_panels(b), in_panels(sb), sums, in_panels(low)) if panels else (a, sa, b, sb, sums, low)
    nibbles = kind == "nibbles"
    text = scaled.lower(*given, target="cpu:amx", rows=48, nibbles=nibbles, acc=False, panels=panels).texts["asm"]
    assert [word in text for word in ("ldtilecfg", "sttilecfg")] == [wanted is not None] * 2
    assert wanted is None or wanted in text


def test_scales_that_meet_large_sums():
    """A sum times the scale of its row alone would be no float32 number."""
    for m in (1, 5, 20):
        a, sa, b, sb, *_ = operands(m, "nibbles", m, 16, 2, 1, "float16", False)
        sa, sb = sa * np.float32(1e32), (sb * 1e-3).astype(sb.dtype)
        y = scaled(a, sa, b, sb, None, None, rows=16, nibbles=True, acc=False)
        assert relative_error(y, expected(a, sa, b, sb, None, None, True, False)) < 1e-6


@pytest.mark.parametrize(("kind", "isa", "wanted"), [
    ("nibbles", "avx512bf16", "vpdpbusd"), ("int8", "avx512bf16", "vpdpbusd"), ("uint8", "avx512bf16", "vpdpwssd"),
    ("int8", "avx512", "vpmaddwd"),
])  # fmt: skip
def test_instructions(kind, isa, wanted):
    """Bytes are multiplied as they are, and codes of 4 bits are unpacked in registers."""
    given = operands(0, kind, 1, 16, 2, 1, "float16", False)
    lowered = scaled.lower(*given, target=f"cpu:{isa}", rows=16, nibbles=kind == "nibbles", acc=False)
    assert wanted in lowered.texts["asm"]
    assert f"scaled_{'digits' if wanted == 'vpdpbusd' else 'direct'}_1x16x2_{kind}" in lowered.texts["llvm"]


@jt.kernel(
    out_type=lambda a, sa, b, sb, p, q: (
        jax.ShapeDtypeStruct((len(a), len(p)), jnp.float32),
        jax.ShapeDtypeStruct((q.shape[1], len(p)), "int8" if b is None else "float32"),
        jax.ShapeDtypeStruct((len(p), len(p)), jnp.float32),
    ),
    grid=lambda *_: 1,
)
def of_made_columns(a, sa, b, sb, p, q, y, made, other):
    """A product with columns or scales that are stored, and whose source is gone by then."""
    P = jt.dot(p[...], q[...])
    M = jnp.sin(P) * jnp.cos(P)
    M = ((M * 100).astype(jnp.int8) if b is None else M).T
    made[...] = M
    Q = P * 3 + 1
    other[...] = jt.dot(Q, Q.T)
    y[...] = jt.dot_scaled(a[...], sa[...], *((M, sb[...].T) if b is None else (b[...].T, M)))


@pytest.mark.parametrize("made", ["codes", "scales"])
def test_columns_that_have_memory_of_their_own(made):
    rng, m, n, k = np.random.default_rng(0), 4, 32, 64 if made == "codes" else 1024
    a, sa = rng.integers(-30000, 30000, (m, k)).astype(np.int16), rng.random((m, k // 32), np.float32)
    p, q = (rng.normal(size=s).astype(np.float32) for s in ((n, 16), (16, k if made == "codes" else k // 32)))
    b = None if made == "codes" else rng.integers(-128, 128, (n, k)).astype(np.int8)
    sb = rng.random((n, k // 32), np.float32) if made == "codes" else None
    y, found, _ = of_made_columns(a, sa, b, sb, p, q)
    codes, scales = (np.asarray(found), sb.T) if made == "codes" else (b.T, np.asarray(found))
    wide = lambda x, s, axis: x.astype(np.float64) * np.repeat(s, 32, axis)
    assert relative_error(y, wide(a, sa, 1) @ wide(codes, scales, 0)) < 1e-6
