"""Equal shares of the keys of many rows: every unit has one part, whatever the lengths are."""

import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile.ops.hopper_shares import Units, share_of


@jt.kernel(
    out_type=lambda lengths, *, parts, **_: jt.like(lengths, shape=(parts, 5)), grid=lambda *_, parts, **__: parts
)
def shares(lengths, o, *, parts: int, units: Units):
    for k, x in enumerate(share_of(lengths, jt.program_id(0), parts, units)):
        o[jt.program_id(0), k] = x


@pytest.mark.parametrize("lengths", [(1000, 0, 129, 1, 1024), (7,), (5000,) * 5, tuple(range(0, 1300, 5))], ids=len)
@pytest.mark.parametrize(("parts", "heads"), [(1, 1), (7, 1), (5, 3)])
def test_every_unit_has_one_part(lengths, parts, heads):
    units = Units(slots=1024, size=128, heads=heads)
    of_row = [max(-(-min(n, 1024) // 128), 1) for n in lengths for _ in range(heads)]
    begins = np.cumsum([0, *of_row])
    seen = []
    for begin, end, row, start, size in np.asarray(
        shares.interpret(jnp.array(lengths, jnp.int32), parts=parts, units=units)
    ):
        assert begin == end or (start == begins[row] and start <= begin < begins[row + 1])
        assert end - begin == size or end == begins[-1]
        seen += range(begin, end)
    assert seen == [*range(begins[-1])]
