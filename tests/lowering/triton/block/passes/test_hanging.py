"""Tiles whose rows hang over their array come in boxes that hardly do: text out, and the same results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tile_kernels as tk
from machines import machine

import jtile as jt
from jtile.interpret import interpret
from jtile.ir import AsyncLoad, Kernel, SliceShared, Span, print_kernel
from jtile.lowering.triton.block.passes import NoPlan, steps

S = jax.ShapeDtypeStruct


def planned(kernel: Kernel) -> Kernel:
    return tk.block_level(kernel, 3)


def boxes(kernel: Kernel, name: str = "a") -> set[tuple[int, ...]]:
    """The shapes of what is copied of an array."""
    copies = [op for op in kernel.body.walk() if isinstance(op, AsyncLoad) and op.ref.name == name]
    return {op.buffer.type.shape for op in copies}


@pytest.mark.parametrize(
    ("m", "tile", "rows"),
    [
        (200, (64, 64, 32), 16),  # 56 rows of the last tile are outside
        (96, (64, 64, 32), 32),
        (144, (192, 64, 32), 16),
        (64, (128, 64, 32), 64),  # the second consumer has no rows
        (120, (64, 64, 32), 64),  # 8 rows are too few to care
        (128, (64, 64, 32), 64),
    ],
)
def test_rows_of_a_box(m, tile, rows):
    assert boxes(planned(tk.matmul(m, 80, 72, tile=tile))) == {(rows, 32)}


def test_boxes_that_are_outside_bring_rows_from_inside():
    made = planned(tk.matmul(72, 64, 64, tile=(64, 64, 32)))
    text = print_kernel(made)
    (first, *_) = [op for op in made.body.walk() if isinstance(op, AsyncLoad) and op.ref.name == "a"]
    assert isinstance(first.index[1], Span), text
    assert first.index[1].size == 16
    assert len([op for op in made.body.walk() if isinstance(op, SliceShared)]) == 4, text


@pytest.mark.parametrize(("terms", "rows"), [(128, 16), (256, 64)])
def test_rows_of_more_than_256_bytes_are_many_boxes_already(terms, rows):
    assert boxes(planned(tk.matmul(40, 64, 512, tile=(64, 64, terms)))) == {(rows, terms)}


def test_a_left_operand_whose_rows_lie_along_lines_of_memory_comes_as_it_is():
    assert boxes(planned(tk.matmul(72, 64, 64, tile=(64, 64, 32), ta=True))) == {(32, 64)}


def test_many_rows_of_tiles_come_as_they_are():
    """The last row of tiles is a small share of them."""
    assert boxes(planned(tk.matmul(264, 64, 64, tile=(64, 64, 32)))) == {(64, 32)}


def test_rows_that_are_no_numbers_spoil_no_others():
    """The first rows come in place of those outside."""
    kernel = tk.matmul(72, 64, 64, tile=(64, 64, 32))
    a, b = tk.operands(kernel)
    a = np.array(a)
    a[:, :16] = np.nan
    a[:, 1] = np.inf
    found = steps(kernel, machine(processors=3), {})
    want, got = (np.asarray(interpret(x, [a, b])[0], np.float32) for x in (kernel, found.kernel))
    np.testing.assert_array_equal(got, want)
    assert np.isfinite(got[:, 16:]).all()


def test_batches_bias_and_saved_sums():
    made = tk.matmul(72, 80, 64, tile=(64, 64, 32), batch=2, bias=True, activation="silu", save=True)
    assert boxes(planned(made)) == {(16, 32)}


def lowered(body, n: int, *more, grid: int = 2) -> Kernel:
    made = jt.kernel(out_type=S((n, 64), jnp.float32), grid=grid, init=0)(body)
    return made.lower(S((72, 64), jnp.bfloat16), S((64, 64), jnp.bfloat16), *more).kernel


@jt.function
def summed(a, b, i):
    acc = jnp.zeros((64, 64), jnp.float32)
    for k in jt.range(2):
        acc = jt.dot(a.tiles(64, 32)[i, k], b.tiles(32, 64)[k, 0], acc)
    return acc


def with_row_vectors(a, b, v, o):
    i = jt.program_id(0)
    o.tiles(64, 64)[i, 0] = summed(a, b, i) * v.tiles(64)[i][:, None]


def with_sums_of_rows(a, b, v, o):
    i = jt.program_id(0)
    acc = summed(a, b, i)
    o.tiles(64, 64)[i, 0] = jnp.where(acc > 0, acc, 0) - acc.sum(1)[:, None]


def with_a_mask(a, b, v, o):
    i = jt.program_id(0)
    rows, columns = i * 64 + jnp.arange(64), jnp.arange(64)
    jt.store(o, (rows[:, None], columns[None, :]), summed(a, b, i), mask=(rows < 72)[:, None])


def with_sums_over_rows(a, b, v, o):
    i = jt.program_id(0)
    o.tiles(1, 64)[i, 0] = summed(a, b, i).sum(0)[None, :]


def added_where_an_array_says(a, b, v, o):
    i = jt.program_id(0)
    rows, columns = v.tiles(64)[i].astype(jnp.int32), jnp.arange(64)
    jt.atomic_add(o, (rows[:, None], columns[None, :]), summed(a, b, i))


def stored_in_other_rows(a, b, v, o):
    i = jt.program_id(0)
    o.tiles(64, 64)[1 - i, 0] = summed(a, b, i)


def asserted(a, b, v, o):
    i = jt.program_id(0)
    acc = summed(a, b, i)
    jt.assert_(acc < 1e30, "large")
    o.tiles(64, 64)[i, 0] = acc


def product(a, b, i, acc=None):
    """Of the first 32 terms."""
    return jt.dot(a.tiles(64, 32)[i, 0], b.tiles(32, 64)[0, 0], acc)


def carried_to_other_rows(a, b, v, o):
    acc = jnp.zeros((64, 64), jnp.float32)
    for t in jt.range(2):
        i = 1 - t
        acc = product(a, b, i, acc)
        o.tiles(64, 64)[i, 0] = acc


def carried_there_and_back(a, b, v, o):
    before = jnp.zeros((64, 64), jnp.float32)
    for t in jt.range(3):
        i = t % 2
        now = product(a, b, i)
        o.tiles(64, 64)[i, 0] = now + before
        before = now


def carried_while_rows_are_left(a, b, v, o):
    acc, i = jnp.zeros((64, 64), jnp.float32), jnp.int32(1)
    for _ in jt.range(2):
        acc = product(a, b, i, acc)
        o.tiles(64, 64)[i, 0] = acc
        i = i - 1


def one_tile_after_the_other(a, b, v, o):
    for t in jt.range(2):
        o.tiles(64, 64)[1 - t, 0] = summed(a, b, 1 - t)


ROWS = S((72,), jnp.float32)


@pytest.mark.parametrize("body", [with_row_vectors, with_sums_of_rows])
def test_zeros_that_nobody_needs(body):
    assert boxes(planned(lowered(body, 72, ROWS))) == {(16, 32)}


@pytest.mark.parametrize(
    ("body", "rows"),
    [
        (with_a_mask, 72),
        (with_sums_over_rows, 2),
        (added_where_an_array_says, 100),
        (stored_in_other_rows, 128),
        (with_row_vectors, 128),  # an array with more rows
        (asserted, 72),
    ],
)
def test_zeros_that_may_be_needed_come(body, rows):
    found = steps(lowered(body, rows, ROWS), machine(processors=3), {})
    if isinstance(found, NoPlan):
        pytest.fail(str(found))
    assert boxes(found.kernel) == {(64, 32)}


@pytest.mark.parametrize(
    ("body", "rows"),
    [
        (carried_to_other_rows, 64),
        (carried_there_and_back, 64),
        (carried_while_rows_are_left, 64),
        (one_tile_after_the_other, 16),  # nothing goes from one to the other
    ],
)
def test_zeros_that_a_loop_carries_to_other_rows_come(body, rows):
    """What a round makes of rows outside is added to rows inside by a later one."""
    assert boxes(planned(lowered(body, 72, ROWS, grid=1))) == {(rows, 32)}
