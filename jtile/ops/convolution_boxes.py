"""Which convolutions, and gradients of them, Hopper computes by boxes of points (`hopper_convolution`), and how."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import gpu_tiles
from jtile.ops.convolution_box_forms import box_of, form_of, sum_form_of
from jtile.ops.convolution_points import Pads, Sides, points_of
from jtile.ops.dispatch import first_unmet
from jtile.ops.hopper_convolution import ROWS, Axis, Form, hopper_convolution
from jtile.ops.hopper_convolution_sums import hopper_convolution_sums

_RANK = 5  # axes of a tensor map


# -- axes --------------------------------------------------------------------------------------------------------------


def axes_of(sides: Sides, window: Sides, stride: Sides, dilation: Sides, pads: Pads) -> tuple[Axis, ...]:
    """The axes of a convolution."""
    points = points_of(sides, window, stride, dilation, pads)
    every = zip(points, window, stride, dilation, pads, strict=True)
    return tuple(Axis(n, k, (k,), (0,), (-lo,), step=d, stride=s) for n, k, s, d, (lo, _) in every)


def axes_of_dx(sides: Sides, window: Sides, stride: Sides, dilation: Sides, low: Sides) -> tuple[Axis, ...]:
    """The axes of what turns cotangents of a convolution into those of its x, which has these sides."""
    return tuple(map(_axis_of_dx, sides, window, stride, dilation, low))


def _axis_of_dx(side: int, window: int, stride: int, dilation: int, low: int) -> Axis:
    # dx[s u + r] = sum_k g[u + (r + low - d a) / s] w[a]     a = first_r + every k: d a = r + low modulo s
    every = stride // math.gcd(stride, dilation)
    fits = lambda r: [a for a in range(window) if (dilation * a - r - low) % stride == 0]
    first = [next(iter(fits(r)), 0) for r in range(stride)]
    return Axis(
        points=jt.cdiv(side, stride),
        window=window,
        counts=tuple(len(fits(r)) for r in range(stride)),
        first=tuple(first),
        starts=tuple((r + low - dilation * a) // stride for r, a in enumerate(first)),
        every=every,
        step=-(dilation * every // stride),
    )


def _apart(x, axes: tuple[Axis, ...]):
    """x as the remainders of its points by the strides, as `hopper_convolution` takes it."""
    inner = [(n // a.stride, a.stride) if a.stride > 1 else (n,) for n, a in zip(x.shape[1:-2], axes)]
    last = axes[-1].stride
    return x.reshape(x.shape[0], *itertools.chain(*inner), x.shape[-2] // last, last * x.shape[-1])


# -- small groups ------------------------------------------------------------------------------------------------------


def together(groups: int, channels: int, outputs: int) -> int:
    """How many groups of so many channels and outputs make one, whose weight has zeros where they do not meet: products
    of 64 terms and columns are as quick as those of few, and their operands come in rows of 128 bytes."""
    most = ROWS // max(channels, outputs) if min(channels, outputs) >= 4 else 1
    return max(n for n in range(1, max(most, 1) + 1) if groups % n == 0)


def _own(w_outputs: int, groups: int, many: int) -> jax.Array:
    """Which of `many` groups that are one each output is of: [many, 1, outputs]."""
    group = jnp.arange(w_outputs) // (w_outputs // groups)
    return ((group % many)[None, :] == jnp.arange(many)[:, None])[:, None]


def _spread(w, groups: int):
    """A weight [..., c / groups, o] as that of fewer groups, and how many these are."""
    *window, channels, outputs = w.shape
    many = together(groups, channels, outputs // groups)
    if many == 1:
        return w, groups
    own = jnp.expand_dims(_own(outputs, groups, many), range(len(window)))
    whole = jnp.where(own, w[..., None, :, :], jnp.zeros((), w.dtype))
    return whole.reshape(*window, many * channels, outputs), groups // many


def _fewer(groups: int, channels: int, outputs: int) -> int:
    """How many groups there are when small ones are one, of so many channels and outputs of all."""
    return groups // together(groups, channels // groups, outputs // groups)


# -- what fits ---------------------------------------------------------------------------------------------------------


def _misfit(x, others, axes: tuple[Axis, ...], sizes: Sides, groups: int) -> str | None:
    """Why boxes of points do not compute what has these axes, and channels and outputs (`sizes`) of all groups."""
    channels, strides = x.shape[-1], [a.stride for a in axes]
    lines = all(n % (8 * groups) == 0 for n in sizes)
    steps = sum(s > 1 for s in strides[:-1]) + sum(a.phases > 1 for a in axes[:-1])
    return first_unmet(
        (
            x.dtype in (jnp.bfloat16, jnp.float16) and others.dtype == x.dtype,
            "the operands are not 16-bit floats alike",
        ),
        (gpu_tiles.on_one_device(), "images may be shared out among several devices"),
        (lines, f"{sizes[0]} channels or {sizes[1]} outputs are no lines of copies"),
        (min(sizes) // groups >= 16, "there are few channels"),
        (groups == 1 or all(n // groups % 16 == 0 for n in sizes), "channels of groups are no parts of 16"),
        (len(axes) + 2 + steps <= _RANK, "points that are apart are of more axes than a tensor map has"),
        (all(n % s == 0 for n, s in zip(x.shape[1:-1], strides)), "the stride does not divide the sides of x"),
        (strides[-1] == 1 or channels // groups % 16 == 0, "channels of neighbouring points would meet"),
    )


_FEWEST = 64  # boxes of points that are worth sums of their own


def _form(images: int, axes: tuple[Axis, ...], outputs: int, terms: int, groups: int) -> Form:
    """The form of what has these axes, and outputs and terms of a group."""
    sides = images, *(a.points for a in axes)
    return form_of(sides, outputs, terms, groups, axes, gpu_tiles.processors())[0]


def _known(*arrays) -> bool:
    return all(isinstance(n, int) and n > 0 for array in arrays for n in array.shape)


# -- what runs ---------------------------------------------------------------------------------------------------------


def _of_images(run, *operands):
    """`run` of arrays, of which the first has images and the others have none: under `jax.vmap` an axis of the first
    alone is one of more images, since tensor maps have no axis to spare, and others are taken one after the other."""
    mapped = jax.custom_batching.custom_vmap(run)

    @mapped.def_vmap
    def rule(size, batched, first, *others):
        if size and batched[0] and not any(batched[1:]):
            y = _of_images(run, first.reshape(-1, *first.shape[2:]), *others)
            return y.reshape(size, -1, *y.shape[1:]), True
        return _one_by_one(run, size, batched, first, *others)

    return mapped(*operands)


def _one_by_one(run, size: int, batched, *operands):
    """`run` for each element of an axis in front of those that are `batched`."""
    every = [x if whole else jnp.broadcast_to(x, (size, *x.shape)) for x, whole in zip(operands, batched, strict=True)]
    return jax.lax.map(lambda one: _of_pairs(run, *one), tuple(every)), True


def _of_pairs(run, *operands):
    """`run` of arrays that are all taken one after the other under `jax.vmap`."""
    mapped = jax.custom_batching.custom_vmap(run)
    mapped.def_vmap(lambda size, batched, *x: _one_by_one(run, size, batched, *x))
    return mapped(*operands)


def convolved(x, w, **options) -> jax.Array:
    """The convolution of x [batch, *sides, c] with w [*window, c / groups, o]."""
    return _of_images(functools.partial(_convolved, **options), x, w)


def _convolved(x, w, *, stride: Sides, dilation: Sides, groups: int, pads: Pads):
    w, groups = _spread(w, groups)
    axes = axes_of(x.shape[1:-1], w.shape[:-2], stride, dilation, pads)
    *_, terms, outputs = w.shape
    form = _form(x.shape[0], axes, outputs // groups, terms, groups)
    run = hopper_convolution.with_options(**form.options)
    given = {"axes": axes, "form": form, "groups": groups, "turned": False}
    return run(_apart(x, axes), w.reshape(-1, terms, outputs), **given)


def not_convolved(x, w, *, stride: Sides, dilation: Sides, groups: int, pads: Pads) -> str | None:
    """Why `convolved` does not compute a convolution, None where it does and is the quickest."""
    if not _known(x, w):
        return "sizes are 0, or not known"
    axes = axes_of(x.shape[1:-1], w.shape[:-2], stride, dilation, pads)
    plain = math.prod(w.shape[:-2]) == 1 and {*stride} == {1} and not any(map(any, pads))
    if plain and groups == 1:
        return "it is a product of matrices"
    return _misfit(x, w, axes, (x.shape[-1], w.shape[-1]), _fewer(groups, x.shape[-1], w.shape[-1]))


def dx(g, w, *, shape: Sides, **options) -> jax.Array:
    """What `convolution_dx` gives for cotangents g and w [*window, c / groups, o]."""
    return _of_images(functools.partial(_dx, sides=shape[1:-1], **options), g, w)


def _dx(g, w, *, sides: Sides, stride: Sides, dilation: Sides, groups: int, low: Sides):
    w, groups = _spread(w, groups)
    axes = axes_of_dx(sides, w.shape[:-2], stride, dilation, low)
    *_, channels, outputs = w.shape
    form = _form(g.shape[0], axes, channels, outputs // groups, groups)
    run = hopper_convolution.with_options(**form.options)
    y = run(g, w.reshape(-1, channels, outputs), axes=axes, form=form, groups=groups, turned=True)
    y = y.reshape(g.shape[0], *(a.points * a.phases for a in axes), groups * channels)
    return y[(slice(None), *(slice(0, n) for n in sides))]


def not_dx(g, w, *, shape: Sides, stride: Sides, dilation: Sides, groups: int, low: Sides) -> str | None:
    """Why `dx` does not compute the cotangents of x, None where it does and is the quickest."""
    if not _known(g, w, jax.ShapeDtypeStruct(shape, g.dtype)):
        return "sizes are 0, or not known"
    axes = axes_of_dx(shape[1:-1], w.shape[:-2], stride, dilation, low)
    return _misfit(g, w, axes, (g.shape[-1], shape[-1]), _fewer(groups, shape[-1], g.shape[-1]))


def dw(x, g, **options) -> jax.Array:
    """The gradient [*window, c / groups, o] of the weight, in the dtype of x."""
    return _of_pairs(functools.partial(_dw, **options), x, g)


def _dw(x, g, *, window: Sides, stride: Sides, dilation: Sides, groups: int, pads: Pads):
    fewer = _fewer(groups, x.shape[-1], g.shape[-1])
    axes, channels = _axes_of_dw(x, g, window, stride, dilation, pads), x.shape[-1] // fewer
    sizes = g.shape[-1] // fewer, channels, math.prod(window), fewer
    form = sum_form_of(g.shape[:-1], *sizes, gpu_tiles.processors())
    run = hopper_convolution_sums.with_options(**form.options)
    sums = run(_apart(x, axes), g, axes=axes, form=form, groups=fewer)
    many = groups // fewer
    if many > 1:  # of channels and outputs of several groups, those of one
        sums = sums.reshape(*sums.shape[:2], many, channels // many, fewer, many, g.shape[-1] // groups)
        own = jnp.arange(many)
        sums = sums[:, :, own, :, :, own].transpose(1, 2, 3, 4, 0, 5)
        channels //= many
    dw = sums[0] if form.splits == 1 else sums.sum(0).astype(x.dtype)
    return dw.reshape(*window, channels, g.shape[-1])


def _axes_of_dw(x, g, window, stride, dilation, pads) -> tuple[Axis, ...]:
    axes = axes_of(x.shape[1:-1], window, stride, dilation, pads)
    return tuple(dataclasses.replace(a, points=n) for a, n in zip(axes, g.shape[1:-1], strict=True))


def not_dw(x, g, *, window: Sides, stride: Sides, dilation: Sides, groups: int, pads: Pads) -> str | None:
    """Why `dw` does not compute the gradient of the weight, None where it does and is the quickest."""
    if not _known(x, g):
        return "sizes are 0, or not known"
    axes, groups = _axes_of_dw(x, g, window, stride, dilation, pads), _fewer(groups, x.shape[-1], g.shape[-1])
    why = _misfit(x, g, axes, (x.shape[-1], g.shape[-1]), groups)
    channels, points = x.shape[-1] // groups, math.prod(g.shape[:-1])
    return why or first_unmet(
        (3 * jt.cdiv(channels, ROWS) * ROWS <= 4 * channels, f"{channels} channels fill little of their products"),
        (points >= _FEWEST * math.prod(box_of(g.shape[:-1])), "there are few points"),
    )
