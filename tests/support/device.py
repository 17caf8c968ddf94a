"""Runs a kernel on the GPU of this machine through the driver alone: `run_device` beside `ttir.run_ttir`."""

from __future__ import annotations

import ctypes
import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from machines import card
from ttir.launch import Buffers, buffers, value_of

from jtile.ir import Kernel
from jtile.lowering.artifact import Artifact
from jtile.lowering.triton.compile import compile_kernel
from jtile.lowering.triton.record import Record

GUARD = 512  # bytes before and behind each array, which must not change
PATTERN = 0x6B


class DriverError(Exception):
    """A call of the driver failed."""


class Driver:
    """libcuda, with the primary context of device 0."""

    def __init__(self) -> None:
        self.lib = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self("cuInit", 0)
        self("cuDeviceGet", ctypes.byref(device), 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._context = context
        parts = [ctypes.c_int(), ctypes.c_int()]
        for attribute, part in zip((75, 76), parts, strict=True):
            self("cuDeviceGetAttribute", ctypes.byref(part), attribute, device)
        self.arch = f"sm_{parts[0].value}{parts[1].value}"

    def __call__(self, name: str, *args: Any) -> None:
        code = getattr(self.lib, name)(*args)
        if code:
            text = ctypes.c_char_p()
            self.lib.cuGetErrorString(code, ctypes.byref(text))
            raise DriverError(f"{name}: {(text.value or b'error').decode()} ({code})")

    def enter(self) -> None:
        """Make the context current: each thread has its own."""
        self("cuCtxSetCurrent", self._context)


@functools.cache
def driver() -> Driver:
    return Driver()


class Array:
    """A copy of a host array on the device, between guards."""

    def __init__(self, host: np.ndarray):
        self.host = host
        raw = host.reshape(-1).view(np.uint8)
        self._end = -(-len(raw) // 16) * 16
        image = np.full(self._end + 2 * GUARD, PATTERN, np.uint8)
        image[GUARD : GUARD + len(raw)] = raw
        self._pointer = ctypes.c_uint64()
        driver()("cuMemAlloc_v2", ctypes.byref(self._pointer), ctypes.c_size_t(len(image)))
        driver()("cuMemcpyHtoD_v2", self._pointer, ctypes.c_void_p(image.ctypes.data), ctypes.c_size_t(len(image)))

    @property
    def address(self) -> int:
        return self._pointer.value + GUARD

    def fetch(self) -> None:
        """Back into the host array, which changes in place; the guards must be as they were."""
        image = np.empty(self._end + 2 * GUARD, np.uint8)
        driver()("cuMemcpyDtoH_v2", ctypes.c_void_p(image.ctypes.data), self._pointer, ctypes.c_size_t(len(image)))
        driver()("cuMemFree_v2", self._pointer)
        raw = self.host.reshape(-1).view(np.uint8)
        outside = np.concatenate([image[:GUARD], image[GUARD + len(raw) :]])
        assert (outside == PATTERN).all(), "the kernel wrote outside an array"
        raw[:] = image[GUARD : GUARD + len(raw)]


def tensor_map(p: dict[str, Any], address: int, symbols: Sequence[int]) -> np.ndarray:
    """A CUtensorMap: 128 bytes at a multiple of 64."""
    space = np.zeros(256, np.uint8)
    start = -space.ctypes.data % 64
    rank, dims = len(p["dims"]), [value_of(d, symbols) for d in p["dims"]]
    strides = [value_of(d, symbols) for d in p["strides"]]
    many = lambda kind, xs: (kind * max(1, len(xs)))(*xs)
    box, ones = many(ctypes.c_uint32, p["box"]), many(ctypes.c_uint32, [1] * rank)
    driver()(
        "cuTensorMapEncodeTiled", ctypes.c_void_p(space.ctypes.data + start), p["dtype"], ctypes.c_uint32(rank),
        ctypes.c_void_p(address), many(ctypes.c_uint64, dims), many(ctypes.c_uint64, strides), box, ones, 0,
        p["swizzle"], 2, 1 if p.get("fill") == "nan" else 0,
    )  # fmt: skip
    return space[start : start + 128]


def argument(p: dict[str, Any], arrays: Sequence[Array], symbols: Sequence[int]) -> np.ndarray:
    """The bytes of one parameter."""
    if p["kind"] == "tensormap":
        return tensor_map(p, arrays[p["buffer"]].address + p.get("offset", 0), symbols)
    if p["kind"] == "counters":
        return np.array([arrays[-1].address], np.uint64)
    if p["kind"] == "buffer":
        return np.array([arrays[p["buffer"]].address], np.uint64)
    value = 0 if p["kind"] == "null" else value_of(p["value"], symbols)
    return np.array([value], np.int32 if p["kind"] == "i32" else np.int64)


def run_artifact(artifact: Artifact, kernel: Kernel, inputs: Sequence[np.ndarray]) -> Buffers:
    """Launch what a kernel was compiled to, and wait; gives the arrays as they lie in memory afterwards."""
    record = json.loads(artifact.launch["record"])
    d = driver()
    d.enter()
    known = Record(extra=artifact.launch["extra"], zeroed=record["zeroed"], dims=record["dims"])
    b = buffers(kernel, known, inputs)
    unique = {id(x): x for x in b.all}
    on_device = {key: Array(x) for key, x in unique.items()}
    arrays = [on_device[id(x)] for x in b.all]
    counters = np.zeros(sum(p.get("count", 0) for p in record["params"]), np.int32)
    on_device["counters"] = Array(counters)
    params = [argument(p, [*arrays, on_device["counters"]], b.symbols) for p in record["params"]]
    blocks = value_of(record["grid"], b.symbols)
    if blocks:
        _launch(artifact.image, record, blocks, params)
    for x in on_device.values():
        x.fetch()
    assert not counters.any(), "counters that are not at zero again"
    return b


def _launch(image: bytes, record: dict[str, Any], blocks: int, params: Sequence[np.ndarray]) -> None:
    d = driver()
    if record["cluster"] != 1 or record["attributes"].get("cooperative"):
        raise DriverError("launches of clusters and cooperative kernels go through the FFI handler only")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    d("cuModuleLoadData", ctypes.byref(module), image)
    d("cuModuleGetFunction", ctypes.byref(function), module, record["symbol"].encode())
    if record["shared"] > 48 << 10:
        d("cuFuncSetAttribute", function, 8, record["shared"])  # MAX_DYNAMIC_SHARED_SIZE_BYTES
    pointers = (ctypes.c_void_p * len(params))(*(p.ctypes.data for p in params))
    grid_and_block = (blocks, 1, 1, record["threads"], 1, 1)
    d("cuLaunchKernel", function, *map(ctypes.c_uint, grid_and_block), record["shared"], None, pointers, None)
    d("cuCtxSynchronize")
    d("cuModuleUnload", module)


def run_device(kernel: Kernel, inputs: Sequence[np.ndarray], options: dict[str, Any] | None = None) -> list[np.ndarray]:
    """Compile a kernel (after the passes) for the GPU of this machine and run it; gives the outputs."""
    artifact = compile_kernel(kernel, card(driver().arch), options)
    return run_artifact(artifact, kernel, inputs).outputs()
