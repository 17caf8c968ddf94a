"""What a plan says, and why there is none."""

import jax.numpy as jnp
import pytest
import tile_kernels as tk
from machines import machine

import jtile as jt
from jtile.ir import parse_kernel
from jtile.lowering.triton.block.passes import NoPlan, block_level, steps


def plan_of(kernel, of=None, **options):
    with jt.config(verify=False):  # but for the last step: other tests look at all of them
        planned = steps(kernel, of or machine(), options)
    assert not isinstance(planned, NoPlan), str(planned)
    return planned.plan


def test_matmul_of_4096():
    p = plan_of(tk.matmul(4096, 4096, 4096, tile=(128, 256, 64)))
    assert str(p) == (
        "2 consumers of 4 warps, 240 registers; 128 blocks for 512 tiles; rings of 4 slots: "
        "a tile<128x64xbf16> + b tile<64x256xbf16>; stores: 2 of 64 columns; 232448 bytes shared"
    )


@pytest.mark.parametrize(
    ("kernel", "tiles", "blocks"),
    [
        (tk.matmul(8192, 28672, 256, tile=(128, 256, 64)), 7168, 131),  # 55 rounds; 132 would take as many
        (tk.matmul(1024, 4096, 256, tile=(128, 256, 64)), 128, 128),
        (tk.gated(4096, 14336, 256, tile=(128, 128, 64)), 3584, 128),
        (tk.grouped(4096, 4, 4096, 256, tile=(128, 256, 64)), 592, 132),  # tiles of groups are not all there
    ],
    ids=["a product", "a tile each", "a gated layer", "groups"],
)
def test_no_more_blocks_than_the_rounds_need(kernel, tiles, blocks):
    p = plan_of(kernel)
    assert (p.tiles, p.blocks) == (tiles, blocks)


def test_attention_of_heads_of_128():
    p = plan_of(tk.attention(1024, 1024, d=128, tile=(128, 128), window=(None, 0)))
    assert str(p) == (
        "2 consumers of 4 warps, 240 registers; 16 blocks; rings of 2 slots, resident 1: q tile<128x128xbf16>, "
        "resident; k tile<128x128xbf16>; v tile<128x128xbf16>; stores: 1 of 128 columns; 199680 bytes shared"
    )


def test_attention_of_heads_of_64():
    p = plan_of(tk.attention(1024, 1024, d=64, tile=(192, 128), window=(None, 0)))
    assert str(p).startswith(
        "3 consumers of 4 warps in turns, 160 registers; 12 blocks; rings of 5 slots, resident 1: "
    )


def test_four_consumers_where_registers_hold_what_a_chain_needs():
    p = plan_of(tk.attention(1024, 1024, d=64, tile=(256, 64), window=(None, 0)))
    assert str(p).startswith("4 consumers of 4 warps in turns, 112 registers; 8 blocks; rings of 8 slots, resident 1: ")
    more = block_level(tk.attention(1024, 1024, d=64, tile=(256, 128)), machine(), {})
    assert "take 256 of a thread's registers with what else it holds, of which they may take 200" in str(more)
    assert plan_of(tk.matmul(4096, 4096, 4096, tile=(256, 128, 64))).consumers == 2


def test_a_slot_less_where_the_next_tile_can_begin_early():
    kernel = tk.attention(1024, 1024, d=64, tile=(128, 128))
    p, asked = (plan_of(kernel, machine(processors=3), **options) for options in ({}, {"num_stages": 6}))
    assert ((p.stages, p.resident), (asked.stages, asked.resident)) == ((5, 2), (6, 1))


def test_little_memory_leaves_stores_to_pointers():
    p = plan_of(tk.matmul(128, 256, 256, tile=(128, 256, 64)), machine(shared=110 << 10))
    assert (p.stages, p.outputs) == (2, {})


def test_options_go_before_the_plan():
    p = plan_of(tk.matmul(2048, 2048, 128, tile=(128, 128, 32)), consumers=1, num_stages=3, persistent=False)
    assert (p.consumers, p.stages, p.persistent) == (1, 3, False)


@pytest.mark.parametrize(
    ("kernel", "options", "reason"),
    [
        (lambda: tk.matmul(128, 128, 64, dtype=jnp.float32, out="float32"), {}, "of float32 and float32 is none"),
        (lambda: tk.matmul(128, 128, 64, dtype=jnp.int8, out="int32"), {}, "lie along k in memory"),
        (lambda: tk.matmul(32, 128, 64, tile=(32, 128, 32)), {}, "is 32x128x32, of warpgroups a multiple of 64x8x16"),
        (lambda: tk.matmul(128, 128, 64, tile=(128, 128, 64)), {}, "no loop loads the operands"),
        (lambda: tk.matmul(128, 512, 64, tile=(128, 512, 32)), {}, "512 long along an axis, a box at most 256"),
        (lambda: tk.matmul(128, 128, 68, tile=(128, 128, 32)), {}, "rows of a are 136 bytes apart"),
        (lambda: tk.gated(128, 256, 64, tile=(128, 256, 32)), {}, "its products take 256 of a thread's registers"),
        (lambda: tk.attention(128, 128, d=96), {}, "64x96x"),
        (lambda: tk.matmul(128, 192, 64, tile=(128, 96, 32)), {"specialize": True}, "96xf32>: sides are powers of two"),
        (lambda: tk.matmul(128, 128, 64), {"specialize": False}, "specialize=False asks for the tile level"),
        (lambda: tk.matmul(128, 128, 64), {"consumers": 3}, "128 rows of a product are not 3 shares"),
    ],
)  # fmt: skip
def test_reasons(kernel, options, reason):
    found = block_level(kernel(), machine(), options)
    assert isinstance(found, NoPlan)
    assert reason in str(found)


def test_the_reason_is_that_of_the_best_team():
    """One consumer of 8 warps comes next, and cannot have 192 rows."""
    kernel = tk.matmul(768, 768, 512, tile=(192, 256, 128), dtype=jnp.float8_e4m3fn, tb=True)
    assert "take 256 of a thread's registers" in str(block_level(kernel, machine(), {}))


def text(load: str, extra: str = "", params: str = "") -> str:
    return f"""kernel @k(%a: ref<128x64xbf16>, %b: ref<64x64xbf16>{params}, %o: ref<128x64xf32, out>) grid(1) {{
      %c0 = full 0 : i32
      %c1 = full 1 : i32
      %c2 = full 2 : i32
      %z = full 0.0 : tile<128x64xf32>
      {extra}
      %r = for %k in %c0..%c2 step %c1 carry (%acc = %z) {{
        %x = load %a[tile(%c0, 128), tile(%k, 32)]
        %y = {load}
        %d = dot %x, %y acc=%acc
        yield %d
      }}
      store %o[tile(%c0, 128), tile(%c0, 64)], %r
    }}"""


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (text("load %b[tile(%k, 32), tile(%c0, 64)] pad=1.0"), "the load of b gives 1.0 outside of the array"),
        (text("load %b[tile(%k, 32), tile(%c0, 64)] mask=%m", "%m = full true : tile<32x64xbool>"), "b has a mask"),
        (text("load %b[take(%i), tile(%c0, 64)]", "%i = iota 0 : tile<32xi32>"), "the access to b is a gather"),
        (text("load %w[tile(%k, 32), tile(%c0, 64)]", params=", %w: ref<{n}x64xbf16>"), "known only when it runs"),
        ("kernel @k(%a: ref<8xf32>, %o: ref<8xf32, out>) { %c0 = full 0 : i32 }", "no matrix product to feed"),
    ],
)  # fmt: skip
def test_reasons_of_loads(kernel, reason):
    found = block_level(parse_kernel(kernel), machine(), {})
    assert isinstance(found, NoPlan)
    assert reason in found.reason


def test_a_place_that_depends_on_the_products_is_refused():
    kernel = """kernel @k(%a: ref<128x64xbf16>, %b: ref<64x64xbf16>, %o: ref<128x64xf32, out>) grid(1) {
      %c0 = full 0 : i32
      %c1 = full 1 : i32
      %c2 = full 2 : i32
      %z = full 0.0 : tile<128x64xf32>
      %r, %j = for %k in %c0..%c2 step %c1 carry (%acc = %z, %at = %c0) {
        %x = load %a[tile(%c0, 128), tile(%at, 32)]
        %y = load %b[tile(%at, 32), tile(%c0, 64)]
        %d = dot %x, %y acc=%acc
        %s = reduce max %d axes=(0, 1) : f32
        %n = cast %s : i32
        yield %d, %n
      }
      store %o[tile(%c0, 128), tile(%c0, 64)], %r
    }"""
    found = block_level(parse_kernel(kernel), machine(), {"consumers": 1})
    assert isinstance(found, NoPlan)
    assert "where its operands lie depends on its products" in found.reason


def test_more_programs_than_roles_can_count():
    few, many = (
        text("load %b[tile(%k, 32), tile(%c0, 64)]").replace("grid(1)", f"grid({n})") for n in (70000, "70000, 70000")
    )
    assert not isinstance(block_level(parse_kernel(few), machine(), {}), NoPlan)
    found = block_level(parse_kernel(many), machine(), {})
    assert isinstance(found, NoPlan)
    assert "4900000000 programs" in found.reason


def test_a_reason_names_the_line():
    found = block_level(tk.matmul(128, 128, 64, dtype=jnp.float32, out="float32"), machine(), {})
    assert isinstance(found, NoPlan)
    assert "ops/matmul.py:" in str(found)


@pytest.mark.parametrize("wide", [128, 256])
def test_sums_beside_the_products_take_registers(wide):
    """A loop that folds products into sums itself holds both, and the sums of an outer loop as well."""
    text = f"""kernel @k(%a: ref<128x512xbf16>, %b: ref<512x{wide}xbf16>, %o: ref<128x{wide}xf32, out>) {{
      %c0 = full 0 : i32
      %c1 = full 1 : i32
      %c4 = full 4 : i32
      %z = full 0.0 : tile<128x{wide}xf32>
      %s = for %q in %c0..%c4 step %c1 carry (%sum = %z) {{
        %i = mul %q, %c4
        %e = add %i, %c4
        %p = for %k in %i..%e step %c1 carry (%acc = %z) {{
          %x = load %a[tile(%c0, 128), tile(%k, 32)]
          %y = load %b[tile(%k, 32), tile(%c0, {wide})]
          %d = dot %x, %y acc=%acc
          yield %d
        }}
        %t = add %sum, %p
        yield %t
      }}
      store %o[tile(%c0, 128), tile(%c0, {wide})], %s
    }}"""
    found = block_level(parse_kernel(text), machine(), {})
    assert isinstance(found, NoPlan) == (wide == 256)
    if isinstance(found, NoPlan):
        assert "its products take 256 of a thread's registers" in str(found)


def test_sums_that_go_through_a_branch_count_once():
    """Half of a thread's registers: what a branch adds to is not held beside what it gives."""
    text = """kernel @k(%a: ref<128x512xbf16>, %b: ref<512x256xbf16>, %n: ref<i32>, %o: ref<128x256xf32, out>) {
      %c0 = full 0 : i32
      %c1 = full 1 : i32
      %c15 = full 15 : i32
      %z = full 0.0 : tile<128x256xf32>
      %s = for %k in %c0..%c15 step %c1 carry (%acc = %z) {
        %x = load %a[tile(%c0, 128), tile(%k, 32)]
        %y = load %b[tile(%k, 32), tile(%c0, 256)]
        %d = dot %x, %y acc=%acc
        yield %d
      }
      %m = load %n[]
      %rest = gt %m, %c0
      %t = if %rest {
        %x = load %a[tile(%c0, 128), tile(%c15, 32)]
        %y = load %b[tile(%c15, 32), tile(%c0, 256)]
        %d = dot %x, %y acc=%s
        yield %d
      } else {
        yield %s
      }
      store %o[tile(%c0, 128), tile(%c0, 256)], %t
    }"""
    assert not isinstance(block_level(parse_kernel(text), machine(), {}), NoPlan)
