"""The family of the soak whose kernels are convolutions by boxes of points."""

from __future__ import annotations

import jax.numpy as jnp
from soak import Case, Draw, both, gradients_of, text

from jtile import ops
from jtile.ops.convolution_points import points_of
from jtile.ops.convolutions import convolution_reference, convolution_transpose_reference

KERNELS = ("hopper_convolution", "hopper_convolution_sums")


def convolutions(draw: Draw) -> Case:
    """A convolution or a transposed one, and its gradients by both operands."""
    dtype, rank, turned = draw.of("bfloat16", "float16"), draw.of(2, 1, 2, 3), draw.chance(0.4)
    groups, steps = draw.of(1, 1, 2), (1,) * rank
    stride = tuple(draw.of(1, 1, 2, 3) for _ in steps) if rank < 3 else steps
    window = tuple(draw.of(2, 1, 3, 4) for _ in steps)
    dilation = tuple(draw.of(1, 1, 2) for _ in steps)
    line = 16 if groups > 1 or stride[-1] > 1 else 8
    channels, outputs = (groups * draw.size(16, n, line, small=24) for n in (200, 300))
    pads = tuple((draw.of(0, 1), draw.of(1, 0)) for _ in steps)
    reach = [(k - 1) * d + 1 for k, d in zip(window, dilation)]
    sides = tuple(-(-max(draw.size(5, 400 // 12**rank + 20), n) // s) * s for n, s in zip(reach, stride))
    images = draw.size(1, 40, small=2)
    options = {"stride": stride, "dilation": dilation, "groups": groups, "padding": pads}
    points = points_of(sides, window, stride, dilation, pads)
    shapes = (images, *points, outputs), (images, *sides, channels), (*window, channels // groups, outputs)
    op, reference = both(ops.convolution, convolution_reference, **options)
    if turned:  # of the cotangents, whose sides are those of a whole number of strides
        op, reference = both(ops.convolution_transpose, convolution_transpose_reference, **options)
        wide = zip(points, window, stride, dilation, pads, strict=True)
        whole = tuple((m - 1) * s + (k - 1) * d + 1 - lo - hi for m, k, s, d, (lo, hi) in wide)
        shapes = (images, *whole, channels), shapes[0], shapes[2]
    what = text("convolution_transpose" if turned else "convolution", x=shapes[1], w=shapes[2], dtype=dtype, **options)
    return Case(
        gradients_of(op, 2), lambda *arrays: _in_float32(reference, *arrays),
        lambda: tuple(draw.numbers(*shape, dtype=dtype) for shape in shapes), what,
        {"bfloat16": 5e-3, "float16": 6e-4}[dtype], KERNELS, level=None,
    )  # fmt: skip


def _in_float32(reference, ct, *operands):
    wide = [z.astype(jnp.float32) for z in (ct, *operands)]
    return tuple(z.astype(ct.dtype) for z in gradients_of(reference, 2)(*wide))
