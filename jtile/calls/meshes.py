"""`kernel.interpret(...)`: a kernel in the interpreter, also on a mesh of devices that need not exist."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.tree_util import tree_flatten, tree_map_with_path, tree_unflatten

from jtile._errors import KernelTypeError, KernelValueError
from jtile._mesh import on_mesh
from jtile.calls.arguments import as_operand
from jtile.calls.boundary import around
from jtile.primitive.devices import run_on_devices
from jtile.primitive.lowering import run_interpreter

if TYPE_CHECKING:
    from jtile.calls.kernel import Kernel
    from jtile.debug import Debugger


def interpreted(kernel: Kernel, args: tuple[Any, ...], mesh: Any, meta: dict[str, Any]) -> Callable[[int], Any]:
    """A function of a seed that interprets a kernel, see `Kernel.interpret`. The kernel is traced at once."""
    if mesh is None:
        args = tree_map_with_path(functools.partial(as_operand, kernel._signature), args)
        leaves, tree = tree_flatten(args)
        bound = kernel._resolve(tree, leaves, meta)
        run = functools.partial(run_interpreter, bound.program)
        run = around(run, bound.layout.inputs, bound.layout.outputs)
        return lambda seed: tree_unflatten(bound.out_tree, run(leaves, seed))
    axes = axes_of(kernel, mesh)
    sizes = tuple(axes.values())
    args = tree_map_with_path(functools.partial(as_operand, kernel._signature), args)
    leaves, tree = tree_flatten(args)
    for x in leaves:
        if x.shape[: len(sizes)] != sizes:
            raise KernelValueError(
                f"an argument of kernel {kernel.name} has shape {list(x.shape)}: on a mesh of {dict(axes)} its first "
                f"axes are {list(sizes)}, one part for each device",
                kernel._signature.where,
            )
    with on_mesh(axes):
        parts = [jax.ShapeDtypeStruct(x.shape[len(sizes) :], x.dtype) for x in leaves]
        bound = kernel._resolve(tree, parts, meta)
    run = functools.partial(_run, bound.program, axes)
    run = around(run, bound.layout.inputs, bound.layout.outputs)
    return lambda seed: tree_unflatten(bound.out_tree, run(leaves, seed))


def axes_of(kernel: Kernel, mesh: Any) -> dict[str, int]:
    """The sizes of a mesh by the names of its axes."""
    axes = mesh if isinstance(mesh, Mapping) else getattr(mesh, "shape", None)
    if not isinstance(axes, Mapping) or not all(isinstance(n, int) and n > 0 for n in axes.values()):
        raise KernelTypeError(
            f"mesh={mesh!r} of kernel {kernel.name}: expected the number of devices along each axis, such as "
            '{"x": 4}, or a jax.sharding.Mesh',
            kernel._signature.where,
        )
    return dict(axes)


def _run(program: Any, axes: Mapping[str, int], arrays: Sequence[Any], seed: int) -> list[np.ndarray]:
    """Run the devices that talk to each other as one world, one world after another."""
    own = [axis for axis, _ in program.devices]
    rest = [axis for axis in axes if axis not in own]
    order = [list(axes).index(axis) for axis in (*rest, *own)]
    front = lambda x: np.moveaxis(np.asarray(x), order, range(len(order)))
    arrays = [front(x) for x in arrays]
    run = run_on_devices if own else run_interpreter
    outs = [run(program, [x[at] for x in arrays], seed) for at in itertools.product(*(range(axes[a]) for a in rest))]
    lead = tuple(axes[a] for a in rest)
    stacked = [np.stack(found).reshape(*lead, *found[0].shape) for found in zip(*outs, strict=True)]
    return [np.moveaxis(x, range(len(order)), order) for x in stacked]


_NAMED = ("named",)  # the variant of a kernel whose values have the names of the source


def debugger(kernel: Kernel, args: tuple[Any, ...], seed: int, mesh: Any, meta: dict[str, Any]) -> Debugger:
    """The debugger of a kernel; see `Kernel.debug`."""
    from jtile import trace
    from jtile.debug import Debugger

    named = kernel._variants.get(_NAMED)
    if named is None:
        named = kernel._variants[_NAMED] = kernel.with_options()
        named._body = trace.rewrite_loops(kernel._fn, kernel._lines, named=True)
    values = {**kernel._signature.meta, **meta}
    run = interpreted(named, args, mesh, meta)
    return Debugger(lambda: run(seed), kernel.name, {k: v for k, v in values.items() if isinstance(v, int | float)})
