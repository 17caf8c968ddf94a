"""Checks over several devices, and of programs that leave the process."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jtile.testing.compare import Measured, MismatchError, SkippedError, stack_rows, stacked, summed, turned

if TYPE_CHECKING:
    from jtile.testing.checker import Checker

ONE_DEVICE = "one device; set XLA_FLAGS=--xla_force_host_platform_device_count=8 before JAX starts"
GATHERS = ("all-gather", "all-to-all", "collective-permute")


def jobs(c: Checker) -> Iterator[tuple[str, str, Callable[[], Measured]]]:
    yield "shard_map", "", functools.partial(sharded, c)
    yield "partitioned jit", "", functools.partial(partitioned, c)
    yield "export", "", functools.partial(exported, c)


@dataclasses.dataclass(frozen=True)
class _Rows:
    """One call of the kernel for each device.

    Attributes:
      rows: the leaves of each call.
      shared: place of a float leaf that all calls share; -1: none.
      batch: the leaves with the calls along axis 0, the shared one as it is.
      cotangents: of the results, for every call.
    """

    rows: list[list[Any]]
    shared: int
    batch: list[Any]
    cotangents: list[Any]

    def specs(self) -> tuple[PartitionSpec, ...]:
        return tuple(PartitionSpec() if j == self.shared else PartitionSpec("d") for j in range(len(self.batch)))

    def axes(self) -> tuple[int | None, ...]:
        return tuple(None if j == self.shared else 0 for j in range(len(self.batch)))


def _rows(c: Checker) -> _Rows:
    count = len(jax.devices())
    if count < 2:
        raise SkippedError(ONE_DEVICE)
    shared = c.floats[0] if c.floats and len(c.leaves) > 1 else -1
    leaves = [jnp.asarray(x) for x in c.leaves]
    rows = [[x if j == shared else turned(x, k) for j, x in enumerate(leaves)] for k in range(count)]
    batch = [x if j == shared else stacked([r[j] for r in rows]) for j, x in enumerate(leaves)]
    cotangents = [stacked([ct] * count) for ct in c.cotangents] if c.reverse else []
    return _Rows(rows, shared, batch, cotangents)


def _gradients(c: Checker, r: _Rows) -> tuple[Any, ...]:
    """What the reference says: a cotangent for each call, summed for the shared leaf."""
    want = list(stack_rows([c.expect_pull(row, list(c.cotangents)) for row in r.rows], 0))
    if r.shared >= 0:
        want[0] = summed(want[0])
    return tuple(want)


def sharded(c: Checker) -> Measured:
    """`shard_map`: one call on each device; values, and gradients with the shared leaf's summed over devices."""
    r = _rows(c)
    mesh = jax.make_mesh((len(r.rows),), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def local(*xs):
        one = [x if j == r.shared else x[0] for j, x in enumerate(xs)]
        return tuple(o[None] for o in c.kernel(*one))

    spread = jax.shard_map(local, mesh=mesh, in_specs=r.specs(), out_specs=PartitionSpec("d"))
    found = c.compare(jax.jit(spread)(*r.batch), stack_rows([c.expect(*row) for row in r.rows], 0))
    if c.reverse:
        found = c.compare(jax.jit(c.pull(spread))(r.batch, r.cotangents), _gradients(c, r), derivative=True)
    return dataclasses.replace(found, detail=f"{len(r.rows)} devices, checked with varying axes")


def partitioned(c: Checker) -> Measured:
    """`jit` of a batch whose arrays are sharded over devices: right, and no device gets another one's part."""
    r = _rows(c)
    mesh = jax.make_mesh((len(r.rows),), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    batch = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(r.batch, r.specs(), strict=True)]
    over = jax.vmap(c.kernel, r.axes())
    value = jax.jit(over).lower(*batch).compile()
    _no_gather(value.as_text())
    found = c.compare(value(*batch), stack_rows([c.expect(*row) for row in r.rows], 0))
    if c.reverse:
        cotangents = [jax.device_put(ct, NamedSharding(mesh, PartitionSpec("d"))) for ct in r.cotangents]
        pull = jax.jit(c.pull(over)).lower(batch, cotangents).compile()
        _no_gather(pull.as_text())
        found = c.compare(pull(batch, cotangents), _gradients(c, r), derivative=True)
    return dataclasses.replace(found, detail=f"{len(r.rows)} devices, nothing gathered")


def _no_gather(text: str) -> None:
    found = [name for name in GATHERS if f" {name}(" in text or f" {name}-start(" in text]
    if found:
        raise MismatchError(f"the compiled program has {', '.join(found)}, though only the batch is sharded")


def exported(c: Checker) -> Measured:
    """`jax.export`: serialised, read back and called; its vjp too, where there is one."""
    if importlib.util.find_spec("flatbuffers") is None:
        raise SkippedError("jax.export needs flatbuffers, which is not installed")
    from jax import export

    from jtile.primitive.export import export_checks

    order = int(c.reverse)
    run = export.export(jax.jit(c.kernel), disabled_checks=export_checks())(*c.leaves)
    again = export.deserialize(run.serialize(vjp_order=order))
    found = c.compare(jax.jit(again.call)(*c.leaves), c.expected)
    if order:
        found = c.compare(jax.jit(c.pull(again.call))(c.leaves, list(c.cotangents)), c.pulled[1], derivative=True)
    return found
