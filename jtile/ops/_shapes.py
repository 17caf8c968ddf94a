"""What every op needs to know about shapes: rows of an array, tile sizes that fit, and checks with typed errors."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jtile as jt
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops import gpu_tiles


@dataclasses.dataclass(frozen=True)
class Machine:
    """What the sizes of tiles on a machine are chosen by.

    Attributes:
      tile: elements of a tile that is read and written once.
      row: elements of a tile of rows that is passed over several times.
      one_tile: elements of the longest row that is held as one tile.
      block: elements of a block of a longer row.
      programs: a number of programs that keeps all of the machine busy.
      sums: the most programs that each keep sums of their own, which are added up at the end.
      whole: whether sides of tiles may be any number, and not powers of two alone.
      columns: the fewest columns of a tile of neighbouring columns, whose elements lie side by side in memory.
    """

    tile: int
    row: int
    one_tile: int
    block: int
    programs: int
    sums: int
    whole: bool
    columns: int = 16


# A `tile` has 16 KiB of float32, which the first cache holds beside what is computed from it. While one `row` is worked
# on, the memory of the next arrives. A row longer than `one_tile` is taken in blocks, twice: exp of a block costs less
# than waiting for all of the row. A few threads share `programs` unevenly.
_CPU = Machine(tile=4096, row=1024, one_tile=2048, block=1024, programs=8, sums=16, whole=True)
# A vector core of an NPU has 192 KiB for all tiles of a program, those that come next and what is computed from them;
# as many programs as there are such cores loop over the rest.
_NPU = Machine(tile=2048, row=1024, one_tile=8192, block=4096, programs=48, sums=48, whole=False, columns=8)


@functools.cache
def _gpu(processors: int) -> Machine:
    """The numbers of a GPU. Registers hold a row of up to 32768 elements; a short row in a program of its own keeps
    reductions inside of a warp or two; each multiprocessor gets eight programs."""
    programs, sums = 8 * processors, 2 * processors
    return Machine(tile=4096, row=1024, one_tile=32768, block=16384, programs=programs, sums=sums, whole=False)


def machine() -> Machine:
    """The numbers that tiles are chosen by on the platform at hand."""
    features = jt.target().features
    if "warps" in features:
        return _gpu(gpu_tiles.processors())
    return _NPU if "vector cores" in features else _CPU


def programs_at_once() -> int:
    """How many programs run at once on the platform at hand: the cores that this process may use, or a GPU's
    multiprocessors."""
    return jt.target().programs_at_once


@functools.cache
def _variant(kernel: jt.Kernel, options: tuple[tuple[str, int], ...]) -> jt.Kernel:
    return kernel.with_options(**dict(options))


def tuned(kernel: jt.Kernel, **options: int) -> jt.Kernel:
    """`kernel` with `num_warps` and `num_stages` where they were measured; elsewhere the compiler chooses them."""
    return _variant(kernel, tuple(sorted(options.items()))) if options and gpu_tiles.measured_warps() else kernel


def of_rows(kernel: jt.Kernel, x: jax.Array, br: int = 1, arrays: int = 1, **of: bool) -> jt.Kernel:
    """A kernel with the warps that suit `br` rows of x [rows, n], and of further `arrays`, which it holds in registers;
    `of`: see `gpu_tiles.warps_of_rows`."""
    return tuned(kernel, num_warps=gpu_tiles.warps_of_rows(br * arrays * known(x.shape[1]), **of))


LARGE = 1 << 20


def known(n: Any) -> int:
    """A size that tiles are chosen for: of a dynamic one the most that its mark allows; without a bound it counts as
    large, as in an export over symbolic shapes."""
    most = n if isinstance(n, int) else jt.bounds_of(n)[1]
    return LARGE if most is None else most


def held(n: Any, most: int) -> bool:
    """Whether rows of n elements may be tiles, which have at most `most`: those of a dynamic length may not."""
    return isinstance(n, int) and n <= most


def fit(n: int, target: int) -> int:
    """The tile length at most `target` that splits `n` most evenly: fit(1000, 128) = 125; on a GPU the power of two
    that covers n, or the largest up to the target: 128."""
    n, target = known(n), max(1, known(target))
    if not machine().whole:
        return min(jt.next_power_of_2(max(n, 1)), 1 << target.bit_length() - 1)
    return max(1, jt.cdiv(n, max(1, jt.cdiv(n, max(target, 1)))))


def rows_per_tile(rows: int, width: int, elements: int | None = None) -> int:
    """Rows of `width` elements that one program takes: about `elements` in all (default: `Machine.row`), and at least
    `Machine.programs` programs."""
    rows, width, m = known(rows), known(width), machine()
    elements = elements or m.row
    return fit(rows, min(max(1, elements // max(width, 1)), max(1, jt.cdiv(rows, m.programs))))


def weighted_rows(rows: int, width: int) -> int:
    """`rows_per_tile` where every row is weighted: on a GPU two rows, or more, share the registers of their weights."""
    return rows_per_tile(rows, width, machine().row * (1 if machine().whole else 2))


def sums_in(x: Any) -> Any:
    """The dtype that a float array is computed in: float32, float64 for float64."""
    return jnp.dtype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)


def wide(x: jax.Array) -> jax.Array:
    """A float tile as it is computed with: float32, or float64 where it is that already."""
    return x.astype(sums_in(x))


def as_rows(x: jax.Array) -> jax.Array:
    """`x` [..., n] as [rows, n]; a vector is one row."""
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def check_axis(axis: Any, ndim: int, op: str) -> int:
    """`axis` counted from the front.

    Raises:
      KernelTypeError: no int. KernelValueError: no axis of an array of rank `ndim`.
    """
    if isinstance(axis, bool) or not isinstance(axis, int):
        raise KernelTypeError(f"{op}: axis is an int, got {axis!r}")
    if not -ndim <= axis < ndim:
        raise KernelValueError(f"{op}: axis {axis} is no axis of an array of rank {ndim}")
    return axis % ndim


def _check_has(attribute: str, op: str, name: str, x: Any) -> None:
    """Raises KernelTypeError for what is no array: a list or tuple, a Python number, None."""
    if not hasattr(x, attribute):
        raise KernelTypeError(f"{op}: {name} is an array, got {type(x).__name__}; convert it: jnp.asarray(...)")


def check_float(op: str, **arrays: Any) -> None:
    """Raises KernelTypeError for what is no array of a float dtype; None stands for an array that is not given."""
    for name, x in arrays.items():
        if x is None:
            continue
        _check_has("dtype", op, name, x)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise KernelTypeError(f"{op}: {name} is a float array, got {x.dtype.name}; convert it: {name}.astype(...)")


def float_dtype(op: str, given: Any, default: Any) -> np.dtype:
    """The dtype of a result: `given`, or the default for None; raises KernelTypeError for what is no float dtype."""
    try:
        found = jnp.dtype(default if given is None else given)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        name = repr(given) if found is None else found.name
        raise KernelTypeError(f"{op}: out_dtype {name}; expected a float, for instance {jnp.dtype(default).name}")
    return found


def check_int(op: str, **arrays: Any) -> None:
    """Raises KernelTypeError for what is no array of an integer dtype; None stands for an array that is not given."""
    for name, x in arrays.items():
        if x is None:
            continue
        _check_has("dtype", op, name, x)
        if not jnp.issubdtype(x.dtype, jnp.integer):
            way = f"convert it: {name}.astype(jnp.int32)"
            raise KernelTypeError(f"{op}: {name} is an integer array, got {x.dtype.name}; {way}")


def check_shape(op: str, name: str, x: Any, shape: tuple[int, ...]) -> None:
    """Raises KernelValueError where `x` has another shape, KernelTypeError where it is no array."""
    _check_has("shape", op, name, x)
    if tuple(x.shape) != tuple(shape):
        raise KernelValueError(f"{op}: {name} has shape {tuple(x.shape)}, expected {tuple(shape)}")


def check_rank(op: str, name: str, x: Any, rank: int, meaning: str) -> None:
    """Raises KernelValueError where `x` has another rank; `meaning` names the axes, as in "[batch, length]".

    KernelTypeError where it is no array.
    """
    _check_has("shape", op, name, x)
    if x.ndim != rank:
        raise KernelValueError(f"{op}: {name} is {meaning}, got shape {tuple(x.shape)}")
