"""Which groups and loops are worth a kernel, and which stay XLA's.

The numbers were measured by `python -m benchmarks cpu --only fuse` on two cores.
"""

from __future__ import annotations

import math
import types
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

import jtile as jt
from jtile.ops import gpu_tiles
from jtile.ops.dispatch import small_tiles, vector_cores

from .layout import COLUMNS, Layout
from .steps import ELEMENTWISE, MOVES, REDUCTIONS, RUNNING, Step, Value, size_of

LEAST = 4096  # elements of the largest array, in memory or in a kernel: below, a kernel is not quicker than XLA
ROW_CPU, ROW_GPU = 16384, 32768  # elements that a program takes whole
ALONE = 4096  # elements that a program takes whole where the grid has only one program
TILE = 65536  # elements of a tile that is whole along an axis which is not the last
# Functions for which XLA's code on CPUs takes 1.5 to 50 times as long as a kernel, even where they stand alone.
SLOW = frozenset(
    ["sin", "cos", "tan", "asin", "acos", "sinh", "cosh", "exp", "exp2", "expm1", "log", "log1p", "pow", "cbrt"]
)
MANY = 6  # arrays
CHAINS_ON_GPUS = (
    False  # whether GPUs run groups as kernels in which no program takes an axis whole: XLA's code is as quick
)
# Whether GPUs take products with vectors as sums though an array as large as the matrix is in memory: XLA's is quicker.
LARGE_PRODUCTS_ON_GPUS = False
# Whether GPUs run products with the elementwise functions behind them as kernels, and from which sizes on (sides, and
# elements of the result); whether everything does, for tests.
PRODUCTS_ON_GPUS, PRODUCTS_ANYWHERE = True, False
LEAST_SIDE, LEAST_RESULT = 512, 1 << 22
# On CPUs: rows of products that compute their weights, or read them transposed, at most, and elements of these weights;
# rows of other products of a dtype that repay a kernel.
MOST_ROWS, LEAST_WEIGHTS = 256, 1 << 16
FEW_ROWS = types.MappingProxyType({"float32": 8, "float64": 4})
# Rows of a product in bfloat16 that computes a norm of them at most, on CPUs, and the bytes of these: a first cache.
FEW_NORMED, NORMED_BYTES = 16, 1 << 15
ROW_BYTES = 16  # of which a row of an operand has a multiple, where GPUs copy tiles of it
LARGEST_TABLE, LEAST_UPDATES = 1 << 13, 8  # elements of a scatter's table, and updates for each, on CPUs
LEAST_ROW, MOST_TABLE = 8, 2  # elements of rows that are scattered, and of the table for each of them, on CPUs
# On GPUs: elements of rows of 16-bit floats that are added, and in all, and elements of the table for each of these.
LEAST_ROW_ON_GPUS, LEAST_ADDED, MOST_TABLE_ON_GPUS = 64, 1 << 20, 4
SCATTERS_ANYWHERE = ROW_SCATTERS_ANYWHERE = False  # whether kernels scatter whatever the sizes, for tests
ROWS_ON_CPUS = False  # whether groups pick whole rows or columns on CPUs: XLA's code copies them as quickly
SHORT = 16  # elements along the last axis of a group with windows: of fewer no vectors are made
FEW = 8  # elements, along axes that a program takes whole, which a GPU's kernel does not read as well as XLA's
EXACT = frozenset(["erf", "erfc", "erf_inv"])  # functions that kernels for CPUs compute more exactly, in twice the time

# Parts of arrays, which XLA reads where an elementwise function needs them; a kernel would have to wait for a copy.
PARTS = frozenset(["slice", "dynamic_slice", "concatenate", "pad", "rev", "gather", "select_and_scatter_add"])
# Arithmetic of an instruction or two: a chain of it is bound by memory, and XLA's code reads many arrays as quickly.
CHEAP = frozenset(
    ["add", "sub", "mul", "div", "max", "min", "neg", "abs", "sqrt", "rsqrt", "square", "integer_pow", "select_n",
     "eq", "ne", "lt", "le", "gt", "ge", "and", "or"]
)  # fmt: skip

# Functions that say which element is taken, and those that compute nothing.
CHOICES = frozenset(
    [
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "and",
        "or",
        "not",
        "select_n",
        "convert_element_type",
        "copy",
        "stop_gradient",
    ]
)


def has_room(layout: Layout) -> bool:
    """Whether a program has room for what it takes whole."""
    if not layout.whole:
        return True
    if len(layout.whole) == len(layout.sizes):
        return layout.row <= ALONE
    if len(layout.sizes) - 1 not in layout.whole:
        return layout.row * min(COLUMNS, layout.sizes[-1]) <= TILE
    return layout.row <= (ROW_GPU if "warps" in jt.target().features else ROW_CPU)


def once_is_quicker(layout: Layout, steps: Sequence[Step]) -> bool:
    """Whether it pays that a program takes axes whole. Columns of a matrix are read a few at a time then; reading it
    twice, row by row, is as quick as long as nothing but cheap arithmetic is done twice."""
    if not layout.whole or len(layout.sizes) - 1 in layout.whole:
        return True
    return any(step.name in ELEMENTWISE - CHEAP - {"convert_element_type", "copy"} for step in steps)


def not_worth(
    steps: Sequence[Step],
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    layout: Layout,
    *,
    everything: bool = False,
) -> str | None:
    """Why a group is not worth a kernel, or None; `everything`: one that computes something always is."""
    largest = max((size_of(v) for v in (*inputs, *outputs)), default=0)
    work = [step for step in steps if step.name not in MOVES and step.name not in ("convert_element_type", "copy")]
    if not largest or 0 in layout.sizes:
        return "it has no elements"
    if everything:
        real = any(step.name not in REDUCTIONS or size_of(step.ins[0]) != size_of(step.outs[0]) for step in work)
        return None if real else "it moves elements, and computes nothing"
    inside = largest
    if "warps" not in jt.target().features:  # sums of outer products are small; what a GPU gains there is not measured
        inside = max(largest, *(size_of(v) for step in steps for v in step.outs))
    if inside < LEAST:
        return f"its largest array has {inside} elements, fewer than {LEAST}"
    if not work:
        return "it moves elements, and computes nothing"
    if len(work) == 1 and work[0].name in REDUCTIONS | RUNNING:
        return "it is one reduction"
    if len(work) == 1 and not layout.whole and ("warps" in jt.target().features or not is_slow(work[0])):
        return "it is one step"
    names = {step.name for step in work}
    on_gpu = "warps" in jt.target().features
    if not layout.whole and on_gpu and not CHAINS_ON_GPUS:
        return "it is arithmetic and sums of programs' parts, which XLA's code for GPUs does at the speed of memory"
    if layout.whole and layout.row <= FEW and on_gpu and not CHAINS_ON_GPUS:
        return f"it reduces axes of {layout.row} elements, which XLA's code for GPUs does in registers"
    if not layout.whole and not on_gpu and names & EXACT:
        return "XLA's code for CPUs computes erf less exactly, in half of the time"
    columns = layout.late and not layout.whole and len(layout.sizes) - 1 not in layout.late
    if columns and names <= CHEAP | REDUCTIONS:
        return "it sums columns of cheap arithmetic, which XLA does at the speed of memory"
    arrays = sum(size_of(v) * MANY > largest for v in (*inputs, *outputs))  # numbers and rows take no time to read
    if not layout.whole and names <= CHEAP and arrays >= MANY:
        return f"it is arithmetic of {arrays} arrays, which memory bounds"
    return None


def windows_not_worth(
    steps: Sequence[Step], inputs: Sequence[Value], outputs: Sequence[Value], layout: Layout
) -> str | None:
    """Why a group with windows is not worth a kernel, or None."""
    largest = max((size_of(v) for v in (*inputs, *outputs)), default=0)
    if largest < LEAST:
        return f"its largest array has {largest} elements, fewer than {LEAST}"
    if layout.late and "warps" in jt.target().features and not CHAINS_ON_GPUS:
        return "it sums windows of arrays, which XLA's code for GPUs does at the speed of memory"
    if layout.sizes[-1] < SHORT:
        return f"its last axis has {layout.sizes[-1]} elements, too few for vectors"
    if sum(step.name in ELEMENTWISE - CHOICES for step in steps) < 2 or not inputs:
        return "it moves elements, and computes little"
    return None


def is_slow(step: Step) -> bool:
    """Whether XLA's code for a function on CPUs takes longer than a kernel to write and to read an array; remainders of
    floats call a library there, element by element, those of integers are divisions in both."""
    return step.name in SLOW or (step.name == "rem" and jnp.issubdtype(step.outs[0].dtype, jnp.floating))


def reads_parts(
    steps: Sequence[Step], inputs: Sequence[Value], made_by: dict[Value, str], layout: Layout
) -> str | None:
    """Why a group that reads parts of arrays is not worth a kernel, or None; made_by: the primitive of each value. A
    slow function repays the copy of a part."""
    parts = [v for v in inputs if made_by.get(v) in PARTS]
    if "warps" not in jt.target().features and sum(map(is_slow, steps)) >= len(parts):
        return None
    if not layout.whole and sum(map(size_of, parts)) * 2 > sum(map(size_of, inputs)):
        return "it reads parts of arrays, which XLA does without copies"
    return None


def product_worth(
    m: int, n: int, k: int, dtype: np.dtype, steps: Sequence[Step], *, gates: int, transposed: bool, beside: int = 0
) -> bool:
    """Whether `gates` products of m rows and n columns of k terms are worth a kernel with the elementwise `steps`
    behind them. Elsewhere XLA's products are as quick, and what is behind them takes little time. transposed: the right
    operand lies in memory as [n, k]. beside: how many arrays of the result's size the steps read, which a GPU's kernel
    waits for between one tile and the next (an H200 takes 172 us for 8192 rows and a residual, 126 without, XLA 154).
    """
    work = sum(step.name in ELEMENTWISE - CHOICES for step in steps)
    if PRODUCTS_ANYWHERE:
        return work > 0
    target = jt.target()
    if not gpu_tiles.on_one_device():  # XLA cuts a product along its sums, too, which a kernel would have to gather
        return False
    if vector_cores():  # what CPUs gain by the other forms has not been seen on an NPU
        return dtype.name == "bfloat16" and work > 0 and m * n >= LEAST
    if "warps" not in target.features:
        return _product_worth_on_cpus(m, n, k, dtype, work, gates, transposed)
    if not PRODUCTS_ON_GPUS or "warpgroup products" not in target.features:
        return False
    if beside and gates == 1:
        return False
    copied = all(side * dtype.itemsize % ROW_BYTES == 0 for side in (n, k))
    return copied and dtype.itemsize == 2 and work > 1 and min(m, n, k) >= LEAST_SIDE and m * n >= LEAST_RESULT


def _product_worth_on_cpus(m: int, n: int, k: int, dtype: np.dtype, work: int, gates: int, transposed: bool) -> bool:
    short = any(kind == dtype.name for *_, kind in jt.target().matrix_shapes)  # bfloat16, int8
    if short and work > 0 and m * n >= LEAST:
        return True
    if gates > 1 or m < 2 or n * k < 4 * LEAST_WEIGHTS or not (short or dtype.name in FEW_ROWS):
        return False
    if transposed:  # XLA writes the other order to memory first
        return m <= MOST_ROWS
    return work > 0 and m <= FEW_ROWS.get(dtype.name, 0)


def prologue_worth(m: int, n: int, k: int, dtype: np.dtype, read: int | None) -> bool:
    """Whether a product of m rows and n columns of k terms computes tiles of its operands itself, which XLA writes to
    memory and reads. read: the bytes that a kernel reads for each weight, None where it computes no weights. A tile of
    them is computed once for each tile of rows, so few rows repay it."""
    if PRODUCTS_ANYWHERE:
        return True
    target = jt.target()
    if not gpu_tiles.on_one_device() or small_tiles() or read is None or read > dtype.itemsize:
        return False
    quick = dtype == np.float32 or any(kind == dtype.name == "bfloat16" for *_, kind in target.matrix_shapes)
    return quick and m <= MOST_ROWS and n * k >= LEAST_WEIGHTS


def norm_worth(m: int, n: int, k: int, dtype: np.dtype, read: int | None) -> bool:
    """Whether each program of a product computes all of its rows at first, with what sums along them: a norm. It takes
    little where these are few and stay in the first cache, and saves a kernel, and XLA's code for products of few rows
    in 16-bit floats. Of more rows, and on GPUs, the norm is computed once, by a kernel of its own. read: see
    `prologue_worth`."""
    if small_tiles() or k > ROW_CPU or (read is not None and read > dtype.itemsize):
        return False
    if PRODUCTS_ANYWHERE:
        return True
    short = any(kind == dtype.name == "bfloat16" for *_, kind in jt.target().matrix_shapes)
    most = FEW_NORMED if short else FEW_ROWS.get(dtype.name, 0)
    few = m <= most and m * k * dtype.itemsize <= NORMED_BYTES
    return gpu_tiles.on_one_device() and few and n * k >= LEAST_WEIGHTS


def picks_well(step: Step) -> bool:
    """Whether a kernel does a gather at least as quickly as XLA. A CPU's kernel loads one element after another, each
    by its index, where XLA copies whole rows or columns that one index picks."""
    offsets = step.params["dimension_numbers"].offset_dims
    rows = any(step.outs[0].shape[i] != 1 for i in offsets)
    return not rows or ROWS_ON_CPUS or "warps" in jt.target().features


def scatter_worth(step: Step) -> bool:
    """Whether what a group computes is added to a table in its kernel. Each program has a table of its own, which takes
    little time to fill and to join with the others; XLA's code for CPUs adds in one thread what it has written before,
    that for GPUs in all threads what it computes."""
    if SCATTERS_ANYWHERE:
        return True
    table, updates = size_of(step.outs[0]), size_of(step.ins[-1])
    window = step.params["dimension_numbers"].update_window_dims
    rows = any(step.ins[-1].shape[i] != 1 for i in window)  # XLA adds a row in vectors
    few = table <= LARGEST_TABLE and table * LEAST_UPDATES <= updates and not rows
    return few and updates >= LEAST and not small_tiles()


def rows_worth(step: Step, computed: Sequence[Step]) -> str | None:
    """Why a scatter of rows stays XLA's, or None. computed: the steps that compute the rows. XLA's code for CPUs takes
    one row after another in one thread, and reads what it has written before; where nothing is computed it is as
    quick, and where the table is large, most of the time is that of its copy. That for GPUs adds by atomic
    instructions, as a kernel does."""
    on_gpu = "warps" in jt.target().features
    adds, unique = step.name.endswith("add"), step.name == "scatter" and step.params["unique_indices"]
    if on_gpu and not (adds or unique):
        return "its rows may meet, and programs of a kernel for GPUs write them in any order"
    if ROW_SCATTERS_ANYWHERE:
        return None
    if not gpu_tiles.on_one_device() or vector_cores():
        return "kernels write to tables that lie on one device"
    table, row, updates = size_of(step.outs[0]), math.prod(step.outs[0].shape[1:]), size_of(step.ins[-1])
    if on_gpu:
        return _rows_worth_on_gpus(adds, row, updates, table, step.outs[0].dtype)
    if not any(s.name in ELEMENTWISE - CHOICES for s in computed):
        return "nothing computes its rows, which XLA's code moves as quickly"
    if row < LEAST_ROW or updates < LEAST:
        return f"it scatters {updates} elements in rows of {row}, too few to repay a kernel"
    if updates * MOST_TABLE < table:
        return f"it scatters {updates} elements into a table of {table}, whose copy takes most of the time"
    return None


def _rows_worth_on_gpus(adds: bool, row: int, updates: int, table: int, dtype: np.dtype) -> str | None:
    """Why GPUs scatter no rows in kernels, or None: where 16 bytes are added by one instruction, of which XLA's code
    adds two numbers at a time."""
    if not adds or dtype not in (jnp.bfloat16, jnp.float16) or "warpgroup products" not in jt.target().features:
        return "XLA's code for GPUs scatters rows as quickly, but for sums of 16-bit floats on compute capability 9"
    if row % (ROW_BYTES // dtype.itemsize) or row < LEAST_ROW_ON_GPUS or updates < LEAST_ADDED:
        return f"it scatters {updates} elements in rows of {row}, too few to repay a kernel"
    if updates * MOST_TABLE_ON_GPUS < table:
        return f"it scatters {updates} elements into a table of {table}, to fill which takes most of the time"
    return None


def takes_large_products() -> bool:
    """Whether products with vectors are sums in the kernels that compute the matrices, though these are computed from
    arrays as large."""
    return LARGE_PRODUCTS_ON_GPUS or "warps" not in jt.target().features


def loop_worth(layout: Layout, length: int, steps: Sequence[Step]) -> bool:
    """Whether a loop is worth a kernel: XLA runs a round in a few microseconds at least."""
    work = any(step.name not in MOVES and step.name not in ("convert_element_type", "copy") for step in steps)
    return work and length * math.prod(layout.sizes) >= max(LEAST, 1)
