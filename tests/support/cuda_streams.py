"""Launches of compiled kernels on streams of the test's own, by the launcher's C functions and the CUDA driver."""

import contextlib
import ctypes
import functools
import weakref

import jax
from fake_driver import Array

from jtile.ffi._library import call, library

NON_BLOCKING = 1  # a stream that waits for no other
RELAXED = 2  # a capture during which any thread may allocate


@functools.cache
def cuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def ask(function: str, *args) -> None:
    code = getattr(cuda(), function)(*args)
    assert code == 0, f"{function} failed with {code}"


def make_current(ordinal: int = 0) -> None:
    """Let this thread use the primary context of a device, which is XLA's own."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    ask("cuDeviceGet", ctypes.byref(device), ordinal)
    ask("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    ask("cuCtxSetCurrent", context)


@contextlib.contextmanager
def streams(n: int):
    """n streams that do not wait for each other, as handles."""
    make_current()
    made = [ctypes.c_void_p() for _ in range(n)]
    for stream in made:
        ask("cuStreamCreate", ctypes.byref(stream), NON_BLOCKING)
    yield made
    for stream in made:
        ask("cuStreamSynchronize", stream)
        ask("cuStreamDestroy_v2", stream)


def wait(stream) -> None:
    make_current()
    ask("cuStreamSynchronize", stream)


@contextlib.contextmanager
def captured(stream):
    """Launches on the stream become a graph; gives a list that holds the executable graph in the end."""
    out, graph, made = [], ctypes.c_void_p(), ctypes.c_void_p()
    ask("cuStreamBeginCapture_v2", stream, RELAXED)
    yield out
    ask("cuStreamEndCapture", stream, ctypes.byref(graph))
    ask("cuGraphInstantiateWithFlags", ctypes.byref(made), graph, ctypes.c_ulonglong(0))
    out.append(made)


class Launcher:
    """A kernel of `Kernel.lower(...)`, launched on arrays of JAX, which it reads and writes in place."""

    def __init__(self, lowered):
        self.handle = ctypes.c_void_p()
        image, record = lowered.image, lowered.launch["record"]
        call("jtile_gpu_open", b"cuda", None, image, len(image), record.encode(), ctypes.byref(self.handle))
        self.close = weakref.finalize(self, library().jtile_gpu_close, self.handle)
        call("jtile_gpu_initialize", self.handle, 0)

    def launch(self, stream, *arrays: jax.Array) -> None:
        packed = (Array * len(arrays))(*(Array(x.unsafe_buffer_pointer(), x.nbytes) for x in arrays))
        sizes = (ctypes.c_int64 * 1)()
        call("jtile_gpu_launch", self.handle, 0, stream, packed, ctypes.c_int64(len(arrays)), sizes)
