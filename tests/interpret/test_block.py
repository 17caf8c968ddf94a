"""Block-level kernels in the interpreter: right ones give what the tile-level kernel gives, whoever comes first."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from block_kernels import attention, block, gemm
from draws import thorough

from jtile._errors import KernelAssertionError
from jtile.interpret import interpret
from jtile.ir import parse_kernel

SEEDS = range(30)
TILE_GEMM = """
kernel @gemm(%a: ref<{m}x{k}x{dtype}>, %b: ref<{k}x{n}x{dtype}>, %o: ref<{m}x{n}x{out}, out>) grid({rows}, {columns}) {{
  %i = program_id 0
  %j = program_id 1
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %rounds = full {rounds} : i32
  %zero = full 0.0 : tile<{bm}x{bn}xf32>
  %sum = for %k in %c0..%rounds step %c1 carry (%acc = %zero) {{
    %x = load %a[tile(%i, {bm}), tile(%k, {bk})]
    %y = load %b[tile(%k, {bk}), tile(%j, {bn})]
    %d = dot %x, %y acc=%acc : tile<{bm}x{bn}xf32>
    yield %d
  }}
  %r = cast %sum : tile<{bm}x{bn}x{out}>
  store %o[tile(%i, {bm}), tile(%j, {bn})], %r
}}
"""
TILE_ATTENTION = """
kernel @attention(%q: ref<{h}x{sq}x{d}xbf16>, %k: ref<{h}x{skv}x{d}xbf16>, %v: ref<{h}x{skv}x{d}xbf16>,
    %o: ref<{h}x{sq}x{d}xbf16, out>) grid({rows}, {h}) {{
  %i = program_id 0
  %h = program_id 1
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %rounds = full {rounds} : i32
  %scale = full {scale} : tile<64x{bn}xf32>
  %low = full -inf : tile<64xf32>
  %none = full 0.0 : tile<64xf32>
  %zero = full 0.0 : tile<64x{d}xf32>
  %x = load %q[%h, tile(%i, 64), tile(%c0, {d})]
  %ml, %ll, %ol = for %j in %c0..%rounds step %c1 carry (%m = %low, %l = %none, %acc = %zero) {{
    %y = load %k[%h, tile(%j, {bn}), tile(%c0, {d})]
    %s = dot %x, %y trans_b=true : tile<64x{bn}xf32>
    %t = mul %s, %scale
    %mx = reduce max %t axes=(1)
    %mn = max %m, %mx
    %dm = sub %m, %mn
    %alpha = exp2 %dm
    %mb = broadcast %mn dims=(0) : tile<64x{bn}xf32>
    %e = sub %t, %mb
    %p = exp2 %e
    %lx = reduce sum %p axes=(1)
    %la = mul %l, %alpha
    %ln = add %la, %lx
    %ab = broadcast %alpha dims=(0) : tile<64x{d}xf32>
    %scaled = mul %acc, %ab
    %ph = cast %p : tile<64x{bn}xbf16>
    %z = load %v[%h, tile(%j, {bn}), tile(%c0, {d})]
    %next = dot %ph, %z acc=%scaled : tile<64x{d}xf32>
    yield %mn, %ln, %next
  }}
  %lb = broadcast %ll dims=(0) : tile<64x{d}xf32>
  %of = div %ol, %lb
  %oh = cast %of : tile<64x{d}xbf16>
  store %o[%h, tile(%i, 64), tile(%c0, {d})], %oh
}}
"""


def random_inputs(kernel):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(v.shape).astype(v.type.info.numpy) for v in kernel.inputs]


def same_for_every_seed(block: str, tile: str, seeds=SEEDS) -> None:
    kernel, meaning = parse_kernel(block), parse_kernel(tile)
    inputs = random_inputs(kernel)
    (want,) = interpret(meaning, inputs)
    for seed in seeds if thorough() else seeds[::3]:
        (got,) = interpret(kernel, inputs, seed=seed)
        np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64), err_msg=f"seed {seed}")


@pytest.mark.parametrize(
    ("size", "how"),
    [
        (dict(m=32, n=32, k=40), dict(blocks=1)),
        (dict(m=53, n=27, k=45), dict(blocks=3, slots=2)),  # the last rows of the second consumer are no rows
        (dict(m=32, n=16, k=8), dict(blocks=2, slots=4)),  # one round: the ring is never full
        (dict(m=32, n=16, k=40), dict(blocks=1, consumers=1, out="f32")),
        (dict(m=48, n=16, k=24), dict(blocks=1, consumers=3, slots=3, dtype="f8e4m3fn")),
    ],
)
def test_gemm(size, how):
    tiles = dict(bm=24 if how.get("consumers") == 3 else 16, bn=8, bk=8)
    rows = -(-size["m"] // tiles["bm"]), -(-size["n"] // tiles["bn"]), -(-size["k"] // tiles["bk"])
    kinds = dict(dtype="bf16", out="bf16") | {k: v for k, v in how.items() if k in ("dtype", "out")}
    meaning = TILE_GEMM.format(**size, **tiles, **kinds, rows=rows[0], columns=rows[1], rounds=rows[2])
    same_for_every_seed(gemm(**size, **tiles, **how), meaning)


@pytest.mark.parametrize(("sq", "skv", "consumers", "slots"), [(128, 80, 2, 2), (100, 32, 2, 3), (192, 16, 3, 2)])
def test_attention_with_rotated_products(sq, skv, consumers, slots):
    size = dict(sq=sq, skv=skv, d=16, bn=16)
    scale = np.log2(np.e) / 4
    meaning = TILE_ATTENTION.format(**size, h=1, rows=-(-sq // 64), rounds=skv // 16, scale=repr(float(scale)))
    same_for_every_seed(attention(**size, heads=1, consumers=consumers, slots=slots), meaning)


def test_sizes_of_hopper():
    """One of the shapes that the hardware takes."""
    text = gemm(m=256, n=256, k=192, bm=128, bn=128, bk=64)
    kernel = parse_kernel(text)
    a, b = (np.random.default_rng(0).integers(-3, 4, v.shape).astype(ml_dtypes.bfloat16) for v in kernel.inputs)
    (got,) = interpret(kernel, [a, b], seed=1)
    np.testing.assert_array_equal(got, (a.astype(np.float32) @ b.astype(np.float32)).astype(a.dtype))


# -- single ops -------------------------------------------------------------------------------------------------------


def run(text: str, *inputs, **kw):
    return interpret(parse_kernel(text), list(inputs), **kw)


LOADED = "%S = alloc_shared : shared<4x8xf32>\n%full = alloc_barriers : barrier<1, arrivals 1>"
LOAD = "expect %full[%c0] bytes=128\nasync_load %x[tile(%c1, 4), tile(%c0, 8)] -> %S, %full[%c0] PAD"


@pytest.mark.parametrize(("pad", "beyond"), [("", 0.0), ("pad=nan", np.nan)])
def test_copies_fill_what_lies_beyond_the_array(pad, beyond):
    x = np.arange(35, dtype=np.float32).reshape(5, 7)
    consumer = "wait %full[%c0], %c0\n%t = load_shared %S\nstore %o[tile(%c0, 4), tile(%c0, 8)], %t"
    text = block("%x: ref<5x7xf32>, %o: ref<4x8xf32, out>", LOADED, consumer, LOAD.replace("PAD", pad))
    want = np.full((4, 8), beyond, np.float32)
    want[0, :7] = x[4]
    for seed in range(5):
        np.testing.assert_array_equal(run(text, x, seed=seed)[0], want)


@pytest.mark.parametrize(("fn", "combine"), [("add", np.add), ("min", np.minimum), ("max", np.maximum)])
def test_stores_combine_with_what_is_there(fn, combine):
    """Every program adds its tile to one place; what hangs over is not written."""
    text = block(
        "%x: ref<12x8xf32>, %o: ref<3x8xf32, out>",
        "%p = program_id 0\n%S = alloc_shared : shared<4x8xf32>",
        f"""%t = load %x[tile(%p, 4), tile(%c0, 8)]
        store_shared %S, %t
        fence_shared
        role_barrier
        async_store %o[tile(%c0, 4), tile(%c0, 8)] <- %S fn={fn}
        store_wait 0""",
        grid="grid(3) init(%o = 1.0)",
    )
    x = np.random.default_rng(0).integers(-5, 6, (12, 8)).astype(np.float32)
    want = combine.reduce([np.ones((3, 8), np.float32), x[:3], x[4:7], x[8:11]])
    for seed in range(5):
        np.testing.assert_array_equal(run(text, x, seed=seed)[0], want)


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f8e4m3fn", "f8e5m2", "i8"])
@pytest.mark.parametrize("where", ["registers", "shared"])
def test_products(dtype, where):
    """acc + a @ b, twice into one accumulator, the second operand transposed."""
    acc = "i32" if dtype == "i8" else "f32"
    a = "%x" if where == "registers" else "%A"
    text = block(
        f"%a: ref<4x8x{dtype}>, %b: ref<6x8x{dtype}>, %o: ref<4x6x{acc}, out>, %p: ref<4x6x{acc}, out>",
        f"%A = alloc_shared : shared<4x8x{dtype}>\n%B = alloc_shared : shared<6x8x{dtype}>",
        f"""%x = load %a[tile(%c0, 4), tile(%c0, 8)]
        %y = load %b[tile(%c0, 6), tile(%c0, 8)]
        store_shared %A, %x
        store_shared %B, %y
        fence_shared
        %T = transpose_shared %B
        %one = full 1 : tile<4x6x{acc}>
        %d = dot_async {a}, %T acc=%one keep=%no
        %e = dot_async {a}, %T acc=%d keep=%yes
        %f = dot_async {a}, %T
        %g = dot_wait %e pending=1
        %h = dot_wait %f
        store %o[tile(%c0, 4), tile(%c0, 6)], %g
        store %p[tile(%c0, 4), tile(%c0, 6)], %h""",
    )
    kernel = parse_kernel(text)
    inputs = [np.random.default_rng(0).integers(-4, 5, v.shape).astype(v.type.info.numpy) for v in kernel.inputs]
    want = inputs[0].astype(np.int64) @ inputs[1].astype(np.int64).T
    for seed in range(4):
        o, p = interpret(kernel, inputs, seed=seed)
        np.testing.assert_array_equal(o, 2 * want)
        np.testing.assert_array_equal(p, want)


def test_parts_of_a_buffer_belong_to_different_roles():
    """Two roles fill a half each, of the buffer and of its transpose; a third reads it after both arrived as one."""
    halves = [
        """%t = load %x[tile(%c0, 4), tile(%c0, 4)]
        %left = slice_shared %S starts=(0, 0) sizes=(4, 4)
        store_shared %left, %t
        arrive %done[%c1] count=2""",
        """%t = load %x[tile(%c0, 4), tile(%c1, 4)]
        %u = transpose %t perm=(1, 0)
        %T = transpose_shared %S
        %right = slice_shared %T starts=(4, 0) sizes=(4, 4)
        store_shared %right, %u
        arrive %done[%c1] count=2 when=%yes
        arrive %done[%c1] count=2 when=%no""",
        """wait %done[%c3], %c0 when=%no
        wait %done[%c1], %c0
        %t = load_shared %S
        store %o[tile(%c0, 4), tile(%c0, 8)], %t""",
    ]
    allocs = "%S = alloc_shared : shared<4x8xf32>\n%done = alloc_barriers : barrier<2, arrivals 4>"
    text = block("%x: ref<4x8xf32>, %o: ref<4x8xf32, out>", allocs, halves[2], *halves[:2])
    x = np.arange(32, dtype=np.float32).reshape(4, 8)
    for seed in SEEDS:
        np.testing.assert_array_equal(run(text, x, seed=seed)[0], x)


PRINTS = block("", "", *[f"""print "{name}"\nrole_barrier\nprint "{name}"\nrole_barrier""" for name in "abc"])


def test_a_seed_says_who_comes_first(capsys):
    def order(seed):
        run(PRINTS, seed=seed)
        return "".join(line[-1] for line in capsys.readouterr().out.splitlines())

    orders = [order(seed) for seed in range(20)]
    assert orders == [order(seed) for seed in range(20)]
    assert len(set(orders)) > 5
    assert {"".join(sorted(o)) for o in orders} == {"aabbcc"}


def test_the_clock_goes_on():
    body = "%s = clock\nrole_barrier\n%t = clock\n%d = sub %t, %s\nstore %o[], %d"
    assert run(block("%o: ref<i64, out>", "", body))[0] > 0


def test_a_failed_assertion_names_its_role():
    text = block("", "", "role_barrier", 'role_barrier\nassert %no message="never"')
    with pytest.raises(KernelAssertionError, match="role r1: assertion failed: never"):
        run(text)
