"""Blocks that take several tiles of unknown length get tiles from all over an axis of the grid."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from machines import machine

from jtile.interpret import interpret
from jtile.ir import If, Load, parse_kernel, verify
from jtile.lowering.triton.block.passes import steps
from jtile.lowering.triton.block.passes.persist import persist
from jtile.ops.flex_lists import listed_attention
from jtile.testing import relative_error

PLACES = """kernel @places(%o: ref<5x7x32xi32, out>) grid(5, 7, 32) {
  %b = program_id 0
  %h = program_id 1
  %i = program_id 2
  %c1000 = full 1000 : i32
  %x = mul %b, %c1000 : i32
  %y = add %x, %i : i32
  store %o[%b, %h, %i], %y
}"""


@pytest.mark.parametrize("blocks", [132, 13, 1])
def test_every_tile_is_taken_once(blocks):
    kernel = parse_kernel(PLACES)
    mixed = persist(kernel, blocks, machine().cache, mixed=True)
    verify(mixed)
    assert mixed.grid == (blocks,)
    assert np.array_equal(interpret(mixed, [])[0], interpret(kernel, [])[0])  # which refuses what is written twice


def test_a_block_has_tiles_of_all_lengths():
    """132 blocks have the same places modulo four otherwise, and documents of four tiles of queries are frequent."""
    tiles = np.arange(1024)
    rest, place = np.divmod(tiles, 32)
    moved = (place + rest * 32 // 128) % 32  # as the pass computes it
    most = lambda length, place: np.bincount(tiles % 132, length[place], 132).max() / (length.mean() * 1024 / 132)
    documents, causal = np.arange(32) % 4 + 1, np.arange(32) + 1
    assert most(documents, place) > 1.6
    assert most(documents, moved) < 1.05
    assert most(causal, moved) < 1.3


def test_attention_by_lists():
    """Documents of different lengths, whole blocks first; a tile without keys; results by the loop of several tiles."""
    q = jax.ShapeDtypeStruct((2, 384, 2, 64), jnp.bfloat16)
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    options = {"scale": 0.125, "softcap": None, "score": None, "window": (None, None), "dropout": 0.0, "save": False}
    mask = lambda b, h, i, j, x: (j <= i) & (x[b, i] == x[b, j])
    kernel = listed_attention.lower(
        q, q, q, (of(2, 384),), of(1, 1, 3, 6), of(1, 1, 3, 2), None, mask=mask, bq=128, bk=64, **options
    ).kernel
    rng = np.random.default_rng(0)
    x = [np.asarray(jnp.asarray(rng.standard_normal(q.shape), jnp.bfloat16)) for _ in range(3)]
    lists = np.array([[0, 1, 2, 3, 4, 5], [1, 2, 3, 0, 4, 5], [3, 0, 4, 5, 1, 2]], np.int32)[None, None]
    counts = np.array([[0, 2], [1, 3], [2, 4]], np.int32)[None, None]
    x += [np.stack([np.arange(384) // 100, np.arange(384) // 50]).astype(np.int32), lists, counts]
    planned = steps(kernel, machine(processors=3), {"persistent": True})
    assert planned.plan.mixed and ", mixed" in str(planned.plan)
    want = interpret(kernel, x)[0].astype(np.float32)
    loads = [op for op in planned.kernel.body.walk() if isinstance(op, Load) and op.ref is planned.kernel.inputs[3]]
    branches = [op for op in planned.kernel.body.walk() if isinstance(op, If)]
    inside = {op for b in branches for side in (b.then, b.orelse) for op in side.ops}
    assert loads and inside.issuperset(loads)  # what only a mask needs is read where there is one
    for seed in range(2):
        got = interpret(planned.kernel, x, seed=seed)[0].astype(np.float32)
        assert relative_error(got, want) < 1e-2
