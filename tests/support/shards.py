"""Runs the kernel of a shard once for each shard, in the interpreter, and puts the results together."""

from __future__ import annotations

import itertools

import numpy as np

from jtile.interpret import interpret


def run_shards(local, arrays, inputs, outputs, sums, shapes, parts):
    """What the shards of a kernel give together, in float64.

    Args:
      local: the kernel of one shard.
      arrays: operands of the whole kernel.
      inputs, outputs: per array, the factor of each dimension, or None.
      sums: per output, the factors whose shards are summed.
      shapes: of the whole outputs.
      parts: shards along each factor.
    """

    def place(dims, shape, at):
        cut = lambda d, n: slice(at[d] * n // parts[d], (at[d] + 1) * n // parts[d]) if d in parts else slice(None)
        return tuple(cut(d, n) for d, n in zip(dims, shape, strict=True))

    outs = [np.zeros(shape, np.float64) for shape in shapes]
    for counts in itertools.product(*map(range, parts.values())):
        at = dict(zip(parts, counts, strict=True))
        mine = [np.array(x[place(d, x.shape, at)]) for x, d in zip(arrays, inputs, strict=True)]
        results = interpret(local, mine, seed=0)
        for out, y, dims, summed in zip(outs, results, outputs, sums, strict=True):
            spot, y = place(dims, out.shape, at), np.asarray(y, np.float64)
            if not any(at[n] for n in set(parts) - set(dims) - set(summed)):
                out[spot] += y
            elif not set(summed) & set(parts):  # a copy of what another shard gives
                np.testing.assert_array_equal(out[spot], y)
    return outs
