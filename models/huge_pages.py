"""Weights of a host in huge pages, on Linux.

A core looks up the address of each page that it reads, and its prefetchers end at the end of a page. A step reads all
weights once: in pages of 4 KiB a core of the measured machine reads 12 to 14 GB/s of what no cache holds, and 15 to 17
in pages of 2 MiB (docs/notes/quantised.md).
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from jtile.ops import QuantizedTensor

PAGE = 2 << 20
LEAST = 16 << 20  # bytes of weights that are moved: the caches of a core have the addresses of fewer
_MOST = 256 << 20  # bytes of a piece of memory, but for larger arrays: it is there beside what is to be moved
_LINE = 64  # JAX takes an array as it is where it begins at such a multiple
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def move(weights: list[jax.Array], tree) -> int:
    """Moves the panels of a model to memory that the system holds in huge pages, where it has such.

    Other weights stay: they may be pages of a file, which other processes share.

    Args:
      weights: the leaves of a model on the host; those that move are replaced one by one, so that the old ones can go.
      tree: the tree whose leaves they are.

    Returns:
      How many bytes were moved; 0 where the system has no such pages, or weights are too small to gain by it. What
      the system refuses memory for stays where it is.
    """
    panels = [*_panels(weights, tree)]
    left = total = sum(_room(weights[i]) for i in panels)
    if total < LEAST or not available():
        return 0
    piece, at = np.empty(0, np.uint8), 0
    for i in panels:
        room = _room(weights[i])
        if at + room > piece.size:
            try:
                piece, at = _piece(max(room, min(left, _MOST))), 0
            except OSError:  # the system refuses memory, or pages of this kind: the other weights are read as they are
                return total - left
        weights[i] = _moved(weights[i], piece[at : at + weights[i].nbytes])
        at, left = at + room, left - room
    return total


def available() -> bool:
    """Whether the system gives huge pages to who asks for them."""
    try:
        return hasattr(mmap, "MADV_HUGEPAGE") and "[never]" not in _SETTING.read_text()
    except OSError:
        return False


def _panels(weights: list[jax.Array], tree) -> Iterator[int]:
    """The numbers of the leaves of quantised weights in panels, which are made as a model is read."""
    numbers = jax.tree.unflatten(tree, range(len(weights)))
    for tensor in jax.tree.leaves(numbers, is_leaf=lambda x: isinstance(x, QuantizedTensor)):
        if isinstance(tensor, QuantizedTensor) and weights[tensor.codes].dtype == np.int32:
            yield from jax.tree.leaves(tensor)


def _room(x: jax.Array) -> int:
    return -(-x.nbytes // _LINE) * _LINE


def _piece(size: int) -> np.ndarray:
    """So many bytes of new memory, from the beginning of a huge page on."""
    whole = -(-size // PAGE) * PAGE + PAGE
    memory = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    found = np.frombuffer(memory, np.uint8)
    return found[-found.ctypes.data % PAGE :][:size]


def _moved(x: jax.Array, memory: np.ndarray) -> jax.Array:
    """The same array in this memory, which lives as long as an array in it."""
    there = memory.view(x.dtype).reshape(x.shape)
    there[...] = np.asarray(x)
    return jax.device_put(there, may_alias=True)
