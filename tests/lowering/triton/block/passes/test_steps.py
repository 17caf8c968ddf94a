"""From tile level to block level: the same results for every order in which the roles take turns."""

import zlib

import jax.numpy as jnp
import numpy as np
import pytest
import tile_kernels as tk
from draws import thorough
from machines import machine

from jtile.interpret import interpret
from jtile.ir import Broadcast, Cast, Kernel, Map, parse_kernel, print_kernel
from jtile.lowering.triton.block.passes import NoPlan, steps


def compare(kernel: Kernel, *, seeds=None, inputs=None, tolerance=0.0, of=None, every=False, **options):
    """The plan of a kernel, whose last step (`every`: every step) gives what the kernel gives. `steps` has verified the
    kernels. One order in which the roles take turns, which the kernel's text decides; two in `make test-all`."""
    planned = steps(kernel, of or machine(), options)
    seeds = seeds or ((0, 1) if thorough() else (zlib.crc32(print_kernel(kernel).encode()) % 4,))
    assert not isinstance(planned, NoPlan), str(planned)
    inputs = inputs or tk.operands(kernel)
    want = interpret(kernel, inputs)
    for name, _, step in planned.steps if every else planned.steps[-1:]:
        for seed in seeds if name == "clean" else seeds[:1]:
            for w, g in zip(want, interpret(step, inputs, seed=seed), strict=True):
                w, g = (np.nan_to_num(x.astype(np.float64), posinf=1e30, neginf=-1e30) for x in (w, g))
                assert np.abs(w - g).max() <= tolerance * max(np.abs(w).max(), 1.0), f"{name}, seed {seed}"
    return planned.plan


@pytest.mark.parametrize("ta", [False, True])
@pytest.mark.parametrize("tb", [False, True])
def test_operand_orders_and_edges(ta, tb):
    """Rows, columns and terms of the sum hang over; two blocks take four tiles."""
    p = compare(tk.matmul(200, 136, 72, ta=ta, tb=tb), of=machine(processors=2))
    assert (p.consumers, p.blocks, p.tiles) == (2, 2, 4)


@pytest.mark.parametrize("terms", [40, 96, 416])
def test_fewer_and_more_rounds_than_slots(terms):
    p = compare(tk.matmul(128, 64, terms, tile=(128, 64, 32)), seeds=(0, 1, 2), num_stages=3, every=True)
    assert p.stages == 3


def test_batch():
    p = compare(tk.matmul(128, 128, 64, batch=3), of=machine(processors=2))
    assert p.persistent


def test_bias_activation_and_two_outputs():
    """A bias by pointers; a float32 and a bfloat16 result, in pieces of 128 bytes."""
    p = compare(tk.matmul(200, 136, 72, bias=True, activation="silu", save=True), of=machine(processors=3))
    assert sorted((o.columns, o.buffers) for o in p.outputs.values()) == [(32, 2), (128, 1)]


@pytest.mark.parametrize(("m", "consumers", "warps"), [(64, 1, 4), (128, 2, 4), (192, 3, 4), (256, 2, 4)])
def test_rows_are_shared(m, consumers, warps):
    p = compare(tk.matmul(m, 64, 64, tile=(m, 64, 32)))
    assert (p.consumers, p.warps) == (consumers, warps)


def test_one_consumer_of_eight_warps_by_request():
    p = compare(tk.matmul(128, 64, 64, tile=(128, 64, 32)), consumers=1)
    assert (p.consumers, p.warps) == (1, 8)


@pytest.mark.parametrize(
    ("dtype", "out"), [(jnp.float16, "float16"), (jnp.float8_e4m3fn, "bfloat16"), (jnp.int8, "int32")]
)
def test_other_dtypes(dtype, out):
    compare(tk.matmul(128, 128, 96, dtype=dtype, tb=True, out=out))


@pytest.mark.parametrize("tb", [False, True])
def test_two_products_share_an_operand(tb):
    p = compare(tk.gated(100, 72, 80, tb=tb, save=True), tolerance=1e-6)
    assert len(p.rings) == 1


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"groups": 2, "softcap": 20.0},
        {"window": (None, 0), "save": True},
        {"window": (100, 0), "heads": 1},
        {"window": (40, 70), "batch": 2, "heads": 1},
    ],
)
def test_attention(options):
    compare(tk.attention(256, 192, **options), tolerance=1e-2, every="save" in options)


def test_attention_with_edges():
    """The last keys stand behind the loop: their copies go through the rings of the loop."""
    p = compare(tk.attention(200, 136), tolerance=1e-2, every=True)
    assert len(p.rings) == 3


@pytest.mark.parametrize("lengths", [(100, 256), (0, 20)])
@pytest.mark.parametrize("window", [(None, None), (100, 0)])
def test_attention_with_lengths(lengths, window):
    """Values behind the length are NaN: they must not reach a product."""
    kernel = tk.attention(128, 256, batch=2, heads=1, lengths=True, save=True, window=window)
    inputs = tk.operands(kernel)
    inputs[3] = np.array(lengths, np.int32)
    for row, n in enumerate(lengths):
        inputs[2][row, n:] = np.nan
    compare(kernel, inputs=inputs, tolerance=1e-2)


def test_attention_of_persistent_blocks():
    p = compare(tk.attention(256, 256, window=(None, 0)), tolerance=1e-2, persistent=True, of=machine(processors=3))
    assert p.persistent
    assert p.resident == 2


def test_attention_of_three_consumers_in_turns():
    p = compare(
        tk.attention(300, 128, tile=(192, 64), window=(None, 0), heads=1),
        tolerance=1e-2, persistent=True, of=machine(processors=1),
    )  # fmt: skip
    assert (p.consumers, p.turns, p.persistent) == (3, True, True)


def test_attention_of_four_consumers_in_turns():
    p = compare(
        tk.attention(300, 128, tile=(256, 64), window=(None, 0), heads=1),
        tolerance=1e-2, persistent=True, of=machine(processors=1),
    )  # fmt: skip
    assert (p.consumers, p.turns, p.persistent) == (4, True, True)


def test_a_right_operand_that_is_computed():
    """Weights in 8 bits are widened by the consumers, and go through shared memory."""
    text = """kernel @k(%x: ref<128x64xbf16>, %w: ref<64x64xi8>, %o: ref<128x64xf32, out>) grid(1) {
      %c0 = full 0 : i32
      %c1 = full 1 : i32
      %c2 = full 2 : i32
      %z = full 0.0 : tile<128x64xf32>
      %r = for %k in %c0..%c2 step %c1 carry (%acc = %z) {
        %a = load %x[tile(%c0, 128), tile(%k, 32)]
        %q = load %w[tile(%k, 32), tile(%c0, 64)]
        %b = cast %q : tile<32x64xbf16>
        %d = dot %a, %b acc=%acc
        yield %d
      }
      store %o[tile(%c0, 128), tile(%c0, 64)], %r
    }"""
    p = compare(parse_kernel(text))
    assert "w tile<32x64xi8>" in p.rings[0]


def test_a_right_operand_that_is_masked_in_some_rounds_and_too_small_for_a_ring():
    text = """kernel @k(%x: ref<128x40xbf16>, %w: ref<40x16xbf16>, %o: ref<128x16xf32, out>) grid(1) {
      %c0 = full 0 : i32
      %c1 = full 1 : i32
      %c2 = full 2 : i32
      %c32 = full 32 : i32
      %n = full 40 : tile<32xi32>
      %zero = full 0.0 : tile<32x16xbf16>
      %z = full 0.0 : tile<128x16xf32>
      %r = for %k in %c0..%c2 step %c1 carry (%acc = %z) {
        %a = load %x[tile(%c0, 128), tile(%k, 32)]
        %b = load %w[tile(%k, 32), tile(%c0, 16)]
        %first = mul %k, %c32
        %f = broadcast %first dims=() : tile<32xi32>
        %i = iota 0 : tile<32xi32>
        %row = add %i, %f
        %m = lt %row, %n
        %mine = broadcast %m dims=(0) : tile<32x16xbool>
        %c = select %mine, %b, %zero
        %d = dot %a, %c acc=%acc
        yield %d
      }
      store %o[tile(%c0, 128), tile(%c0, 16)], %r
    }"""
    p = compare(parse_kernel(text))
    assert p.rings == ("x tile<128x32xbf16>",)


def forwards_and_backwards(place: str) -> Kernel:
    """A product of each tile of x with a tile of w, and with another whose place is computed after that."""
    return parse_kernel(f"""kernel @k(%x: ref<128x96xbf16>, %w: ref<96x64xbf16>, %o: ref<128x64xf32, out>) grid(1) {{
      %c0 = full 0 : i32
      %c1 = full 1 : i32
      %c2 = full 2 : i32
      %c3 = full 3 : i32
      %z = full 0.0 : tile<128x64xf32>
      %r, %t = for %k in %c0..%c3 step %c1 carry (%acc = %z, %sum = %z) {{
        %a = load %x[tile(%c0, 128), tile(%k, 32)]
        %b = load %w[tile(%k, 32), tile(%c0, 64)]
        %d = dot %a, %b acc=%acc
        {place}
        %c = load %w[tile(%n, 32), tile(%c0, 64)]
        %e = dot %a, %c acc=%sum
        yield %d, %e
      }}
      %s = sub %r, %t
      store %o[tile(%c0, 128), tile(%c0, 64)], %s
    }}""")


def test_places_that_are_computed_behind_the_first_product():
    compare(forwards_and_backwards("%n = sub %c2, %k"))


def test_places_that_depend_on_products():
    kernel = forwards_and_backwards(
        "%m = reduce max %d axes=(0, 1)  %l = cast %m : i32  %n = and %l, %c1".replace("  ", "\n")
    )
    planned = steps(kernel, machine(), {})
    assert isinstance(planned, NoPlan)
    assert "depends on its products" in planned.reason


def test_an_operand_that_products_and_others_use():
    """Sums of the rows of an operand, from its slot."""
    text = """kernel @k(%x: ref<128x96xbf16>, %w: ref<96x64xbf16>, %o: ref<128x64xf32, out>, %s: ref<128xf32, out>)
        grid(1) {
      %c0 = full 0 : i32
      %c1 = full 1 : i32
      %c3 = full 3 : i32
      %z = full 0.0 : tile<128x64xf32>
      %y = full 0.0 : tile<128xf32>
      %r, %t = for %k in %c0..%c3 step %c1 carry (%acc = %z, %sum = %y) {
        %a = load %x[tile(%c0, 128), tile(%k, 32)]
        %b = load %w[tile(%k, 32), tile(%c0, 64)]
        %d = dot %a, %b acc=%acc
        %f = cast %a : tile<128x32xf32>
        %p = reduce sum %f axes=(1)
        %n = add %sum, %p
        yield %d, %n
      }
      store %o[tile(%c0, 128), tile(%c0, 64)], %r
      store %s[tile(%c0, 128)], %t
    }"""
    compare(parse_kernel(text), tolerance=1e-6)


def test_two_tiles_of_one_view_that_stay_for_the_loop():
    """Both are there at a time, so that each has a buffer: a query, and its rotary part of the same size."""
    text = """kernel @k(%q: ref<128x64xbf16>, %w: ref<192x32xbf16>, %o: ref<128x64xf32, out>) grid(1) {
      %c0 = full 0 : i32
      %c1 = full 1 : i32
      %c3 = full 3 : i32
      %z = full 0.0 : tile<128x64xf32>
      %a = load %q[tile(%c0, 128), tile(%c0, 32)]
      %b = load %q[tile(%c0, 128), tile(%c1, 32)]
      %r = for %k in %c0..%c3 step %c1 carry (%acc = %z) {
        %x = load %w[tile(%k, 64), tile(%c0, 32)]
        %t = transpose %x perm=(1, 0)
        %d = dot %a, %t acc=%acc
        %e = dot %b, %t acc=%d
        yield %e
      }
      store %o[tile(%c0, 128), tile(%c0, 64)], %r
    }"""
    p = compare(parse_kernel(text), tolerance=1e-6)
    assert sum("resident" in ring for ring in p.rings) == 2


@pytest.mark.parametrize("sizes", [(70, 0, 130, 56), (128, 128, 0, 0), (5, 6, 7, 8)])
def test_groups_of_rows(sizes):
    """Tiles that a group fills leave through shared memory, others through pointers; some tiles have no group."""
    kernel = tk.grouped(256, 4, 64, 96)
    inputs = tk.operands(kernel)
    inputs[2] = np.array(sizes, np.int32)
    p = compare(kernel, inputs=inputs, of=machine(processors=2))
    assert p.persistent
    assert len(p.outputs) == 1


def test_scales_of_blocks():
    compare(tk.scaled(128, 128, 256), tolerance=1e-6)


def test_an_epilogue_is_computed_piece_by_piece():
    """64 columns of bias, activation and cast at a time: registers hold the sums, and little besides."""
    kernel = tk.matmul(128, 256, 64, tile=(128, 256, 32), bias=True, activation="silu")
    compare(kernel)
    planned = steps(kernel, machine(), {})
    assert not isinstance(planned, NoPlan)
    made = [op.result for op in planned.kernel.body.walk() if isinstance(op, Map | Cast | Broadcast)]
    assert {v.shape[1] for v in made if len(v.shape) == 2} == {64}
