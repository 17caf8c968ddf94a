"""What a model does along the axes of a mesh that it is cut over, inside of `jax.shard_map`.

Each device holds a model of its own: some of the heads, features, experts and tokens (`shards.py` cuts the weights).
Where the whole is needed, the functions here call the kernels of `jtile.ops.collectives`, or, where kernels cannot talk
to each other (`jtile.can_talk`), the collectives of XLA.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

import jtile as jt
from jtile import ops
from jtile.models.sums import Parts, Product
from jtile.ops import collectives, hopper_normed_sums

# A sum of up to `FUSED` bytes and its norm are one kernel, in which every device adds up everything, if no device sends
# more than `SENT` bytes to others beside the first of them.
FUSED, SENT = 512 << 10, 1 << 20
GATHERED = 1 << 20  # up to so many bytes of rows of all devices, each device takes all rows
WHOLE = 1 << 20  # up to so many bytes of logits a device, the largest are searched in those of all devices


norm_products = hopper_normed_sums.products  # a name of this module, in whose place benchmarks put others


def collective(name: str, talk: bool) -> Callable:
    """A function of `jtile.ops.collectives`, or its reference by XLA where kernels cannot talk to each other."""
    return getattr(collectives, name if talk else f"{name}_reference")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Term:
    """This device's term `value` of a sum over the devices along an axis; steady, talk: see `Axes`."""

    value: jax.Array
    axis: str = dataclasses.field(metadata=dict(static=True))
    steady: bool = dataclasses.field(default=False, metadata=dict(static=True))
    talk: bool = dataclasses.field(default=True, metadata=dict(static=True))

    def whole(self) -> jax.Array:
        """The sum over the devices."""
        if self.steady and not self.talk:  # the order of XLA's sums depends on the place in the array
            terms = jax.lax.all_gather(self.value, self.axis).astype(jnp.float32)
            return terms.sum(0).astype(self.value.dtype)
        return collective("all_reduce", self.talk)(self.value, self.axis)

    def add_norm(self, x, weight, eps: float) -> tuple[jax.Array, jax.Array]:
        """(x + the sum over the devices, the RMS norm of that with this weight)."""
        size = self.value.size * self.value.dtype.itemsize
        if not self.steady and size <= FUSED and (jt.axis_size(self.axis) - 2) * size <= SENT:
            normed, x = collective("all_reduce_rms_norm", self.talk)(self.value, weight, self.axis, residual=x, eps=eps)
        else:
            normed, x = ops.rms_norm(self.whole(), weight, eps=eps, residual=x)
        return x, normed


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TermOfProduct(Product):
    """This device's term of a sum over the devices along an axis, a `Product` that is not made yet: the kernel that
    makes it may also make the sum, and begin the norm behind that."""

    axis: str = dataclasses.field(metadata=dict(static=True))

    def _term(self) -> Term:
        return Term(ops.matmul(self.x, self.weight, transpose_b=True, out_dtype=self.x.dtype), self.axis)

    def whole(self) -> jax.Array:
        return self._term().whole()

    def add_norm(self, x, weight, eps: float) -> tuple[jax.Array, jax.Array]:
        return self._term().add_norm(x, weight, eps)

    def reaches(self, *weights) -> bool:
        return hopper_normed_sums.misfit(self.x, self.weight, weights, self.axis) is None

    def norm_product(self, x, norm, eps: float, *weights, activation=None):
        options = {"eps": eps, "activation": activation}
        total, y = norm_products(self.x, self.weight, x, norm, weights, self.axis, **options)
        return total, y if y.ndim == 2 else Parts(y, x.dtype.name)


@dataclasses.dataclass(frozen=True)
class Shares:
    """Logits float32 [rows, vocab] of which each device along an axis has a share of the columns, `own`, one behind the
    other; columns from `vocab` on belong to no token. talk: see `Axes`."""

    own: jax.Array
    axis: str
    vocab: int
    talk: bool

    def whole(self) -> jax.Array:
        """The logits [rows, vocab] on every device."""
        return collective("all_gather", self.talk)(self.own, self.axis, dim=-1)[..., : self.vocab]

    def largest(self) -> jax.Array:
        """The first largest column of each row, int32 [rows], or `vocab` where one is NaN: each device sends one number
        and its column a row."""
        share, n = self.own.shape[1], jt.axis_size(self.axis)
        first, own = share * jax.lax.axis_index(self.axis), self.own
        if n * share > self.vocab:
            columns = first + jnp.arange(share, dtype=jnp.int32)
            own = jnp.where(columns[None, :] < self.vocab, own, -jnp.inf)
        at = ops.argmax(own)
        top = jnp.take_along_axis(own, at[:, None], axis=1)[:, 0]
        sent = jnp.stack([jax.lax.bitcast_convert_type(top, jnp.int32), first + at])
        found = collective("all_gather", self.talk)(sent, self.axis).reshape(n, 2, -1)
        tops = jax.lax.bitcast_convert_type(found[:, 0], jnp.float32)
        best = jnp.argmax(tops, axis=0)  # the first of equal ones: the lowest column; of NaN, any
        token = jnp.take_along_axis(found[:, 1], best[None, :], axis=0)[0]
        return jnp.where(jnp.isnan(tops).any(0), jnp.int32(self.vocab), token)


@dataclasses.dataclass(frozen=True)
class Axes:
    """The axes of a mesh that a model is cut over; None where it is not cut.

    tensor: the axis of heads, features of MLPs and the vocabulary. expert: the experts of mixtures, and the rows of a
    batch.
    context: the slots of the cache; what a layer with a ring keeps is whole on each device. steady: the sums over the
    devices of one row have the same bits whatever rows are beside it. talk: kernels of the devices talk to each
    other."""

    tensor: str | None = None
    expert: str | None = None
    context: str | None = None
    steady: bool = False
    talk: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all axes."""
        return tuple(axis for axis in (self.tensor, self.expert, self.context) if axis is not None)

    @property
    def of_weights(self) -> tuple[str, ...]:
        """The names of the axes along which weights differ."""
        return tuple(axis for axis in (self.tensor, self.expert) if axis is not None)

    def term(self, y):
        """What a product over heads or features of this device gives: a `Term` of the sum over devices, or y itself."""
        return y if self.tensor is None else Term(y, self.tensor, self.steady, self.talk)

    def unmade(self, x, weight) -> TermOfProduct | None:
        """This device's term of the sum of x [rows, in] times the transposed weight [out, in] over the devices that
        share heads or features, if the product is best left to the kernel that makes the sum. Else None."""
        if self.tensor is None or self.steady or not self.talk or not isinstance(weight, jax.Array):
            return None
        fits = x.ndim == 2 and x.dtype == weight.dtype
        fits = fits and hopper_normed_sums.misfit_of_first(x, weight, self.tensor) is None
        return TermOfProduct(x, weight, self.tensor) if fits else None

    def embedding(self, table, ids, dtype):
        """Rows `ids` of the table [vocab, features], of which this device has its share."""
        if self.tensor is None:
            return ops.embedding(table, ids, dtype=dtype)
        here = ids - table.shape[0] * jax.lax.axis_index(self.tensor)
        known = (here >= 0) & (here < table.shape[0])
        rows = ops.embedding(table, jnp.where(known, here, 0), dtype=dtype)
        return self.term(jnp.where(known[..., None], rows, 0)).whole()

    def gathered(self, logits, vocab: int, shares: bool = False):
        """Logits [..., vocab] from those of this device's share of the vocabulary; or, with `shares`, their `Shares`,
        if they are many."""
        if self.tensor is None:
            return logits
        found = Shares(logits, self.tensor, vocab, self.talk)
        return found if shares and logits.size * logits.dtype.itemsize > WHOLE else found.whole()

    def all(self, yes):
        """Whether bools are true of all rows, those of other devices too."""
        return yes if self.expert is None else jax.lax.pmin(yes.astype(jnp.int32), self.expert) > 0

    def gathers(self, x) -> bool:
        """Whether the rows x [tokens, hidden] of all devices that share experts are few enough to be gathered on
        each."""
        if self.expert is None or self.steady > self.talk:  # the order of XLA's sums depends on the place in the array
            return False
        return jt.axis_size(self.expert) * x.size * x.dtype.itemsize <= GATHERED

    def of_all(self, x):
        """The rows [tokens, hidden] of all devices that share experts: [devices * tokens, hidden]."""
        return collective("all_gather", self.talk)(x, self.expert)

    def of_all_normed(self, x, delta, norm, eps: float):
        """(x + delta, the norm of its rows [tokens, hidden] on all devices that share experts)."""
        normed, total = collective("all_gather_rms_norm", self.talk)(delta, norm, self.expert, residual=x, eps=eps)
        return total, normed

    def own_sums(self, y):
        """This device's rows of the sum of y [devices * tokens, hidden] over the devices that share experts."""
        return collective("reduce_scatter", self.talk)(y, self.expert)

    def own_sums_of(self, y, places, chosen, weights, count: int):
        """See `jtile.ops.collectives.chosen_sums`; count: the experts of a device."""
        return collective("chosen_sums", self.talk)(y, places, chosen, weights, self.expert, count=count)

    def share(self, count: int) -> int:
        """How many of `count` experts a device has."""
        assert self.expert is not None
        return jt.cdiv(count, jt.axis_size(self.expert))

    def first(self, count: int):
        """The number of the first expert, of `count`, that this device has: int32."""
        return jax.lax.axis_index(self.expert) * self.share(count)

    def dispatched(self, x, chosen, weights, count: int, run: Callable):
        """sum_j weights[t, j] MLP_e(x[t]) with e = chosen[t, j], of the `count` experts that devices share.

        run: takes rows [n, hidden] sorted by the experts of this device and the sizes of these groups; gives
        [n, hidden]."""
        assert self.expert is not None
        rows, sizes, routes = collective("dispatch", self.talk)(x, chosen, self.expert, count=count)
        return collective("combine", self.talk)(run(rows, sizes), routes, self.expert, weights=weights)


ALONE = Axes()


def laid(model: nnx.Module, axes: Axes) -> nnx.Module:
    """Tells the modules of a device's model of the axes. Changes it in place, and returns it."""
    for _, module in nnx.iter_modules(model):
        if hasattr(module, "over"):
            module.over = axes
    return model


def held(lengths, axis: str):
    """How many of so many tokens of each row this device holds, if the cache is cut along `axis`: tokens go to the
    devices in turns."""
    n = jt.axis_size(axis)
    return (lengths + (n - 1 - jax.lax.axis_index(axis))) // n


def held_part(x, axis: str):
    """The tokens of x [batch, length, ...] that this device holds; see `held`."""
    n = jt.axis_size(axis)
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % n)) + ((0, 0),) * (x.ndim - 2))
    turns = x.reshape(x.shape[0], -1, n, *x.shape[2:])
    return jax.lax.dynamic_index_in_dim(turns, jax.lax.axis_index(axis), 2, keepdims=False)
