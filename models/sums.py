"""Sums of products that are not made yet: a projection of a step's rows in float32 parts, which the kernel that reads
them adds up, so that no kernel does only that."""

from __future__ import annotations

import abc
import dataclasses

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import hopper_normed, hopper_wide
from jtile.ops._shapes import of_rows


class Unmade(abc.ABC):
    """A sum that some kernel behind it is to make."""

    @abc.abstractmethod
    def whole(self) -> jax.Array:
        """The sum."""

    @abc.abstractmethod
    def add_norm(self, x, weight, eps: float) -> tuple[jax.Array, jax.Array]:
        """(x + the sum, the RMS norm of that with this weight)."""


@dataclasses.dataclass(frozen=True)
class Added:
    """A projection whose kernel has added it to what it is for: `total` is that sum."""

    total: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Parts(Unmade):
    """The sum over the first axis of `value`, float32 [parts, rows, n], rounded to `dtype`."""

    value: jax.Array
    dtype: str = dataclasses.field(metadata=dict(static=True))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape[1:]

    def whole(self) -> jax.Array:
        return self.value.sum(0).astype(self.dtype)

    def add_norm(self, x, weight, eps: float) -> tuple[jax.Array, jax.Array]:
        normed, total = of_rows(part_norm_rows, x, weighted=True)(self.value, x, weight, eps=eps)
        return total, normed


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Product(Unmade):
    """x [rows, in] times the transposed weight [out, in], both 16-bit, of which `parts_of` says that parts are best:
    the kernel that makes it may also add it to what it is for, and begin the norm behind that."""

    x: jax.Array
    weight: jax.Array

    def whole(self) -> jax.Array:
        return in_parts(self.x, self.weight).whole()

    def add_norm(self, x, weight, eps: float) -> tuple[jax.Array, jax.Array]:
        return in_parts(self.x, self.weight).add_norm(x, weight, eps)

    def reaches(self, *weights) -> bool:
        """Whether `norm_product` is for these weights."""
        return hopper_normed.misfit(self.x, self.weight, weights) is None

    def norm_product(self, x, norm, eps: float, *weights, activation=None):
        """(x + the product, the product of its RMS norm with one weight or the gated one with two, perhaps as
        `Parts`)."""
        options = {"eps": eps, "activation": activation}
        total, y = hopper_normed.products(self.x, self.weight, x, norm, weights, **options)
        return total, y if y.ndim == 2 else Parts(y, x.dtype.name)


def parts_of(x, weight) -> int:
    """In how many parts the product of x [..., in] with a weight [out, in] is best made; 1: it is whole."""
    plain = isinstance(weight, jax.Array) and x.ndim == 2
    return hopper_wide.parts_of(x, weight) if plain else 1


def unmade(x, weight) -> Unmade:
    """`in_parts`, or what leaves more to the kernel behind it."""
    return Product(x, weight) if x.dtype == jnp.bfloat16 else in_parts(x, weight)


def in_parts(x, weight) -> Parts:
    """x [rows, in] times the transposed weight [out, in], of which `parts_of` says that parts are best."""
    return Parts(hopper_wide.in_parts(x, weight, parts=parts_of(x, weight)), x.dtype.name)


@jt.kernel(out_type=lambda z, r, w, **_: (jt.like(r), jt.like(r)), grid=lambda z, r, w, **_: r.shape[0])
def part_norm_rows(z, r, w, y, s, *, eps: float):
    """s = r + z_1 + z_2 + ..., y = rms_norm(s): z float32 [parts, rows, n], r [rows, n], one row in a program."""
    # y = s / sqrt(mean(s^2) + eps) * w
    i = jt.program_id(0)
    t = r[i, :].astype(jnp.float32)
    for part in range(z.shape[0]):
        t = t + z[part, i, :]
    s[i, :] = t.astype(s.dtype)
    unit = jax.lax.rsqrt((t * t).sum() * (1.0 / t.shape[0]) + eps)
    y[i, :] = (t * unit * w[:].astype(jnp.float32)).astype(y.dtype)
