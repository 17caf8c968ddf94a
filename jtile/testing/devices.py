"""Checks over several devices, and of programs that leave the process."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

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
class Rows:
    """One call of the kernel for each device, and what the reference says of them.

    Attributes:
      shared: place of a float leaf that all calls share; -1: none.
      batch: the leaves with the calls along axis 0; the shared leaf has no such axis.
      cotangents: those of the results, for every call; none where nothing is differentiated.
      want: the results of all calls.
      gradients: the cotangents of the leaves, summed over the calls for the shared one.
    """

    shared: int
    batch: list[Any]
    cotangents: list[Any]
    want: tuple[Any, ...]
    gradients: tuple[Any, ...]

    def specs(self) -> tuple[PartitionSpec, ...]:
        return tuple(PartitionSpec() if j == self.shared else PartitionSpec("d") for j in range(len(self.batch)))

    def axes(self) -> tuple[int | None, ...]:
        return tuple(None if j == self.shared else 0 for j in range(len(self.batch)))


def rows(c: Checker) -> Rows:
    """The calls of a checker's kernel on all devices of this process; see `Checker.rows`."""
    count = len(jax.devices())
    if count < 2:
        raise SkippedError(ONE_DEVICE)
    shared = c.floats[0] if c.floats and len(c.leaves) > 1 else -1
    calls = [[x if j == shared else turned(x, k) for j, x in enumerate(c.leaves)] for k in range(count)]
    batch = [x if j == shared else stacked([r[j] for r in calls]) for j, x in enumerate(c.leaves)]
    cotangents = [stacked([ct] * count) for ct in c.cotangents] if c.reverse else []
    want = stack_rows([c.expect(*row) for row in calls], 0)
    gradients = list(stack_rows([c.expect_pull(row, list(c.cotangents)) for row in calls], 0)) if c.reverse else []
    if c.reverse and shared >= 0:
        gradients[0] = summed(gradients[0])
    return Rows(shared, batch, cotangents, want, tuple(gradients))


def _both(c: Checker, fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` with its cotangents in one function, which is one program to compile: `(leaves, cotangents) -> both`."""
    return lambda leaves, cotangents: (fn(*leaves), c.pull(fn)(leaves, cotangents) if c.reverse else ())


def _compare(c: Checker, got: Any) -> Measured:
    found = c.compare(got[0], c.rows.want)
    return c.compare(got[1], c.rows.gradients, derivative=True) if c.reverse else found


def _mesh() -> Mesh:
    return jax.make_mesh((len(jax.devices()),), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


def sharded(c: Checker) -> Measured:
    """`shard_map`: one call on each device; values, and gradients with the shared leaf's summed over devices."""
    r = c.rows

    def local(*xs):
        one = [x if j == r.shared else x[0] for j, x in enumerate(xs)]
        return tuple(o[None] for o in c.kernel(*one))

    spread = jax.shard_map(local, mesh=_mesh(), in_specs=r.specs(), out_specs=PartitionSpec("d"))
    found = _compare(c, jax.jit(_both(c, spread))(r.batch, r.cotangents))
    return dataclasses.replace(found, detail=f"{len(jax.devices())} devices, checked with varying axes")


def partitioned(c: Checker) -> Measured:
    """`jit` of a batch whose arrays are sharded over devices: right, and no device gets another one's part."""
    r, mesh = c.rows, _mesh()
    batch = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(r.batch, r.specs(), strict=True)]
    cotangents = [jax.device_put(ct, NamedSharding(mesh, PartitionSpec("d"))) for ct in r.cotangents]
    compiled = jax.jit(_both(c, jax.vmap(c.kernel, r.axes()))).lower(batch, cotangents).compile()
    _no_gather(compiled.as_text())
    found = _compare(c, compiled(batch, cotangents))
    return dataclasses.replace(found, detail=f"{len(jax.devices())} devices, nothing gathered")


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
