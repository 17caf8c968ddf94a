"""A token's mixture of experts behind an RMS norm, on Hopper at the block level: products with the matrices that an
index names, in a stack of them.

They are those of `hopper_gemv` but for where tiles of rows lie. Its copies follow the index, so that the matrices of
all experts of a token come as one stream: those of gate and up one after the other, those of down side by side, as one
matrix whose rows are those of all experts.

The second product reads its matrices while the first one still runs: what made the index has ended then, for the roles
of the first that let the second start have waited for that.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import gpu_tiles, hopper_gemv, hopper_held, streamed_forms
from jtile.ops.dispatch import first_unmet
from jtile.ops.operands import NO_EPILOGUE, Norm, Weight
from jtile.ops.streamed_operands import PIECE, Places, Rows

_GROUP = 256  # numbers of 16 bits in 512 bytes


@dataclasses.dataclass(frozen=True)
class _Behind(Places):
    """Tiles of the rows of gate and up [experts * 2 f, hidden] of the experts `index` [k], one behind the other."""

    index: jt.Ref
    each: int  # tiles of f rows
    early = False

    def of_weight(self, w: int, tile, piece, rows: int):
        return self.index[jax.lax.div(tile, self.each)] * (2 * self.each) + w * self.each + self._in_expert(tile), piece

    def of_result(self, i: int, tile):
        return jax.lax.div(tile, self.each), self._in_expert(tile)

    def _in_expert(self, tile):
        return jax.lax.rem(tile, self.each)


@dataclasses.dataclass(frozen=True)
class _Beside(Places):
    """Tiles of the rows of down [experts * hidden, f] of the experts `index` [k], side by side."""

    index: jt.Ref
    each: int  # tiles of `hidden` rows
    pieces: int  # of f columns

    def of_weight(self, w: int, tile, piece, rows: int):
        k, slot = self.index.shape[0], jax.lax.div(piece, self.pieces)
        found = self.index[jnp.minimum(slot, k - 1)] * self.each + tile
        return jnp.where(slot < k, found, jnp.int32(2**30 // rows)), jax.lax.rem(piece, self.pieces)  # or zeros


def _processors(*_, **__) -> int:
    return gpu_tiles.processors()


@jt.kernel(
    out_type=lambda x, w, index, share, *_, features, **__: jax.ShapeDtypeStruct((index.shape[0], features), w.dtype),
    grid=_processors,
    name="hopper_chosen_gated",
)
def _gated(x, w, index, share, norm: Norm, y, *, features: int, eps: float, rows: int, roles: int, slots: int):
    """y [k, f] of one token x [1, in / 8, 8] behind an RMS norm of x + residual, by the experts index int32 [k] of w
    [experts * 2 f, in], times share float32 [k]."""
    # y_j = s_j silu(G_e n) * (U_e n)     e = index_j     n = norm(x + residual)
    weights, each = (Weight(w), Weight(w)), features // rows
    options = dict(kind=jnp.dtype(w.dtype).name, activation="silu", rows=rows, roles=roles, slots=slots, early=True)
    places = _Behind(index, each)
    hopper_gemv.program(
        Rows(x, norm, eps),
        weights,
        NO_EPILOGUE,
        y,
        None,
        places=places,
        count=index.shape[0] * each,
        share=share,
        **options,
    )


@jt.kernel(
    out_type=lambda h, w, index, *, hidden, **_: jax.ShapeDtypeStruct((1, hidden), h.dtype),
    grid=_processors,
    name="hopper_chosen_sum",
)
def _sum(h, w, index, y, *, hidden: int, features: int, rows: int, roles: int, slots: int):
    """y [1, hidden], the sum over the experts index int32 [k] of the products of h [1, k f / 8, 8] with w [experts *
    hidden, f]. The kernel in front makes neither w nor the index, which early roles read."""
    # y = sum_j W_e h_j     e = index_j
    options = dict(kind=jnp.dtype(w.dtype).name, activation=None, rows=rows, roles=roles, slots=slots)
    places = _Beside(index, hidden // rows, features // _GROUP)
    hopper_gemv.program(Rows(h), (Weight(w),), NO_EPILOGUE, y, None, places=places, early=True, **options)


def _form(inner: int, gated: bool, kind: str) -> dict[str, int] | None:
    """The rows, roles and slots of a program: eight rows, as long as they are."""
    pieces = jt.cdiv(inner, PIECE)
    roles = min((1, 2, 3, 4), key=lambda n: (jt.cdiv(pieces, n) * n - pieces, -n))
    return streamed_forms.form(1, inner, kind, gated, 8, roles)


def misfit(x, router, gate_up, down, k: int) -> str | None:
    """Why `mixture` cannot run this call, None where it can."""
    (experts, hidden), features = router.shape, down.shape[2]
    kind = gate_up.dtype.name
    return first_unmet(
        (gpu_tiles.overlaps(), "kernels do not overlap"),
        (gpu_tiles.on_one_device(), "rows may be shared out among several devices"),
        (x.shape[0] == 1, f"there are {x.shape[0]} tokens, not one"),
        (x.dtype in (jnp.bfloat16, jnp.float16), f"x is {x.dtype.name}, not 16-bit floats"),
        (x.dtype == gate_up.dtype == down.dtype, f"matrices are {gate_up.dtype.name} and {down.dtype.name}"),
        (router.dtype == jnp.float32, f"the router is {router.dtype.name}, not float32"),
        (hidden % 8 == 0 and features % _GROUP == 0, f"matrices are of {hidden} and {features} columns"),
        (k <= 16, f"a token has {k} experts, more than 16"),
        (
            hopper_held.rows_of(1, experts, hidden, kind, False, gpu_tiles.processors()) is not None,
            "the router is large",
        ),
        (_form(hidden, True, kind) and _form(k * features, False, kind), "rows leave no room in shared memory"),
    )


def normed_scores(x, residual, norm, router, *, eps: float) -> tuple[jax.Array, jax.Array]:
    """The scores float32 [1, experts] of the RMS norm of x + residual [1, hidden], and that sum."""
    hidden, kind = x.shape[1], x.dtype.name
    rows = hopper_held.rows_of(1, router.shape[0], hidden, kind, False, gpu_tiles.processors())
    of = lambda a: a.reshape(-1, hidden // 8, 8)
    kernel, options = hopper_held.normed_kernel(1), dict(kind=kind, activation=None, out_dtype="float32", eps=eps)
    scores, total = kernel(of(x), (Weight(router),), Norm(of(norm)[0], of(residual)), rows=rows, **options)
    return scores, total.reshape(residual.shape)


def products(x, residual, norm, index, share, gate_up, down, *, eps: float) -> jax.Array:
    """The mixture of the experts index int32 [k] with weights share float32 [k], for the RMS norm of x + residual [1,
    hidden]."""
    (_, twice, hidden), kind, k = gate_up.shape, x.dtype.name, index.shape[0]
    of, features = (lambda a: a.reshape(-1, hidden // 8, 8)), twice // 2
    norm = Norm(of(norm)[0], of(residual))
    first, second = _form(hidden, True, kind), _form(k * features, False, kind)
    h = _gated(of(x), gate_up.reshape(-1, hidden), index, share, norm, features=features, eps=eps, **first)
    sizes = {"hidden": hidden, "features": features}
    return _sum(h.reshape(1, k * features // 8, 8), down.reshape(-1, features), index, **sizes, **second)
