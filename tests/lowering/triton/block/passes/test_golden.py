"""Golden text: a grid becomes one axis of blocks; a kernel becomes a producer and consumers."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import tile_kernels as tk
from machines import machine

from jtile.ir import Builder, parse_kernel, print_kernel, verify
from jtile.lowering.triton.block.passes.decide import Wish, plan
from jtile.lowering.triton.block.passes.persist import Bands, bands, persist
from jtile.lowering.triton.block.passes.specialise import specialise
from jtile.lowering.triton.block.passes.uneven import Uneven, balances, ids, shared, uneven
from jtile.passes.cse import cse
from jtile.passes.dce import dce

GRID = """\
kernel @k(%a: ref<2x80x4xf32>, %b: ref<2x4x80xf32>, %o: ref<2x80x80xf32, out>) grid(2, 10, 5) {
  %e = program_id 0 : i32
  %i = program_id 1 : i32
  %j = program_id 2 : i32
  %c0 = full 0 : i32
  %x = load %a[%e, tile(%i, 8), tile(%c0, 4)] : tile<8x4xf32>
  %y = load %b[%e, tile(%c0, 4), tile(%j, 16)] : tile<4x16xf32>
  %d = dot %x, %y : tile<8x16xf32>
  store %o[%e, tile(%i, 8), tile(%j, 16)], %d
}
"""

BLOCKS = """\
kernel @k(%a: ref<2x80x4xf32>, %b: ref<2x4x80xf32>, %o: ref<2x80x80xf32, out>) grid(7) {
  %tile = program_id 0 : i32
  %c100 = full 100 : i32
  %c7 = full 7 : i32
  for %t in %tile..%c100 step %c7 {
    %c50 = full 50 : i32
    %e = div %t, %c50 : i32
    %0 = rem %t, %c50 : i32
    %c20 = full 20 : i32
    %1 = div %0, %c20 : i32
    %c4 = full 4 : i32
    %2 = mul %1, %c4 : i32
    %3 = rem %0, %c20 : i32
    %c10 = full 10 : i32
    %4 = sub %c10, %2 : i32
    %5 = min %4, %c4 : i32
    %6 = rem %3, %5 : i32
    %i = add %2, %6 : i32
    %j = div %3, %5 : i32
    %c0 = full 0 : i32
    %x = load %a[%e, tile(%i, 8), tile(%c0, 4)] : tile<8x4xf32>
    %y = load %b[%e, tile(%c0, 4), tile(%j, 16)] : tile<4x16xf32>
    %d = dot %x, %y : tile<8x16xf32>
    store %o[%e, tile(%i, 8), tile(%j, 16)], %d
  }
}
"""

PRODUCT = """\
kernel @k(%a: ref<128x96xbf16>, %b: ref<64x96xbf16>, %o: ref<128x64xbf16, out>) {
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %c3 = full 3 : i32
  %z = full 0.0 : tile<128x64xf32>
  %r = for %k in %c0..%c3 step %c1 carry (%acc = %z) {
    %x = load %a[tile(%c0, 128), tile(%k, 32)] : tile<128x32xbf16>
    %y = load %b[tile(%c0, 64), tile(%k, 32)] : tile<64x32xbf16>
    %d = dot %x, %y acc=%acc trans_b=true : tile<128x64xf32>
    yield %d
  }
  %w = cast %r : tile<128x64xbf16>
  store %o[tile(%c0, 128), tile(%c0, 64)], %w
}
"""

ROLES = """\
kernel @k(%a: ref<128x96xbf16>, %b: ref<64x96xbf16>, %o: ref<128x64xbf16, out>) grid(1) {
  %a0 = alloc_shared : shared<64x32xbf16, slots 2>
  %a1 = alloc_shared : shared<64x32xbf16, slots 2>
  %b_1 = alloc_shared : shared<64x32xbf16, slots 2>
  %a_full = alloc_barriers : barrier<2, arrivals 1>
  %a_empty = alloc_barriers : barrier<2, arrivals 2>
  %o0 = alloc_shared : shared<64x64xbf16, slots 1>
  %o1 = alloc_shared : shared<64x64xbf16, slots 1>
  roles {
    role consumer0 warps=4 registers=240 {
      %c0 = full 0 : i32
      %c1 = full 1 : i32
      %c3 = full 3 : i32
      %z = full 0.0 : tile<64x64xf32>
      %0, %1 = for %k in %c0..%c3 step %c1 carry (%acc = %z, %round = %c0) {
        %c2 = full 2 : i32
        %2 = rem %round, %c2 : i32
        %3 = div %round, %c2 : i32
        %4 = and %3, %c1 : i32
        wait %a_full[%2], %4
        %a_1 = slot %a0[%2] : shared<64x32xbf16>
        %b_2 = slot %b_1[%2] : shared<64x32xbf16>
        %5 = transpose_shared %b_2 : shared<32x64xbf16>
        %d = dot_async %a_1, %5 acc=%acc : tile<64x64xf32>
        %d_1 = dot_wait %d : tile<64x64xf32>
        arrive %a_empty[%2]
        %6 = add %round, %c1 : i32
        yield %d_1, %6
      }
      %w = cast %0 : tile<64x64xbf16>
      %c2_1 = full 2 : i32
      %7 = mul %c0, %c2_1 : i32
      store_wait 0
      %o_1 = slot %o0[%c0] : shared<64x64xbf16>
      store_shared %o_1, %w
      fence_shared
      async_store %o[tile(%7, 64), tile(%c0, 64)] <- %o_1
      store_wait 0
    }
    role consumer1 warps=4 registers=240 {
      %c0_1 = full 0 : i32
      %c1_1 = full 1 : i32
      %c3_1 = full 3 : i32
      %z_1 = full 0.0 : tile<64x64xf32>
      %8, %9 = for %k_1 in %c0_1..%c3_1 step %c1_1 carry (%acc_1 = %z_1, %round_1 = %c0_1) {
        %c2_2 = full 2 : i32
        %10 = rem %round_1, %c2_2 : i32
        %11 = div %round_1, %c2_2 : i32
        %12 = and %11, %c1_1 : i32
        wait %a_full[%10], %12
        %a_2 = slot %a1[%10] : shared<64x32xbf16>
        %b_3 = slot %b_1[%10] : shared<64x32xbf16>
        %13 = transpose_shared %b_3 : shared<32x64xbf16>
        %d_2 = dot_async %a_2, %13 acc=%acc_1 : tile<64x64xf32>
        %d_3 = dot_wait %d_2 : tile<64x64xf32>
        arrive %a_empty[%10]
        %14 = add %round_1, %c1_1 : i32
        yield %d_3, %14
      }
      %w_1 = cast %8 : tile<64x64xbf16>
      %c2_3 = full 2 : i32
      %15 = mul %c0_1, %c2_3 : i32
      %16 = add %15, %c1_1 : i32
      store_wait 0
      %o_2 = slot %o1[%c0_1] : shared<64x64xbf16>
      store_shared %o_2, %w_1
      fence_shared
      async_store %o[tile(%16, 64), tile(%c0_1, 64)] <- %o_2
      store_wait 0
    }
    role producer warps=1 registers=24 {
      %c0_2 = full 0 : i32
      %c1_2 = full 1 : i32
      %c3_2 = full 3 : i32
      %17 = for %k_2 in %c0_2..%c3_2 step %c1_2 carry (%round_2 = %c0_2) {
        %c2_4 = full 2 : i32
        %18 = rem %round_2, %c2_4 : i32
        %19 = div %round_2, %c2_4 : i32
        %20 = and %19, %c1_2 : i32
        %21 = xor %20, %c1_2 : i32
        wait %a_empty[%18], %21
        expect %a_full[%18] bytes=12288
        %22 = mul %c0_2, %c2_4 : i32
        %23 = add %22, %c0_2 : i32
        %a_3 = slot %a0[%18] : shared<64x32xbf16>
        async_load %a[tile(%23, 64), tile(%k_2, 32)] -> %a_3, %a_full[%18]
        %24 = add %22, %c1_2 : i32
        %a_4 = slot %a1[%18] : shared<64x32xbf16>
        async_load %a[tile(%24, 64), tile(%k_2, 32)] -> %a_4, %a_full[%18]
        %b_4 = slot %b_1[%18] : shared<64x32xbf16>
        async_load %b[tile(%c0_2, 64), tile(%k_2, 32)] -> %b_4, %a_full[%18]
        %25 = add %round_2, %c1_2 : i32
        yield %25
      }
    }
  }
}
"""


def test_seven_blocks_take_the_tiles_of_a_product_in_bands():
    """Of four rows, as the tiles of the right operand have twice the bytes; the last band has two."""
    kernel = dce.run(cse.run(persist(parse_kernel(GRID), 7, machine().cache)))
    verify(kernel)
    assert print_kernel(kernel) == BLOCKS


@pytest.mark.parametrize(
    ("tile", "rows"), [((128, 256, 64), 16), ((256, 128, 64), 8), ((128, 128, 64), 8), ((64, 128, 64), 16)], ids=str
)
def test_a_wave_of_tiles_is_about_square(tile, rows):
    """128 tiles of 128 x 256 are 2048 x 2048 elements of a result, in 16 rows."""
    assert bands(tk.matmul(8192, 8192, 256, tile=tile), 128) == Bands(1, 2, rows)


def test_bands_of_tiles_of_half_a_byte():
    kernel = parse_kernel("""kernel @k(%a: ref<4xi4>, %b: ref<4x64xi32>, %o: ref<4x4x16xi32, out>) grid(4, 4) {
      %i = program_id 0
      %j = program_id 1
      %c0 = full 0 : i32
      %s = load %a[%i] : i4
      %n = cast %s : i32
      %y = load %b[tile(%c0, 4), tile(%j, 16)] : tile<4x16xi32>
      %x = broadcast %n dims=() : tile<4x4xi32>
      %d = dot %x, %y precision="default" : tile<4x16xi32>
      store %o[%i, tile(%c0, 4), %j:+16], %d
    }""")
    assert bands(kernel, 4).rows == 4  # of 32 that would be as wide as high


def test_bands_count_both_matrices_of_a_gated_layer():
    assert bands(tk.gated(4096, 14336, 256, tile=(128, 128, 64)), 128) == Bands(0, 1, 16)


@pytest.mark.parametrize(("m", "height", "rows"), [(4096, 22, 11), (8192, 43, 15), (1536, 8, 8), (3264, 17, 9)])
def test_no_band_is_much_lower_than_the_others(m, height, rows):
    """Where a wave of tiles is square in 16 rows, 22 rows are two bands of 11, not 16 and 6."""
    kernel = tk.gated(m, 14336, 256, tile=(192, 128, 64))
    assert kernel.grid[0] == height
    assert bands(kernel, 130) == Bands(0, 1, rows)


def test_every_tile_has_a_block_of_its_own():
    kernel = persist(parse_kernel(GRID), 100, machine().cache)
    verify(kernel)
    assert kernel.grid == (100,)
    assert not any(op.mnemonic == "for" for op in kernel.body.walk())


def test_a_producer_and_two_consumers():
    """Two slots; products are waited for at once, and a slot is given back right behind its last use."""
    kernel = parse_kernel(PRODUCT)
    chosen = plan(kernel, machine(), Wish(stages=2))
    made = dce.run(cse.run(specialise(persist(kernel, 1, machine().cache), chosen)))
    verify(made, "block")
    assert print_kernel(made) == ROLES


def numbers(make) -> list[int]:
    """What scalar values are that `make` builds."""
    b = Builder()
    wanted = make(b)
    found = {}
    for op in b.block.ops:
        found[op.result] = op.reference(*(found[v] for v in op.operands()))
    return [int(found[v]) for v in wanted]


def test_long_tiles_first():
    """Causal attention: the last queries see the most keys. Two heads are worked on together."""
    kernel = tk.attention(512, 512, heads=4, window=(None, 0))
    order = uneven(kernel, 2 * 512 * 64 * 2 * 2 // 4)
    assert order == Uneven(axis=2, grows=True, group=2)
    taken = [numbers(lambda b, t=t: ids(b, kernel.grid, b.index(t), order))[1:] for t in range(16)]
    assert taken == [[h + two, i] for h in (0, 2) for i in (3, 2, 1, 0) for two in (0, 1)]
    assert uneven(tk.attention(512, 512), 1 << 20) is None
    assert uneven(tk.grouped(256, 4, 64, 96), 1 << 20) is None  # sizes that are loaded


@pytest.mark.parametrize(
    ("options", "blocks", "right"),
    [
        ({}, 3, True),
        ({"lengths": True}, 3, False),
        ({"t": 448}, 3, True),
        ({"t": 448}, 1, False),
        ({"t": 1024, "window": (300, 0)}, 3, False),
    ],
    ids=["pairs", "lengths that are loaded", "few tiles", "many tiles, one without a partner", "most are as long"],
)
def test_where_blocks_have_as_much_to_do(options, blocks, right):
    t = options.pop("t", 512)
    kernel = tk.attention(t, max(t, 512), heads=2, tile=(64, 64), **{"window": (None, 0), **options})
    order = uneven(kernel, 1 << 20)
    assert order is not None
    assert balances(kernel, order, blocks) is right


def place_of(grid, turn, block, blocks, order, b):
    return shared(b, grid, b.index(turn), b.index(block), blocks, order)


@pytest.mark.parametrize(
    ("grid", "grows", "blocks", "most"),
    [((2, 8, 8), True, 7, 1.03), ((1, 16, 16), False, 12, 1.02), ((3, 2, 7), True, 5, 1.03), ((1, 1, 4), True, 3, 1.2)],
)
def test_blocks_have_as_much_to_do(grid, grows, blocks, most):
    """Every program is taken once; the sums of what lasts 1 .. n differ little among the blocks."""
    axis, n = 2, grid[2]
    taken, work = [], [0] * blocks
    for t in range(math.prod(grid)):
        turn, block = divmod(t, blocks)
        at = functools.partial(place_of, grid, turn, block, blocks, Uneven(axis, grows, 2))
        ids = numbers(at)
        taken.append(tuple(ids))
        work[block] += ids[axis] + 1 if grows else n - ids[axis]
    assert sorted(taken) == list(itertools.product(*map(range, grid)))
    assert max(work) <= most * sum(work) / blocks
