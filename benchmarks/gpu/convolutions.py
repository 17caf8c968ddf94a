"""Convolutions against cuDNN, which XLA calls, and torch, channels last in memory."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import zoo
from benchmarks.backward import pulled
from benchmarks.gpu.case import Case, Torch, exact


@dataclasses.dataclass(frozen=True)
class _Line:
    """A convolution of the suite: how many images; the shapes of one, and of the window; options."""

    batch: int
    shape: tuple[int, ...]
    window: tuple[int, ...]
    options: dict[str, Any]

    @property
    def rank(self) -> int:
        """Axes along which the window moves, by torch: one along one axis is one along two, of which one side is 1,
        since that is quicker."""
        return max(2, len(self.shape) - 1)

    @property
    def transposed(self) -> bool:
        return self.options.get("transposed", False)

    @property
    def steps(self) -> dict[str, list[int]]:
        """Stride and dilation along each axis."""
        return {k: self._each(self.options.get(k, 1), 1) for k in ("stride", "dilation")}

    @property
    def around(self) -> list[int]:
        """Points of padding along each axis, at both ends together."""
        pad = self.options.get("padding")
        if pad is not None:
            return self._each(2 * pad, 0)
        sides, window = (self._axes(z) for z in (self.shape, self.window))
        every = zip(sides, window, *self.steps.values(), strict=True)
        over = [(k - 1) * d + 1 - (s if n % s == 0 else n % s) for n, k, s, d in every]
        return [max(n, 0) for n in over]

    def _each(self, value: int, other: int) -> list[int]:
        rank = len(self.shape) - 1
        return [other] * (self.rank - rank) + [value] * rank

    def _axes(self, shape: tuple[int, ...]) -> list[int]:
        rank = len(self.shape) - 1
        return [1] * (self.rank - rank) + [*shape[:rank]]


OF_MODELS = {  # what stands in models beside those of `zoo.CONVOLUTIONS`
    "3x3 of 512 channels": _Line(128, (7, 7, 512), (3, 3, 512, 512), {}),
    "1x1 of 512 channels, stride 2": _Line(64, (28, 28, 512), (1, 1, 512, 1024), {"stride": 2, "padding": 0}),
    "3x3 of 128 channels, stride 2": _Line(64, (56, 56, 128), (3, 3, 128, 128), {"stride": 2, "padding": 1}),
    "3x3 of 64 channels, 128x128": _Line(16, (128, 128, 64), (3, 3, 64, 64), {}),
    "3x3 of 512 channels, dilation 2": _Line(16, (33, 33, 512), (3, 3, 512, 512), {"dilation": 2}),
    "3x3 of 32 groups of 8 channels": _Line(64, (28, 28, 256), (3, 3, 8, 256), {"groups": 32}),
    "3x3 of 32 groups of 16 channels": _Line(64, (14, 14, 512), (3, 3, 16, 512), {"groups": 32}),
    "16x16 of 3 channels, stride 16": _Line(64, (224, 224, 3), (16, 16, 3, 768), {"stride": 16, "padding": 0}),
    "3 of 512 channels, stride 2": _Line(16, (3000, 512), (3, 512, 512), {"stride": 2, "padding": 1}),
    "depthwise 3x3 of 144 channels": _Line(64, (56, 56, 144), (3, 3, 1, 144), {"groups": 144}),
    "depthwise 3x3 of 144 channels, stride 2": _Line(
        64, (56, 56, 144), (3, 3, 1, 144), {"groups": 144, "stride": 2, "padding": 1}
    ),
    "depthwise 4 of 2048 channels": _Line(8, (2048, 2048), (4, 1, 2048), {"groups": 2048}),
}


def _lines(tiny: bool) -> dict[str, _Line]:
    first = {name: _Line(64, *of) for name, of in zoo.CONVOLUTIONS.items()}
    if not tiny:
        return first | OF_MODELS
    name = list(first)[2]
    return {name: dataclasses.replace(first[name], batch=1)}


def cases(tiny: bool = False) -> Iterator[Case]:
    for name, line in _lines(tiny).items():
        one = functools.partial(zoo.convolution_case, line.shape, line.window, line.options)
        make = lambda seed, one=one, line=line: one(line.batch, "bfloat16", seed)[2]
        ours, xla, args, flops = one(1, "bfloat16")
        given: dict[str, Any] = {"config": f"{line.batch} x {name}", "dtype": "bfloat16", "make": make}
        x, w, y = line.batch * args[0].size, args[1].size, line.batch * jax.eval_shape(ours, *args).size
        flops *= line.batch
        torch = {"torch": Torch(functools.partial(_convolution, line))}
        yield Case(
            "convolution", ours=ours, peers={"xla": xla, **torch}, reference=exact(xla), bytes=2 * (x + w + y),
            flops=flops, prepare={"torch": lambda x, w: (x, jnp.moveaxis(w, -1, 0))}, **given,
        )  # fmt: skip
        given["make"] = lambda seed, make=make, ours=ours: (jax.vjp(ours, *make(seed))[0], *make(seed))
        torch = {"torch": Torch(functools.partial(_gradient, line))}
        yield Case(
            "convolution_gradient", ours=pulled(ours, 2), peers={"xla": pulled(xla, 2), **torch},
            reference=exact(pulled(xla, 2)), bytes=2 * (2 * x + 2 * w + y), flops=2 * flops,
            prepare={"torch": lambda g, x, w: (g, x, jnp.moveaxis(w, -1, 0))}, **given,
        )  # fmt: skip


def _convolution(line: _Line, torch, x, w):
    """w [outputs, *window, channels], or, transposed, [channels, *window, outputs]."""
    torch.backends.cudnn.benchmark = True
    if one := x.dim() == 3:
        x, w = x[:, None], w[:, None]
    x, w = (z.movedim(-1, 1) for z in (x, w))
    stride = line.steps["stride"]
    if line.transposed:
        pad = [(k - s) // 2 for k, s in zip(w.shape[2:], stride)]
        return torch.nn.functional.conv_transpose2d(x, w, stride=stride, padding=pad).movedim(1, -1)
    x, pad = _padded(line, torch, x)
    run = torch.nn.functional.conv2d if line.rank == 2 else torch.nn.functional.conv3d
    y = run(x, w, padding=pad, groups=line.options.get("groups", 1), **line.steps).movedim(1, -1)
    return y[:, 0] if one else y


def _gradient(line: _Line, torch, g, x, w):
    """The gradients of x and w of `_convolution`, for the cotangents g."""
    torch.backends.cudnn.benchmark = True
    if one := x.dim() == 3:
        g, x, w = g[:, None], x[:, None], w[:, None]
    g, x, w = (z.movedim(-1, 1) for z in (g, x, w))
    sides, (stride, dilation) = x.shape[2:], line.steps.values()
    if line.transposed:
        pad, front = [(k - s) // 2 for k, s in zip(w.shape[2:], stride)], [0] * line.rank
    else:
        x, pad = _padded(line, torch, x)
        front = [n // 2 - p for n, p in zip(line.around, pad)]
    dx, dw, _ = torch.ops.aten.convolution_backward(
        g, x, w, None, stride, pad, dilation, line.transposed, [0] * line.rank, line.options.get("groups", 1),
        [True, True, False],
    )  # fmt: skip
    for k, (at, n) in enumerate(zip(front, sides)):
        dx = dx.narrow(2 + k, at, n)
    dx, dw = dx.movedim(1, -1), dw.movedim(1, -1).movedim(0, -1)
    return (dx[:, 0], dw[0]) if one else (dx, dw)


def _padded(line: _Line, torch, x):
    """x, with zeros around it where both ends have not alike, and the padding that the convolution has to do."""
    if any(n % 2 for n in line.around):
        sides = [side for n in reversed(line.around) for side in (n // 2, n - n // 2)]
        return torch.nn.functional.pad(x, sides), [0] * line.rank
    return x, [n // 2 for n in line.around]
