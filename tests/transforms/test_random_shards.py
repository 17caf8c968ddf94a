"""Random kernels and their reverse modes, cut along every factor: the shards give what the whole kernel gives."""

import jax
import numpy as np
from draws import draws
from hypothesis import given
from random_gradients import gradient_kernels
from random_kernels import kernels
from shards import run_shards

from jtile import ir
from jtile.interpret import interpret
from jtile.transforms.factors import factors
from jtile.transforms.localise import localise


def check_all_cuts(kernel, arrays, tolerance):
    found, whole = factors(kernel), None
    n_in, n_out = len(kernel.inputs), len(kernel.outputs)
    names = [tuple(f and f.name for f in found.of(k)) for k in range(n_in + n_out)]
    for factor in found.factors:
        parts = next((p for p in (2, 3, 5) if factor.cuts(p) is not None), None)
        if parts is None:
            continue
        local = localise(found, {factor.name: parts})
        ir.verify(local, "tile")
        sums = [{factor.name} if o in factor.partial else set() for o in range(n_out)]
        whole = interpret(kernel, arrays, seed=0) if whole is None else whole
        shapes = [v.shape for v in kernel.outputs]
        got = run_shards(local, arrays, names[:n_in], names[n_in:], sums, shapes, {factor.name: parts})
        for a, b in zip(got, whole, strict=True):
            np.testing.assert_allclose(a, np.asarray(b, np.float64), rtol=tolerance, atol=tolerance)


@draws(25)
@given(kernels())
def test_random_tile_ir(case):
    check_all_cuts(case.kernel, case.inputs, 2e-2)


@draws(12)
@given(gradient_kernels())
def test_random_kernels_and_their_reverse_modes(case):
    lowered = case.define().lower(*case.args)
    arrays = [np.asarray(x) for x in jax.tree.leaves(case.args)]
    check_all_cuts(lowered.program.kernel, arrays, 2e-2)
    back = lowered.vjp().program.kernel
    rng = np.random.default_rng(len(case.source))
    more = [rng.uniform(-1, 1, v.shape).astype(v.type.info.numpy) for v in back.inputs[len(arrays) :]]
    check_all_cuts(back, arrays + more, 2e-2)
