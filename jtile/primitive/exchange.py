"""`jt.exchange`: parts of arrays that travel between the devices along an axis of a mesh while kernels run.

On NVIDIA's GPUs of one process engines for copies move them, so that all multiprocessors are left to kernels
(`ffi/csrc/exchange.h`); elsewhere XLA's collectives do, and nothing overlaps. Two custom calls, since XLA has to know
when an array may be read, and until when it has to keep one: `exchange_p` begins, `exchanged_p` waits.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import numpy as np
from jax.interpreters import batching, mlir

from jtile._compat import is_eager_shard_map, need_devices
from jtile._config import current
from jtile._errors import KernelTypeError, KernelValueError, UnsupportedError
from jtile.language.devices import axis_size_of
from jtile.primitive.batching import to_front
from jtile.primitive.devices import device_groups
from jtile.primitive.jtile_call import joint_varying


@dataclasses.dataclass(frozen=True)
class Travelling:
    """Parts that are on their way, as `jt.exchange` gives them.

    Attributes:
      into: where they arrive; nothing may read them before `jt.exchanged` has given the array back.
      sent: the arrays that they are parts of.
      axis: the axis of the mesh along which they travel.
    """

    into: jax.Array
    sent: tuple[jax.Array, ...]
    axis: str


def exchange(
    x: Any, axis: str, *, to: str = "all", into: Any = None, own: bool = True, start: int = 0, rows: int | None = None
) -> Travelling:
    """Begin to send parts of arrays to the devices along an axis, inside of `jax.shard_map`; kernels may run meanwhile.

    What is begun has to be waited for by `jt.exchanged`, whose results have to be used: JAX leaves out what nobody
    uses, and arrays that still travel would be overwritten. After the wait, `into[d, start : start + rows]` is what
    device d has sent to this one, and with `to="next"` the array is the x of the device before this one.

    Args:
      x: [rows, ...]; [devices, rows, ...] with `to="each"`; None: rows `start` to `start + rows` of this device's own
        part of `into`.
      axis: an axis of the mesh.
      to: who gets x: "all" devices, "each" device its part of it, or the "next" device, the first one behind the last.
      into: [devices, size, ...], or what an earlier exchange along this axis gave; None: a new array.
      own: also copy this device's part into its own `into`; without, that part is left as it is.
      start, rows: see above.
    Returns:
      A `Travelling`. `into` of it may be passed to kernels that write elsewhere in it, and be replaced by their result.
    Raises:
      KernelTypeError, KernelValueError: shapes, dtypes or options that do not fit, no such axis, or outside of
      `shard_map`.
    """
    n, sent = axis_size_of(axis, "jt.exchange"), ()
    if isinstance(into, Travelling):
        into, sent = into.into, into.sent
    if x is None:
        _check(into is not None and rows is not None, "its own part of `into` needs `into` and `rows`")
        fits = into.ndim >= 2 and into.shape[0] == n and 0 <= start <= start + rows <= into.shape[1]
        _check(fits, f"rows {start} to {start + rows} of a device are not in {tuple(into.shape)}")
        (into,) = _joint([into], axis)
        begin = dict(axis=axis, n=n, mode="own", own=False, start=start, rows=rows, lanes=0)
        return Travelling(_begin(into, **begin), sent, axis)
    x = jnp.asarray(x)
    if x.dtype.name in ("int4", "uint4", "int2", "uint2", "float4_e2m1fn"):
        raise KernelTypeError(f"jt.exchange: elements of whole bytes travel, got {x.dtype}; cast them")
    _check(to in MODES, f"to is one of {', '.join(map(repr, MODES))}, got {to!r}")
    _check(x.ndim >= 1 + (to == "each"), f"got x of shape {tuple(x.shape)}")
    _check(to != "each" or x.shape[0] == n, f"x has a part for each of {n} devices, got {tuple(x.shape)}")
    _check(to != "next" or into is None, "what goes to the next device comes in a new array; leave `into` out")
    _check(into is not None or start == 0, f"a new array has no rows in front of the parts, got start={start}")
    part = x.shape[to == "each" :]
    if into is not None:
        into = jnp.asarray(into)
        if into.dtype != x.dtype:
            raise KernelTypeError(f"jt.exchange: x and into have one dtype, got {x.dtype} and {into.dtype}; cast one")
        fits = into.ndim == len(part) + 1 and into.shape[0] == n and into.shape[2:] == part[1:]
        fits = fits and 0 <= start <= into.shape[1] - part[0]
        _check(fits, f"parts {tuple(part)} do not fit into {tuple(into.shape)} from row {start} on")
    operands = _joint([x] if into is None else [x, into], axis)
    own = n == 1 if to == "next" else own  # the only device is behind itself
    begin = dict(axis=axis, n=n, mode=to, own=own, start=start, rows=part[0], lanes=0)
    return Travelling(_begin(*operands, **begin), (*sent, operands[0]), axis)


def exchanged(travelling: Any, after: Any = (), *, step: int = 0) -> Any:
    """Wait for all parts that travel into an array, or for one of them.

    Args:
      travelling: what the last `jt.exchange` into it gave; or a sequence of such, for several arrays.
      after: arrays, or a pytree of them, that are computed before this device waits.
      step: 0: wait for all; else only for the part of the device so many places before this one: parts come in this
        order, and each may be computed with while the next one travels.
    Returns:
      The array, or a list of them; with `after` a pair of it and `after`, which is to be used instead of what was
      passed. Whoever uses any of these waits for all. With a `step` a `Travelling` in place of each array: of its
      `into` that part may be read, and another wait has to follow.
    Raises:
      KernelTypeError: not what `jt.exchange` gave. KernelValueError: a step that no other device has.
    """
    several = list(travelling) if isinstance(travelling, (list, tuple)) else [travelling]
    for t in several:
        if not isinstance(t, Travelling):
            raise KernelTypeError(
                f"jt.exchanged waits for what jt.exchange gave, a jt.Travelling, got {type(t).__name__}"
            )
        n = axis_size_of(t.axis, "jt.exchanged")
        counts = isinstance(step, int) and 0 <= step < max(n, 1)
        _check(counts, f"a step is a whole number below that of the devices, {n}, got {step!r}", "exchanged")
    leaves, tree = jax.tree.flatten(after)
    arrays, leaves = jax.lax.optimization_barrier(([t.into for t in several], leaves))
    pairs = zip(several, arrays, strict=True)
    wait = (lambda into, *_, step: into) if is_eager_shard_map() else exchanged_p.bind
    out = [wait(*joint_varying([into, *t.sent], _Along(t.axis)), step=step) for t, into in pairs]
    # One barrier for all: a wait of which only the array is not used, or only one of several, must not be left out.
    out, leaves = jax.lax.optimization_barrier((out, leaves))
    if step:
        out = [Travelling(into, t.sent, t.axis) for t, into in zip(several, out, strict=True)]
    got = out[0] if isinstance(travelling, Travelling) else out
    return (got, jax.tree.unflatten(tree, leaves)) if leaves else got


def _begin(*operands: jax.Array, **how: Any) -> jax.Array:
    """Begin, or where each operation is a program of its own, whose arrays nobody keeps for the next one, do it all."""
    _register_engines()
    return _by_collectives(*operands, **how) if is_eager_shard_map() else exchange_p.bind(*operands, **how)


def _joint(operands: Sequence[jax.Array], axis: str) -> Sequence[jax.Array]:
    """Operands as values that vary over the axis. Between barriers they are one value, and so one buffer, for both
    calls, and XLA fuses no slices with the calls, which would forget that a result has an operand's buffer."""
    return jax.lax.optimization_barrier(tuple(joint_varying(operands, _Along(axis))))


@dataclasses.dataclass(frozen=True)
class _Along:
    """An axis, as `joint_varying` reads it of a program."""

    axis: str

    @property
    def devices(self) -> tuple[tuple[str, int], ...]:
        return ((self.axis, 0),)


def _check(holds: bool, what: str, where: str = "exchange") -> None:
    if not holds:
        raise KernelValueError(f"jt.{where}: {what}")


MODES = ("all", "each", "next")

# -- the primitives -------------------------------------------------------------------------------------------------

exchange_p = jexc.Primitive("jtile_exchange")
exchanged_p = jexc.Primitive("jtile_exchanged")
need_devices(exchange_p)
need_devices(exchanged_p)


@exchange_p.def_abstract_eval
def _begun_type(x: Any, into: Any = None, *, n: int, mode: str, lanes: int, **_: Any) -> Any:
    if mode in ("own", "next"):
        return x
    if into is not None:
        return into
    part = x.shape[lanes + (mode == "each") :]
    return x.update(shape=(*x.shape[:lanes], n, *part), weak_type=False)


exchanged_p.def_abstract_eval(lambda into, *_, step: into)
exchanged_p.def_impl(lambda into, *_, step: into)


def _by_collectives(
    x: Any, into: Any = None, *, axis: str, n: int, mode: str, own: bool, start: int, rows: int, lanes: int
):
    """The whole exchange at once, by XLA's collectives."""

    def one(x, into):
        if mode == "next":
            return jax.lax.ppermute(x, axis, [(d, (d + 1) % n) for d in range(n)])
        me = jax.lax.axis_index(axis)
        if mode == "own":
            x, into = jax.lax.dynamic_index_in_dim(x, me, keepdims=False)[start : start + rows], x
        got = jax.lax.all_to_all(x, axis, 0, 0) if mode == "each" else jax.lax.all_gather(x, axis)
        if into is None:
            into = jnp.full(got.shape, jnp.nan if jnp.issubdtype(got.dtype, jnp.floating) else 0, got.dtype)
        whole = into.at[:, start : start + rows].set(got)
        is_own = (jnp.arange(n) == me).reshape(n, *(1,) * (into.ndim - 1))
        return whole if own else jnp.where(is_own, into, whole)

    run: Callable[..., Any] = one if into is not None else lambda x: one(x, None)
    for _ in range(lanes):
        run = jax.vmap(run)
    return run(x) if into is None else run(x, into)


def _batched(run: Callable[..., jax.Array]) -> Callable:
    """The batching rule of a primitive: `run` gets operands whose first axis is the new one."""

    def rule(args: Sequence[Any], dims: Sequence[int | None], **options: Any):
        _, _, args = to_front(args, dims, range(len(args)))
        return run(*args, **options), 0

    return rule


batching.primitive_batchers[exchange_p] = _batched(
    lambda *args, lanes, **options: exchange_p.bind(*args, lanes=lanes + 1, **options)
)
batching.primitive_batchers[exchanged_p] = _batched(exchanged_p.bind)
exchange_p.def_impl(_by_collectives)
_elsewhere = mlir.lower_fun(_by_collectives, multiple_results=False)
mlir.register_lowering(exchange_p, _elsewhere)
mlir.register_lowering(exchanged_p, lambda ctx, into, *_, step: [into])


# -- engines for copies ---------------------------------------------------------------------------------------------


def pieces(x: Any, into: Any, *, n: int, mode: str, own: bool, start: int, rows: int, lanes: int) -> np.ndarray:
    """Where the pieces lie: the numbers of `Pieces` of ffi/csrc/exchange.h, in bytes."""
    lead = lanes if mode == "next" else lanes + 1
    size = into.dtype.itemsize * math.prod(into.shape[lead + 1 :])  # bytes of a row
    part, count, piece = into.shape[lead] * size, math.prod(into.shape[:lanes]), rows * size
    if mode == "next":
        source = target = (0, piece, 0)
    else:
        target = (start * size, n * part, part)
        source = {"all": (0, piece, 0), "each": (0, n * piece, 0), "own": target}[mode]
    to = piece if mode == "each" else 0
    receivers = min(n - 1, 1) if mode == "next" else n - 1
    return np.asarray([piece, count, *source, to, *target, receivers, own], np.int64)


def _groups(ctx: mlir.LoweringRuleContext, axes: Sequence[str]) -> np.ndarray | None:
    """`device_groups`, or None where XLA moves the parts, in both calls: for devices of other processes and in exports,
    since XLA knows how to reach any; of arrays without elements, which have no addresses of their own; and where the
    option `gpu_peers` forbids GPUs to reach each other's memory."""
    (out,) = ctx.avals_out
    if not (current().gpu_peers and out.size):
        return None
    try:
        return device_groups(axes, ctx, "an exchange between devices", None)
    except UnsupportedError:
        return None


def _lower_by_copies(
    call: str, ctx: mlir.LoweringRuleContext, *operands: Any, axis: str, **options: Any
) -> Sequence[Any]:
    from jtile.lowering.platforms import milliseconds

    (out,), groups = ctx.avals_out, _groups(ctx, [axis])
    if groups is None:
        return _elsewhere(ctx, *operands, axis=axis, **options)
    aliases = {len(operands) - 1: 0} if len(operands) == 2 or options["mode"] == "own" else {}
    rule = jax.ffi.ffi_lowering(call, operand_output_aliases=aliases, has_side_effect=True)
    where = pieces(ctx.avals_in[0], out, **options)
    return rule(ctx, *operands, groups=groups, devices=np.int64(options["n"]), timeout=milliseconds(), pieces=where)


def _lower_wait(call: str, ctx: mlir.LoweringRuleContext, *operands: Any, step: int) -> Sequence[Any]:
    from jtile.lowering.platforms import milliseconds

    if _groups(ctx, []) is None:
        return operands[:1]
    rule = jax.ffi.ffi_lowering(call, operand_output_aliases={0: 0}, has_side_effect=True)
    return rule(ctx, *operands, step=np.int64(step), timeout=milliseconds())


@functools.cache
def _register_engines() -> None:
    """Make JAX know, before the first exchange, the calls of platforms whose engines for copies move parts."""
    from jtile.lowering import platforms

    for platform in platforms.every():
        for host in platform.hosts if platform.exchange_calls else ():
            begin, wait = platform.exchange_calls
            mlir.register_lowering(exchange_p, functools.partial(_lower_by_copies, begin), platform=host)
            mlir.register_lowering(exchanged_p, functools.partial(_lower_wait, wait), platform=host)
