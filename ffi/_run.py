"""Running compiled kernels on NumPy arrays, without jax: for tests and tools."""

from __future__ import annotations

import ctypes
import json
import platform
import weakref
from collections.abc import Sequence

import numpy as np

from ._library import FfiError, call, library

_MACHINES = {"x86_64": 62, "aarch64": 183}


class LoadedImage:
    """A compiled kernel in memory, ready to run; it is unloaded when this object goes.

    Args:
      image: the relocatable ELF object, exporting `jtile_entry`.
      programs: number of programs of the grid (the product of its sides); ignored where there are `dims`.
      workspace: bytes of scratch for each worker.
      isa: `"x86_64:feature,..."`, checked against the machine; None: this machine's architecture, no features.
      sites: the print and assert sites, as JSON text or the list that it encodes.
      name: the kernel's name in messages.
      cost: estimated nanoseconds of one program: threads take chunks of at least a few microseconds.
      dims: for a kernel with dynamic sizes, four numbers for each such dimension of an operand: operand, axis, place of
        its symbol, and how many times the symbol it is.
    Raises:
      FfiError: the object is damaged, foreign, or needs a CPU feature that the machine lacks.
    """

    def __init__(
        self,
        image: bytes,
        *,
        programs: int,
        workspace: int = 0,
        isa: str | None = None,
        sites: str | Sequence[dict] = "[]",
        name: str = "kernel",
        cost: int = 10_000,
        dims: Sequence[int] = (),
    ):
        text = sites if isinstance(sites, str) else json.dumps(list(sites))
        isa = host_arch() if isa is None else isa
        handle = ctypes.c_void_p()
        head = (image, len(image), name.encode(), isa.encode(), text.encode())
        if dims:
            numbers = (ctypes.c_int64 * len(dims))(*dims)
            call("jtile_open_sized", *head, numbers, len(dims) // 4, workspace, cost, ctypes.byref(handle))
        else:
            call("jtile_open", *head, programs, workspace, cost, ctypes.byref(handle))
        self.name, self._handle, self._dims = name, handle, tuple(dims)
        self._close = weakref.finalize(self, library().jtile_close, handle)

    def run(self, arrays: Sequence[np.ndarray], *, threads: int = 1, sizes: Sequence[int] | None = None) -> None:
        """Run the whole grid: operands, then results, all C-contiguous; results are written in place.

        `sizes` are those of the dynamic dimensions, in the order of `dims`; None: of the arrays, none of them packed.

        Raises:
          ValueError: an array is not C-contiguous.
          FfiError: an assertion of the kernel failed (of the lowest program id), or the image was closed.
        """
        if not self._close.alive:
            raise FfiError(f"kernel {self.name}: the image was closed")
        for k, array in enumerate(arrays):
            if not array.flags.c_contiguous:
                raise ValueError(f"kernel {self.name}: array {k} is not C-contiguous; pass np.ascontiguousarray of it")
        pointers = (ctypes.c_void_p * max(1, len(arrays)))(*(array.ctypes.data for array in arrays))
        if self._dims:
            places = zip(self._dims[0::4], self._dims[1::4], strict=True)
            found = [arrays[k].shape[axis] for k, axis in places] if sizes is None else sizes
            call("jtile_run_sized", self._handle, pointers, (ctypes.c_int64 * len(found))(*found), threads)
        else:
            call("jtile_run", self._handle, pointers, threads)

    def close(self) -> None:
        """Unload the image; a second call does nothing."""
        self._close()


def run_image(
    image: bytes,
    arrays: Sequence[np.ndarray],
    *,
    programs: int,
    workspace: int = 0,
    isa: str | None = None,
    sites: str | Sequence[dict] = "[]",
    name: str = "kernel",
    threads: int = 1,
    dims: Sequence[int] = (),
    sizes: Sequence[int] | None = None,
) -> None:
    """Load a compiled kernel, run its grid over `arrays` (operands, then results, written in place), unload it.

    The arguments and errors are those of `LoadedImage` and `LoadedImage.run`.
    """
    loaded = LoadedImage(image, programs=programs, workspace=workspace, isa=isa, sites=sites, name=name, dims=dims)
    try:
        loaded.run(arrays, threads=threads, sizes=sizes)
    finally:
        loaded.close()


def link_image(image: bytes, address: int, *, arch: str | None = None) -> tuple[bytes, int]:
    """Link an object as if it lay at `address`, without running it: its memory, and the offset of its entry in it.

    Args:
      arch: "x86_64" or "aarch64", this machine's or another; None: this machine's.
    Raises:
      FfiError: the loader refuses the object.
    """
    machine = _MACHINES[host_arch() if arch is None else arch]
    size, entry = ctypes.c_int64(), ctypes.c_int64()
    outs = ctypes.byref(size), ctypes.byref(entry)
    call("jtile_link", image, len(image), machine, address, None, 0, *outs)
    memory = ctypes.create_string_buffer(size.value)
    call("jtile_link", image, len(image), machine, address, memory, size.value, *outs)
    return memory.raw, entry.value


def check_isa(isa: str) -> None:
    """Raise FfiError unless this machine runs code for `isa` (`"x86_64:avx2,fma"`)."""
    call("jtile_check_isa", isa.encode())


def host_arch() -> str:
    """This machine's architecture in LLVM's spelling."""
    return "aarch64" if platform.machine() in ("aarch64", "arm64") else "x86_64"
