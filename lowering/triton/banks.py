"""Banks of shared memory: how many times the memory must be asked for what one access of a warp reads or writes.

Shared memory has 32 banks of 4 bytes. Threads that want different words of one bank wait for each other: that is a bank
conflict. The counts follow from the layouts alone, since each bit of an offset is a sum of bits of the thread's number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from .attributes import Memory
from .block.layouts import Linear

BANKS, WORD = 32, 4  # banks of NVIDIA's and AMD's shared memory, and bytes of a word
LINE = BANKS * WORD  # bytes that one wavefront moves at most
MATRIX = 16  # bytes of a row of the matrices that instructions for operands of products move


@dataclasses.dataclass(frozen=True)
class Access:
    """One access of a warp.

    Attributes:
      how: `ldmatrix`, `ldmatrix.trans`, `rows`: eight rows of 16 bytes; or `vector`: `width` bytes of each thread.
      width: bytes of each thread, or of each row.
      offsets: for each thread or row, bytes from the beginning of the buffer.
      together: threads or rows that one wavefront could serve.
      wavefronts: how many the access takes; least: how many its bytes would take without conflicts.
    """

    how: str
    width: int
    offsets: tuple[int, ...]
    together: int
    wavefronts: int
    least: int


def of_registers(tile: Linear, memory: Memory, bits: int, *, matrices: bool) -> Access | None:
    """The access by which a warp moves a tile between registers and shared memory; None for elements below a byte.

    Args:
      bits: bits of an element.
      matrices: whether the target moves matrices of eight rows by one instruction (`ldmatrix`, `stmatrix`).
    """
    if bits < 8:
        return None
    register, lane = ([memory.moved(b) * bits // 8 for b in bases] for bases in (tile.register, tile.lane))
    size = bits // 8
    if matrices and len(lane) == 5:
        flat = [size * 2**k for k in range((WORD // size).bit_length() - 1)]
        neighbours = all(at in register for at in flat) and lane[:2] == [4, 8]
        if neighbours and all(at % MATRIX == 0 for at in lane[2:]):
            return _access("ldmatrix", MATRIX, lane[2:], memory, bits)
        rows = [at for at in register if at and at % MATRIX == 0][:1] + lane[:2]
        turned = size == 2 and lane[2:] == [2, 4, 8] and register and register[0] % MATRIX == 0
        if turned and all(at and at % MATRIX == 0 for at in rows):
            return _access("ldmatrix.trans", MATRIX, rows, memory, bits)
    width = size
    while width in register and width < 16:
        width *= 2
    return _access("vector", width, lane, memory, bits)


def of_product(memory: Memory, shape: Sequence[int], bits: int) -> Access | None:
    """The access of a product that reads its operand from shared memory: eight rows of 16 bytes; None for buffers
    without so many rows."""
    inner = next((k for k, at in enumerate(memory.along) if at[:1] == (1,)), None)
    outer = [k for k in reversed(range(len(shape))) if k != inner and shape[k] >= 8]
    if inner is None or not outer:
        return None
    return _access("rows", MATRIX, [at * bits // 8 for at in memory.along[outer[0]][:3]], memory, bits)


def _access(how: str, width: int, steps: Iterable[int], memory: Memory, bits: int) -> Access:
    offsets = [0]
    for step in steps:
        offsets += [at ^ step for at in offsets]
    placed = [memory.padded(at * 8 // bits) * bits // 8 for at in offsets]
    together = min(len(placed), BANKS, max(LINE // max(width, WORD), 1))
    groups = [placed[k : k + together] for k in range(0, len(placed), together)]
    return Access(
        how,
        width,
        tuple(placed),
        together,
        sum(wavefronts(g, width) for g in groups),
        sum(_least(g, width) for g in groups),
    )


def _words(offsets: Iterable[int], width: int) -> set[int]:
    return {word for at in offsets for word in range(at // WORD, (at + width - 1) // WORD + 1)}


def wavefronts(offsets: Sequence[int], width: int) -> int:
    """How many words are wanted of the bank that most are wanted of; threads that want the same word share it."""
    banks: dict[int, int] = {}
    for word in _words(offsets, width):
        banks[word % BANKS] = banks.get(word % BANKS, 0) + 1
    return max(banks.values(), default=0)


def _least(offsets: Sequence[int], width: int) -> int:
    return -(-len(_words(offsets, width)) // BANKS)
