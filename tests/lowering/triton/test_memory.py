"""Loads and stores as TTIR: what the compiler can see of them, tensor maps, barriers, packed arrays, far elements."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from machines import card
from ttir import run_ttir

from jtile import ir, passes
from jtile.interpret import interpret
from jtile.ir.types import BY_SHORT
from jtile.lowering.triton import tma
from jtile.lowering.triton.compile import compile_kernel, emit_kernel
from jtile.lowering.triton.features import features


def kernel(text: str) -> ir.Kernel:
    return passes.run_pipeline(ir.parse_kernel(text), passes.TILE)


def ttir(text: str, arch: str = "sm_80") -> str:
    return emit_kernel(kernel(text), features(arch))[0]


def same(text: str, *inputs: np.ndarray, check: bool = True) -> None:
    k = kernel(text)
    for got, want in zip(run_ttir(k, inputs), interpret(k, inputs, check=check), strict=True):
        np.testing.assert_array_equal(got, want)


def normal(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(0).integers(-9, 9, shape).astype(ir.DTYPES[dtype].numpy)


COPY = """kernel @copy(%x: ref<{rows}x{cols}x{t}>, %o: ref<{rows}x{cols}x{t}, out>) grid(2, 2) {{
  %i = program_id 0
  %j = program_id 1
  %v = load %x[tile(%i, {m}), tile(%j, {n})] : tile<{m}x{n}x{t}>
  store %o[tile(%i, {m}), tile(%j, {n})], %v
}}"""


def copy(rows, cols, m, n, t="f32") -> str:
    return COPY.format(rows=rows, cols=cols, m=m, n=n, t=t)


def test_text_of_a_load():
    """Bounds of an axis are one comparison of its lanes with a scalar; a start moves a scalar pointer."""
    text = ttir(copy(48, 100, 32, 64))
    body = text[text.index("%1 =") : text.index("tt.store")]
    mask = "tensor<{}xi1> -> tensor<32x64xi1>"
    assert body.count("arith.cmpi slt") == 4, "two axes of the load, two of the store"
    assert body.count(mask.format("32x1")) == 2
    assert body.count(mask.format("1x64")) == 2
    assert re.search(r"tt\.addptr %p0, %\d+ : !tt\.ptr<f32>, i32", body)


def test_golden_text():
    """The padded tile is cut and the array's end tested in one comparison, and nothing else is."""
    text = ttir("""kernel @golden(%x: ref<100xf32>, %o: ref<100xf32, out>) grid(4) {
  %i = program_id 0
  %v = load %x[tile(%i, 30)] pad=1 : tile<30xf32>
  store %o[tile(%i, 30)], %v
}""")
    names: dict[str, str] = {}
    lines = text[text.index("tt.get_program_id") : text.index("tt.load")].split("\n")
    ops = [re.sub(r"%\d+", lambda n: names.setdefault(n[0], f"%{len(names)}"), line).strip() for line in lines[1:-1]]
    assert ops == [
        "%0 = arith.muli %1, %2 : i32",
        "%3 = arith.subi %4, %0 : i32",
        "%5 = arith.minsi %3, %2 : i32",
        "%6 = tt.splat %5 : i32 -> tensor<32xi32>",
        "%7 = arith.cmpi slt, %8, %6 : tensor<32xi32>",
        "%9 = tt.addptr %p0, %0 : !tt.ptr<f32>, i32",
        "%10 = tt.splat %9 : !tt.ptr<f32> -> tensor<32x!tt.ptr<f32>>",
        "%11 = tt.addptr %10, %8 : tensor<32x!tt.ptr<f32>>, tensor<32xi32>",
    ]


def test_no_mask_where_nothing_can_hang_over():
    text = ttir(copy(64, 128, 32, 64))
    assert "cmpi" not in text
    assert "i1>" not in text


def test_only_the_axis_that_hangs_over_is_tested():
    assert ttir(copy(64, 100, 32, 64)).count("arith.cmpi") == 2


@pytest.mark.parametrize(
    ("shape", "t"), [((64, 256), "f32"), ((64, 256), "bf16"), ((60, 200), "f32"), ((64, 1024), "i4")]
)
def test_rows_move_in_16_bytes(shape, t):
    n = 512 if t == "i4" else 128
    artifact = compile_kernel(kernel(copy(*shape, 32, n, t)), card("sm_80"), {"num_warps": 4}, texts=True)
    ptx = artifact.texts["ptx"]
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx
    assert not re.search(r"(ld|st)\.global\.(v2\.)?b(8|16|32) ", ptx)


# -- products ---------------------------------------------------------------------------------------------------------

PRODUCT = """kernel @mm(%a: ref<{lead}{m}x{k}x{t}{role}>, %b: ref<{k}x{n}x{t}>, %o: ref<{m}x{n}xf32, out>)
    grid({gm}, {gn}) {{
  %i = program_id 0
  %j = program_id 1
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %n = full {trips} : i32
  %z = full 0.0 : tile<{bm}x{bn}xf32>
  %r = for %k in %c0..%n step %c1 stages=3 carry (%acc = %z) {{
    %x = load %a[{at}tile(%i, {bm}), tile(%k, {bk})] : tile<{bm}x{bk}x{t}>
    %y = load %b[tile(%k, {bk}), tile(%j, {bn})] : tile<{bk}x{bn}x{t}>
    %d = dot %x, %y acc=%acc : tile<{bm}x{bn}xf32>
    yield %d
  }}
  store %o[tile(%i, {bm}), tile(%j, {bn})], %r
}}"""


def product(m, n, k, bm=128, bn=128, bk=64, t="bf16", lead="", at="", role="") -> str:
    grid = {"gm": -(-m // bm), "gn": -(-n // bn), "trips": -(-k // bk)}
    return PRODUCT.format(m=m, n=n, k=k, bm=bm, bn=bn, bk=bk, t=t, lead=lead, at=at, role=role, **grid)


@pytest.mark.parametrize("sides", [(256, 256, 256), (200, 248, 200)])
def test_loops_of_products_copy_16_bytes_asynchronously(sides):
    ptx = compile_kernel(kernel(product(*sides)), card("sm_80"), texts=True).texts["ptx"]
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*0x(\w+)[,;]", ptx)
    assert set(copies) == {"10"}
    assert "ld.global" not in ptx


def test_tensor_maps_of_a_product():
    artifact = compile_kernel(kernel(product(200, 248, 200)), card("sm_90"), {"specialize": False}, texts=True)
    assert "cp.async.bulk.tensor.2d" in artifact.texts["ptx"]
    params = json.loads(artifact.launch["record"])["params"]
    assert [p["kind"] for p in params] == ["buffer"] * 3 + ["tensormap"] * 2 + ["null"] * 2
    assert params[3] == {
        "kind": "tensormap", "buffer": 0, "dims": [200, 200], "strides": [400], "fill": "zero",
        "box": [64, 128], "swizzle": 3, "dtype": 9,
    }  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        product(72, 72, 72, 32, 64, 32),
        product(72, 144, 128, 64, 64, 64, t="f8e4m3fn"),
        product(64, 64, 64, 32, 64, 32, lead="3x", at="%i, "),
        product(72, 72, 72, 32, 64, 32, lead="3x", at="%i, "),
        product(72, 72, 72, 28, 56, 56),
        product(72, 72, 72, 32, 64, 32).replace("tile(%k, 32)] :", "tile(%k, 32)] pad=nan :"),
        product(72, 72, 72, 32, 64, 32).replace("tile(%k, 32)] :", "%k:+32] :"),
    ],
)
def test_tensor_maps_read_what_pointers_read(text):
    assert ttir(text, "sm_90").count("tt.descriptor_load") == 2
    a, b = (v for v in kernel(text).inputs)
    same(text, normal(*a.shape, dtype=a.dtype), normal(*b.shape, dtype=b.dtype))


@pytest.mark.parametrize(
    ("text", "loads"),
    [
        (product(72, 72, 68, 32, 64, 32), 1),  # rows of 136 bytes
        (product(72, 72, 72, 16, 64, 32), 1),  # a box of a kilobyte
        (product(72, 72, 72, 32, 64, 32).replace("tile(%k, 32)] :", "tile(%k, 32)] pad=1 :"), 1),
        (copy(64, 256, 32, 64), 0),  # feeds no product
    ],
)
def test_pointers_where_a_map_cannot_say_it(text, loads):
    assert ttir(text, "sm_90").count("tt.descriptor_load") == loads


def test_pointers_where_there_are_as_many_maps_as_a_launch_takes(monkeypatch):
    monkeypatch.setattr(tma, "MAPS", 1)
    text = product(72, 72, 72, 32, 64, 32)
    assert ttir(text, "sm_90").count("tt.descriptor_load") == 1
    same(text, normal(72, 72, dtype="bfloat16"), normal(72, 72, dtype="bfloat16"))


def test_no_tensor_maps_before_sm_90_nor_on_amd():
    for arch in ("sm_80", "sm_89", "gfx942"):
        assert "descriptor" not in ttir(product(256, 256, 256), arch)


# -- order ------------------------------------------------------------------------------------------------------------


def body(lines: str, refs: str = "%o: ref<8x16xf32, out>", init: str = "init(%o=0)") -> str:
    return f"""kernel @order(%x: ref<8x16xf32>, {refs}) grid(1) {init} {{
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %c3 = full 3 : i32
  {lines}
}}"""


ORDERS = {
    "two loads": ("%a = load %o[%c0, %c0:+16] : tile<16xf32> %b = load %o[%c1, %c0:+16] : tile<16xf32>", 0),
    "one store": ("%a = load %x[%c0, %c0:+16] : tile<16xf32> store %o[%c0, %c0:+16], %a", 0),
    "stores to two rows": (
        "%a = load %x[%c0, %c0:+16] : tile<16xf32> store %o[%c0, %c0:+16], %a store %o[%c1, %c0:+16], %a", 0),
    "store, load, load": (
        "%a = load %x[%c0, %c0:+16] : tile<16xf32> store %o[%c0, %c0:+16], %a"
        " %b = load %o[%c0, %c0:+8] : tile<8xf32> %d = load %o[%c0, %c1:+8] : tile<8xf32>"
        " %e = add %b, %d : tile<8xf32> store %o[%c1, %c0:+8], %e", 1),
    "row after row": (
        "for %k in %c0..%c3 step %c1 { %a = load %x[%k, %c0:+16] : tile<16xf32> store %o[%k, %c0:+16], %a }", 0),
    "stores to two tiles": (
        "%i = program_id 0 %j = add %i, %c1 : i32 %a = load %x[%c0, %c0:+8] : tile<8xf32>"
        " store %o[%c0, tile(%i, 8)], %a store %o[%c0, tile(%j, 8)], %a", 0),
    "stores to two tiles, of which one is the other's in the next trip": (
        "for %k in %c0..%c3 step %c1 { %j = add %k, %c1 : i32 %a = load %x[%k, %c0:+4] : tile<4xf32>"
        " store %o[%c0, tile(%k, 4)], %a store %o[%c0, tile(%j, 4)], %a }", 1),
    "overlapping windows": (
        "for %k in %c0..%c3 step %c1 { %a = load %x[%k, %c0:+8] : tile<8xf32> store %o[%c0, %k:+8], %a }", 1),
    "what the last trip wrote": (
        "for %k in %c0..%c3 step %c1 { %a = load %o[%c0, %c0:+16] : tile<16xf32> %b = load %x[%k, %c0:+16] :"
        " tile<16xf32> %s = add %a, %b : tile<16xf32> store %o[%c0, %c0:+16], %s }", 2),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERS)
def test_barriers(name):
    lines, barriers = ORDERS[name]
    text = body(lines)
    assert ttir(text).count("gpu.barrier") == barriers
    same(text, normal(8, 16))


PRIVATE = """kernel @private(%x: ref<6x16xf32>, %o: ref<6x16xf32, out>, %s: ref<2x16x{t}, scratch>) grid(6) {{
  %i = program_id 0
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %c3 = full 3 : i32
  %a = load %x[%i, %c0:+16] : tile<16xf32>
  %z = cast %a : tile<16x{t}>
  store %s[%c0, %c0:+16], %z
  store %s[%c1, %c0:+16], %z
  for %k in %c0..%c3 step %c1 {{
    %m = alloc : ref<16x{t}, scratch>
    %p = load %s[%c0, %k:+12] : tile<12x{t}>
    store %m[%k:+12], %p
    %q = load %m[%k:+12] : tile<12x{t}>
    store %s[%c1, %c0:+12], %q
  }}
  %b = load %s[%c1, %c0:+16] : tile<16x{t}>
  %e = cast %b : tile<16xf32>
  store %o[%i, %c0:+16], %e
}}"""


@pytest.mark.parametrize("t", ["f32", "i4", "u4"])
def test_private_memory(t):
    same(PRIVATE.format(t=t), np.abs(normal(6, 16)) % 8)


# -- packed arrays ----------------------------------------------------------------------------------------------------


def test_even_tiles_of_packed_arrays_move_whole_bytes():
    text = ttir(copy(40, 100, 32, 64, "i4"))
    assert text.count("tt.join") == 1
    assert text.count("tt.split") == 1
    assert "atomic" not in text
    same(copy(40, 100, 32, 64, "i4"), normal(40, 100, dtype="int4"))


@pytest.mark.parametrize("sides", [(40, 99, 32, 64), (40, 100, 32, 33), (41, 7, 21, 4)])
def test_odd_tiles_of_packed_arrays_share_bytes_without_a_race(sides):
    text = ttir(copy(*sides, "u4"))
    assert text.count("tt.atomic_rmw") == 2
    same(copy(*sides, "u4"), np.abs(normal(*sides[:2])).astype(ir.DTYPES["uint4"].numpy))


# -- elements far away, none, or one twice ----------------------------------------------------------------------------

FAR = """kernel @far(%x: ref<100000x70000xi8>, %n: ref<4xi32>, %o: ref<64x128xi8, out>) grid(4) {
  %i = program_id 0
  %c0 = full 0 : i32
  %k = load %n[%i] : i32
  %v = load %x[tile(%k, 64), %k:+128] : tile<64x128xi8>
  store %o[%c0:+64, %c0:+128], %v
}"""


def test_arrays_of_more_than_2_to_the_31_elements():
    """The start takes 64 bits, the lanes of a tile 32."""
    text = ttir(FAR)
    assert re.search(r"tt\.addptr %p0, %\d+ : !tt\.ptr<i8>, i64", text)
    assert "x128xi64" not in text
    assert compile_kernel(kernel(FAR), card("sm_80")).image
    assert ttir(FAR.replace("ref<100000x70000", "ref<100x70000")).count("i64") == 0


@pytest.mark.parametrize("shape", ["0", "4x0"])
def test_empty_arrays_are_not_touched(shape):
    dims = ", ".join("%c0:+4" for _ in shape.split("x"))
    tile = "x".join("4" for _ in shape.split("x"))
    text = f"""kernel @empty(%x: ref<{shape}xf32>, %o: ref<{tile}xf32, out>, %e: ref<{shape}xf32, out>) grid(1) {{
  %c0 = full 0 : i32
  %v = load %x[{dims}] pad=3 : tile<{tile}xf32>
  store %o[{dims}], %v
  store %e[{dims}], %v
}}"""
    assert "tt.load" not in ttir(text)
    assert ttir(text).count("tt.store") == 1
    same(text, np.zeros([int(n) for n in shape.split("x")], np.float32))


SCATTER = """kernel @scatter(%n: ref<{n}xi32>, %v: ref<{n}x4x{t}>, {more}%o: ref<20x4x{t}, out>) grid(1) init(%o=0) {{
  %c0 = full 0 : i32
  %k = load %n[%c0:+{n}] : tile<{n}xi32>
  %x = load %v[%c0:+{n}, %c0:+4] : tile<{n}x4x{t}>
  {mask}
  store %o[take(%k), %c0:+4], %x {use}
}}"""
MASK = {"more": "%m: ref<{n}x4xbool>, ", "mask": "%p = load %m[%c0:+{n}, %c0:+4] : tile<{n}x4xbool>", "use": "mask=%p"}


@pytest.mark.parametrize(("n", "t"), [(30, "f32"), (300, "f32"), (30, "i4")])
@pytest.mark.parametrize("masked", [False, True])
def test_the_last_lane_of_a_scatter_wins(n, t, masked):
    rng = np.random.default_rng(1)
    parts = {k: v.format(n=n) if masked else "" for k, v in MASK.items()}
    dtype = BY_SHORT[t].name
    inputs = [rng.integers(-2, 22, n).astype(np.int32), normal(n, 4, dtype=dtype)]
    inputs += [rng.random((n, 4)) < 0.5] if masked else []
    same(SCATTER.format(n=n, t=t, **parts), *inputs, check=False)


def test_rows_of_a_scatter_take_turns_and_their_columns_do_not():
    """Some rows have one place, where the last one that is stored wins; columns differ."""
    text = """kernel @rows(%n: ref<6xi32>, %v: ref<6x8xf32>, %m: ref<6x8xbool>, %o: ref<9x16xf32, out>)
    grid(1) init(%o=0) {
      %c0 = full 0 : i32
      %k = load %n[%c0:+6] : tile<6xi32>
      %r = broadcast %k dims=(0) : tile<6x8xi32>
      %a = iota 0 : tile<8xi32>
      %b = full 5 : tile<8xi32>
      %d = add %a, %b : tile<8xi32>
      %c = broadcast %d dims=(1) : tile<6x8xi32>
      %x = load %v[%c0:+6, %c0:+8] : tile<6x8xf32>
      %p = load %m[%c0:+6, %c0:+8] : tile<6x8xbool>
      store %o[take(%r), take(%c)], %x mask=%p
    }"""
    places = np.array([3, 1, 3, -1, 8, 1], np.int32)
    same(text, places, normal(6, 8), np.random.default_rng(2).random((6, 8)) < 0.7, check=False)
    assert re.search(r"%c6_i32|6 : i32", ttir(text)) and "48 : i32" not in ttir(text)


@pytest.mark.parametrize(
    ("lanes", "apart"),
    [
        ("%w = iota 0 : tile<16xi32>", True),
        ("%e = iota 0 : tile<16xi8> %w = cast %e : tile<16xi32>", True),
        ("%e = iota 0 : tile<16xi32> %w = sub %k, %e : tile<16xi32>", False),
        ("%e = iota 0 : tile<16xi32> %w = mul %e, %k : tile<16xi32>", False),
    ],
)
def test_lanes_that_differ_by_construction_are_stored_at_once(lanes, apart):
    text = SCATTER.format(n=16, t="f32", more="", mask=lanes, use="").replace("take(%k)", "take(%w)")
    assert ("tt.reduce" not in ttir(text)) == apart


DYNAMIC = """kernel @dynamic(%a: ref<{n}x{m}xf32>, %b: ref<{n}x{m}xi4>,
    %o: ref<{n}x{m}xf32, out>, %p: ref<{n}x{m}xi4, out>)
    grid({cdiv(n, 4)}, {cdiv(m, 16)}) {
  %i = program_id 0
  %j = program_id 1
  %x = load %a[tile(%i, 4), tile(%j, 16)] : tile<4x16xf32>
  store %o[tile(%i, 4), tile(%j, 16)], %x
  %y = load %b[tile(%i, 4), tile(%j, 16)] : tile<4x16xi4>
  store %p[tile(%i, 4), tile(%j, 16)], %y
}"""


@pytest.mark.parametrize("sides", [(4, 16), (9, 33), (1, 1)])
def test_sizes_known_at_run_time(sides):
    same(DYNAMIC, normal(*sides), normal(*sides, dtype="int4"))


def test_loops_that_read_what_they_write_are_not_pipelined():
    """Triton's pipeliner would load before the stores of earlier trips."""
    text = product(256, 256, 256).replace(
        "%o: ref<256x256xf32, out>", "%o: ref<256x256xf32, out>, %s: ref<256x256xbf16, out>"
    )
    text = text.replace("    yield", "    store %s[tile(%k, 64), %c0:+128], %y\n    yield")
    assert "tt.num_stages = 3" in ttir(text)
    text = text.replace("load %a[", "load %s[")
    assert "tt.num_stages = 3" not in ttir(text)
    assert "tt.num_stages = 1" in ttir(text)
    assert ttir(text, "sm_90").count("tt.descriptor_load") == 1
