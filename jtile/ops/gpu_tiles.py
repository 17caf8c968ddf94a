"""Tile sizes of the library's kernels on GPUs: what one block of threads holds in registers and shared memory.

Measured on an H200; `benchmarks/records` has the numbers. Warps and stages count for NVIDIA's GPUs, see `tuned`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

import jtile as jt
from jtile import cdiv
from jtile.ops import hopper_tiles
from jtile.ops.dispatch import first_unmet
from jtile.ops.hopper_tiles import Product
from jtile.tune import products
from jtile.tune.products import power, side

LITTLE = 100 << 10  # bytes of shared memory of a block


def processors() -> int:
    """Multiprocessors (compute units) of the GPU that kernels called here are made for; where that is none, of sm_90's
    common card, whose kernels are also for the interpreter."""
    found = jt.target()
    return found.programs_at_once if "warps" in found.features else hopper_tiles.processors()


def overlaps() -> bool:
    """Whether a kernel may read a matrix while the kernel in front of it still runs; see `jt.config`."""
    with jt.config() as now:
        return bool(now.overlap)


def misfit_of_stream(x, weights: tuple) -> str | None:
    """Why no kernel of the block level whose matrices come from memory once, and overlap, takes rows x [m, k] and these
    [n, k] of 16-bit floats; None where it depends on the number of rows only."""
    if not all(isinstance(n, int) and n > 0 for n in (*x.shape, *weights[0].shape)):
        return "sizes are 0, or not known"
    alike = x.dtype in (jnp.bfloat16, jnp.float16) and all(w.dtype == x.dtype for w in weights)
    return first_unmet(
        (overlaps(), "kernels do not overlap"),
        (on_one_device(), "rows may be shared out among several devices"),
        (alike, f"rows are {x.dtype.name}, and matrices {weights[0].dtype.name}: not 16-bit floats alike"),
        (x.shape[1] % 8 == 0, f"rows of {x.shape[1]} are no lines of copies"),
    )


def misfit_of_plain_product(a, b, *, activation: str | None, save: bool, out_dtype: str) -> str | None:
    """Why op(a) op(b) of a [e, m, k] and b [e, k, n] is not one product of 16-bit floats of which nothing but the
    result is wanted; `save`: whether the sums are wanted besides."""
    sizes = a.shape[0], b.shape[0], *a.shape[1:], *b.shape[1:]
    sixteen = a.dtype == b.dtype == jnp.dtype(out_dtype) and a.dtype in (jnp.bfloat16, jnp.float16)
    return first_unmet(
        (all(isinstance(size, int) and size > 0 for size in sizes), "sizes are 0, or not known"),
        (sizes[:2] == (1, 1), "there are several products"),
        (sixteen, f"{a.dtype.name} times {b.dtype.name} in {out_dtype} are not 16-bit floats alike"),
        (not save and activation is None, "the sums are wanted, too, or are where it is differentiated"),
        (on_one_device(), "rows may be shared out among several devices"),
    )


def holds() -> bool:
    """Whether a kernel called here lets the one behind it start only after it has waited itself, and reads no lengths
    before it has; see `holding`."""
    return _holding().value


def holding() -> contextlib.AbstractContextManager:
    """A block whose kernels let the ones behind them start only when those in front have ended: early roles behind read
    what these write. Attention that is called there reads its lengths when those have ended."""
    return _holding()(True)


@functools.cache
def _holding() -> Any:
    return jax.make_user_context(False)


def on_one_device() -> bool:
    """Whether no axis of the operands may be shared out by XLA among several devices: there is one, or what is called
    here is the part of one, inside of `jax.shard_map`, or `beside` has promised it."""
    mesh = jax.sharding.get_abstract_mesh()
    inside = bool(mesh.axis_names) and set(mesh.axis_names) == set(mesh.manual_axes)
    return inside or jax.device_count() == 1 or _promised().value


def beside(weights: Iterable[Any]) -> contextlib.AbstractContextManager:
    """A block in which kernels are made for one device, if these weights of a program lie on one: then XLA shares out
    no axis, whatever devices the host has besides. NumPy's arrays among them go to where the others are."""
    return _promised()(len({d for w in weights if isinstance(w, jax.Array) for d in w.devices()}) == 1)


@functools.cache
def _promised() -> Any:
    """What is traced within and without the promise is remembered apart."""
    return jax.make_user_context(False)


@dataclasses.dataclass(frozen=True)
class Choice:
    """Meta-parameters of a kernel, and options for the compiler."""

    tiles: dict[str, int]
    options: dict[str, int]


def product(
    m: int, n: int, k: int, itemsize: int, gates: int = 1, transposed: bool = False, **of: Any
) -> dict[str, int]:
    """The tile sizes of `gates` matrix products [m, k] [k, n] of elements of `itemsize` bytes in one kernel.

    Args:
      transposed: the right operand lies in memory as [n, k].
      of: `batch`: how many products; `fast`: whether their precision is "fast"; more: see `hopper_tiles.Product`.
    Returns:
      `bm`, `bn` and `bk`.
    """
    own = None
    if warpgroups():
        asked = Product(m, n, k, itemsize, gates=gates, transposed=transposed, **of)
        own = hopper_tiles.tiles(asked)
        if own is None and itemsize == 2 and asked.gates == asked.batch == 1 and transposed and not asked.left:
            own = products.long_sums_of_few_rows(m, n, k, processors())
    return own or products.on_gpu(m, n, k, itemsize, gates, transposed, processors())


def extended(m: int, n: int, k: int, itemsize: int, **of: Any) -> tuple[int, int, int]:
    """The sizes that a product's operands are best extended to, with zeros, mostly those that it has; `of`: see
    `product`."""
    return hopper_tiles.extended(Product(m, n, k, itemsize, **of)) if warpgroups() else (m, n, k)


def parts_of_product(m: int, n: int, k: int, itemsize: int, **of: bool) -> tuple[int, dict[str, int]]:
    """In how many parts the sums of a product are best made, 1 for whole, and the tiles of the parts; `of`: where the
    operands lie transposed in memory, see `hopper_tiles`.

    Several parts are best where large tiles leave half of the GPU idle. The float32 sums of each part are written and
    read, so that a part has 4096 terms or more.
    """
    own = hopper_tiles.parts_of_product(Product(m, n, k, itemsize, **of)) if warpgroups() else None
    return own or _parts(m, n, k, itemsize, processors())


@functools.lru_cache(maxsize=1024)
def _parts(m: int, n: int, k: int, itemsize: int, processors: int) -> tuple[int, dict[str, int]]:
    tiles = cdiv(m, 128) * cdiv(n, 128)
    parts = min(processors // max(tiles, 1), k // 4096, 4)
    if itemsize > 2 or m <= 64 or n <= 64 or parts < 2:
        return 1, {}
    return 1 << parts.bit_length() - 1, {"bm": 128, "bn": 128, "bk": 128 // itemsize}


product_options = products.warps


def few_rows(bm: int, bn: int, bk: int, itemsize: int) -> Choice:
    """Further meta-parameters and options of a product of few rows; see `products.stages_of_few_rows`."""
    found = products.stages_of_few_rows(bm, bn, bk, itemsize) if measured_warps() else ({}, {})
    return Choice(*found)


def neighbours(m: int, n: int, k: int, itemsize: int, bm: int, bn: int, **of: Any) -> dict[str, int]:
    """The option that lets blocks of a product share copies, where that pays; `of`: see `product`."""
    if not warpgroups() or not all(isinstance(size, int) for size in (m, n, k)):
        return {}
    found = hopper_tiles.neighbours(Product(m, n, k, itemsize, **of), bm, bn)
    return {"multicast": found} if found > 1 else {}


def little_memory() -> bool:
    """Whether a block of the GPU at hand has 100 KB of shared memory or less: all but those made for data centres, and
    AMD's of before gfx950."""
    shared = jt.target().memory("block")
    return shared is None or shared.size is None or shared.size <= LITTLE


def measured_warps() -> bool:
    """Whether numbers of warps and stages were measured on GPUs like the one at hand; else its compiler chooses."""
    return "measured warps" in jt.target().features


def warpgroups() -> bool:
    """Whether the GPU at hand has warpgroup products, so that kernels run at the block level there."""
    return "warpgroup products" in jt.target().features


def attention(
    t: int, s: int, d: int, itemsize: int, causal: bool, little: bool = False, lengths: bool = False
) -> dict[str, int]:
    """The queries `bq` and keys `bk` of a tile of attention of t queries over s keys with heads of d; `little`: see
    `little_memory`; `lengths`: not all keys of a row count."""
    own = hopper_tiles.attention(t, s, d, itemsize, causal, lengths) if warpgroups() else None
    return own or products.attention_on_gpu(t, s, d, itemsize, causal, little)


def keys_of_cache(d: int, itemsize: int) -> int:
    """The number of keys in a tile of attention over a cache."""
    return max(16, min(64, 32768 // (d * itemsize))) if little_memory() else 64


attention_options = products.warps_of_attention


@functools.lru_cache(maxsize=1024)
def attention_gradients(t: int, s: int, d: int, itemsize: int, little: bool = False) -> tuple[Choice, Choice]:
    """The choices for the two kernels of attention's reverse mode: for the gradients of the keys and values, and for
    those of the queries; `little`: see `little_memory`."""
    options = {"num_warps": 8}
    if itemsize == 2 and d in (64, 128):
        sides = {"bq": side(t, 64), "bk": side(s, 64)}, {"bq": side(t, 64 if d == 64 else 128), "bk": side(s, 64)}
        return Choice(sides[0], {"num_warps": 4}), Choice(sides[1], {"num_warps": 4 if d == 64 else 8})
    if itemsize >= 4:
        small, large, huge = ((32, 32), (64, 32)), ((16, 32), (32, 16)), ((16, 16), (16, 16))
        (q1, k1), (q2, k2) = small if d <= 64 else large if d <= 128 else huge
    elif d <= 128:  # heads are padded to a power of two: masks take registers
        (q1, k1), (q2, k2) = (32, 128), (128, 64)
    elif d <= 256 or not little:
        (q1, k1), (q2, k2) = (32, 32 if little else 64), (64, 32)
    else:
        (q1, k1), (q2, k2) = (16, 16), (16, 16)
    keys, queries = ({"bq": side(t, q), "bk": side(s, k)} for q, k in ((q1, k1), (q2, k2)))
    return Choice(keys, options), Choice(queries, options)


@functools.lru_cache(maxsize=1024)
def warps_of_rows(elements: int, weighted: bool = False, centred: bool = False) -> int:
    """The warps of a kernel that holds `elements` of one or more rows in registers: a thread has 32 bytes of them, or
    more, since many warps wait long for each other at a reduction. Rows that are `weighted` have weights there too, and
    long ones that are `centred` wait for two sums one after the other, which more threads make sooner."""
    if centred and elements in (16384, 32768):  # no masks: rows of 12288, which need them, are quicker in eight warps
        return 16
    if elements > 16384:
        return min(power(elements) // 2048, 32) if elements > 32768 else 8
    return min(max(power(elements) // 512, 1), 8 if weighted else 4)


def long_rows(n: int, itemsize: int) -> Choice | None:
    """The choice for a layer norm that reads its rows of n elements twice, the second time in blocks `bn`. None where
    that frees no registers for further rows: shorter rows leave some anyway, and of longer ones, or those of 32 bits,
    a multiprocessor holds one or two either way."""
    suits = 8192 < n <= 16384 and itemsize == 2 and measured_warps()
    return Choice({"bn": 4096}, {"num_warps": 16}) if suits else None


def gradients_of_rows(rows: int, n: int, itemsize: int, centre: bool) -> Choice | None:
    """The choice for the reverse mode of a norm (`centre`: with means), whose programs hold tiles of rows of n numbers,
    sums over all of their rows, and, if `ahead`, the next tile: `br` rows of a tile, `per` tiles of a program. Where
    the next tile would leave a second program no registers, it comes to shared memory; with long rows, so do the
    weights. None where registers do not hold the sums beside the rows."""
    return _gradients_of_rows(rows, n, itemsize, centre, processors())


@functools.lru_cache(maxsize=1024)
def _gradients_of_rows(rows: int, n: int, itemsize: int, centre: bool, processors: int) -> Choice | None:
    side = power(n)
    if side * itemsize > (16384 if centre else 32768):
        return None
    short = side < 1024  # several warps hold the rows of a tile, and meet to add them up: the fewer the better
    br = min(max((1024 if short else 2048) // side, 1), power(max(rows // processors, 1)))
    per = cdiv(cdiv(rows, br), processors * min(max(8192 // side, 1), 8 if short else 4))
    warps = min(max(br * side // 512, 1), 16)
    if side * itemsize > 16384:
        way = {"again": True, "apart": True, "stages": 3}
    else:
        way = {"together": True, "stages": 3} if centre and not short else {"ahead": True}
    return Choice({"br": br, "per": max(per, 1), **way}, {"num_warps": warps})
