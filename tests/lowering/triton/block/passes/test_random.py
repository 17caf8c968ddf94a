"""Random kernels: the block level gives what the tile level gives, whoever comes first."""

import numpy as np
import pytest
from draws import thorough
from random_blocks import case

from jtile import passes
from jtile.interpret import interpret
from jtile.lowering.triton.block.passes import NoPlan, steps
from jtile.primitive import lowering

SEEDS, CHUNK = 32, 8


def tile_level(c):
    (piece,) = lowering.pieces_of(c.kernel.lower(*c.inputs).program).kernels
    piece = passes.run_pipeline(piece, passes.TILE)
    names = [v.name for v in c.kernel.lower(*c.inputs).kernel.inputs]
    return piece, [c.inputs[names.index(v.name)] for v in piece.inputs]


def agrees(seed: int) -> bool:
    """Compare a kernel with its plan; false where it has none."""
    c = case(seed)
    piece, inputs = tile_level(c)
    planned = steps(piece, c.machine, c.options)
    if isinstance(planned, NoPlan):
        return False
    (want,) = interpret(piece, inputs)
    for turns in range(2) if thorough() else [seed % 2]:
        (got,) = interpret(planned.kernel, inputs, seed=turns)
        np.testing.assert_array_equal(got, want, err_msg=f"random{seed}, turns {turns}")
    return True


@pytest.mark.parametrize("chunk", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in range(1, SEEDS // CHUNK))])
def test_random_kernels(chunk):
    assert sum(map(agrees, range(chunk * CHUNK, (chunk + 1) * CHUNK))) >= CHUNK // 3
