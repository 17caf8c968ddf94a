"""Tensors in safetensors files, mapped into memory: a tensor is read and brought to the device when it is asked for."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import mmap
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from jtile._errors import ModelError

from .cuts import take
from .host import on_host

# The names of dtypes in files. Other dtypes exist, which tensors that are no weights of a model may have.
DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16, "F8_E4M3": jnp.float8_e4m3fn,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U32": np.uint32, "U8": np.uint8,
    "BOOL": np.bool_,
}  # fmt: skip

SCALES = ("float32", "bfloat16", "float16")  # the dtypes of what codes are multiplied by


class TensorFile:
    """A safetensors file; it is opened when something of it is read first."""

    def __init__(self, path: Path):
        self.path = path

    @functools.cached_property
    def entries(self) -> Mapping[str, Mapping]:
        """The dtype, shape and data_offsets of each tensor, by name.

        Raises:
          ModelError: the file is missing, truncated or damaged.
        """
        try:
            with safe_open(self.path, framework="np"):  # checks sizes and offsets
                pass
            with self.path.open("rb") as handle:
                header = json.loads(handle.read(self._begin(handle) - 8))
        except (OSError, ValueError, SafetensorError) as error:
            raise ModelError(f"{self.path} is missing, truncated or damaged ({error}); download it again") from error
        return {name: entry for name, entry in header.items() if name != "__metadata__"}

    @staticmethod
    def _begin(handle) -> int:
        return 8 + int.from_bytes(handle.read(8), "little")

    @functools.cached_property
    def _content(self) -> tuple[mmap.mmap, int]:
        """The whole file mapped into memory, and the offset at which its tensors begin."""
        with self.path.open("rb") as handle:
            return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ), self._begin(handle)

    def view(self, name: str) -> tuple[np.ndarray, int]:
        """The bytes of a tensor, uint8, and where they stand in the file."""
        content, start = self._content
        first, last = self.entries[name]["data_offsets"]
        return np.frombuffer(content, np.uint8, last - first, start + first), start + first

    def release(self, begin: int, size: int) -> None:
        """Gives the pages of these bytes back to the system, which may read them again."""
        content, _ = self._content
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (begin + size) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0 and hasattr(content, "madvise"):
            content.madvise(mmap.MADV_DONTNEED, first, length)


class Travelling:
    """Copies to a device that may not have ended, the oldest first. Several at a time are faster, since the host moves
    each into pinned memory by one thread; all at a time would need as much of this memory as the model has bytes.

    Attributes:
      bytes: what they take together. Neither the arrays nor the files are kept alive.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._copies: collections.deque[tuple[weakref.ref, weakref.ref, int, int]] = collections.deque()
        self._lock = threading.Lock()

    def add(self, array: jax.Array, file: TensorFile, begin: int, size: int) -> None:
        """Counts a copy of the bytes `begin` to `begin + size` of a file, which becomes `array`."""
        with self._lock:
            self._copies.append((weakref.ref(array), weakref.ref(file), begin, size))
            self.bytes += size

    def wait(self, most: int) -> None:
        """Waits until at most so many bytes travel, and gives the pages of the others back to the system."""
        while True:
            with self._lock:
                if self.bytes <= most:
                    return
                array, file, begin, size = self._copies.popleft()
                self.bytes -= size
            if (there := array()) is not None and not there.is_deleted():
                jax.block_until_ready(there)
            if (kept := file()) is not None:
                kept.release(begin, size)


_travelling = Travelling()
_MOST_TRAVELLING = 256 << 20  # bytes: some matrices of a layer, and less than the table of embeddings of large models


def _copied(view: np.ndarray) -> np.ndarray:
    """A copy that starts at a multiple of 64 bytes, so that JAX on a CPU uses its memory without another copy. JAX
    would also use aligned pages of the file so, but those change when somebody writes the file."""
    room = np.empty(view.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    copy = room[start : start + view.nbytes].view(view.dtype).reshape(view.shape)
    copy[...] = view
    return copy


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor of a file; a call gives a copy on the device."""

    file: TensorFile
    name: str

    @property
    def entry(self) -> Mapping:
        """What the file says of the tensor.

        Raises:
          ModelError: the file lacks it.
        """
        if self.name not in self.file.entries:
            raise ModelError(f"{self.file.path} lacks the tensor {self.name}; download it again")
        return self.file.entries[self.name]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.entry["shape"])

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the numbers of the tensor.

        Raises:
          ModelError: NumPy and JAX have no such dtype.
        """
        kind = self.entry["dtype"]
        if kind not in DTYPES:
            raise ModelError(
                f"the tensor {self.name} of {self.file.path} is {kind}; of the small floats jtile reads F8_E4M3"
            )
        return np.dtype(DTYPES[kind])

    def host(self) -> np.ndarray:
        """The tensor as it lies in the file's pages; meant for small tensors."""
        dtype = self.dtype
        return self.file.view(self.name)[0].view(dtype).reshape(self.shape)

    def __call__(self) -> jax.Array:
        """A copy on the device; the host keeps nothing of it."""
        return self._put(self.host())

    def part(self, cuts: Mapping[int, np.ndarray]) -> jax.Array:
        """A part of the tensor on the device, see `cuts.cut`; only this part of the file is read."""
        found = self.host()
        for dim, index in cuts.items():
            found = take(np, found, index, dim)
        return self._put(found)

    def _put(self, numbers: np.ndarray) -> jax.Array:
        host = on_host()
        found = jax.device_put(_copied(numbers) if host else numbers)
        content, begin = self.file.view(self.name)
        if content.size > 1 << 20:
            _travelling.add(found, self.file, begin, content.size)
            _travelling.wait(0 if host else _MOST_TRAVELLING)
        return found


def expect(tensor: Stored, beside: str, dtypes: tuple[str, ...]) -> None:
    """Refuses `tensor`, a part of the quantised tensor `beside`, if its dtype is none of `dtypes`.

    Raises:
      ModelError: its dtype is none of these.
    """
    if tensor.dtype.name not in dtypes:
        raise ModelError(
            f"the tensor {tensor.name} is {tensor.dtype.name}; beside {beside} it must be {' or '.join(dtypes)}"
        )
