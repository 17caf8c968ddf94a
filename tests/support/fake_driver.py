"""GPU kernels launched through a driver that only writes down what it is asked for (tests/ffi/fake_driver.c)."""

import ctypes
import json
import shutil
import struct
import subprocess
import weakref
from pathlib import Path

from jtile.ffi._library import call, library

SOURCE = Path(__file__).parents[1] / "ffi" / "fake_driver.c"
MACHINES = {"cuda": 190, "rocm": 224}


class Array(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("bytes", ctypes.c_size_t)]


def build(folder: Path) -> Path:
    """Compile the driver; gives its file."""
    compiler = next(c for c in ("cc", "gcc", "g++", "clang") if shutil.which(c))
    language = ["-x", "c"] if compiler == "g++" else []
    file = folder / "fake_driver.so"
    command = [
        compiler,
        *language,
        "-O2",
        "-Wall",
        "-Werror",
        "-shared",
        "-fPIC",
        "-pthread",
        str(SOURCE),
        "-o",
        str(file),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return file


def image(platform: str = "cuda", text: str = "code") -> bytes:
    """The head of an object that the launcher takes, then a text, which the fake writes down when it loads it."""
    head = struct.pack(
        "<4sBBB9xHHIQQQIHHHHHH", b"\x7fELF", 2, 1, 1, 2, MACHINES[platform], 1, 0, 0, 0, 0, 64, 0, 0, 0, 0, 0
    )
    return head + text.encode() + b"\0"


def record(platform: str = "cuda", /, **changes) -> str:
    """A launch record with these fields changed."""
    arch = "sm_90" if platform == "cuda" else "gfx942"
    base = {"name": "k", "symbol": "jtile_k", "arch": arch, "threads": 128, "shared": 0, "cluster": 1, "grid": 1}
    lists = {"params": [], "zeroed": [], "sites": None, "dims": [], "attributes": {}}
    return json.dumps(base | lists | changes)


class FakeDriver:
    """The loaded driver: its log, and what tests may set."""

    def __init__(self, file: Path):
        self.file, self.lib = str(file), ctypes.CDLL(str(file))
        self.lib.fake_log.restype = ctypes.c_char_p

    def lines(self) -> list[str]:
        """What was asked for since the last call."""
        text = self.lib.fake_log().decode().splitlines()
        self.lib.fake_log_clear()
        return text

    def open(self, text: str, platform: str = "cuda", image_bytes: bytes | None = None) -> "FakeKernel":
        return FakeKernel(self, platform, image(platform) if image_bytes is None else image_bytes, text)


class FakeKernel:
    """A launcher on the fake driver."""

    def __init__(self, driver: FakeDriver, platform: str, code: bytes, text: str):
        self.driver, self.handle = driver, ctypes.c_void_p()
        out = ctypes.byref(self.handle)
        call("jtile_gpu_open", platform.encode(), driver.file.encode(), code, len(code), text.encode(), out)
        self.close = weakref.finalize(self, library().jtile_gpu_close, self.handle)

    def talk(self, *devices: int, timeout: float = 10) -> "FakeKernel":
        """Which devices the kernel talks to, and for how many seconds it waits for them."""
        numbers = (ctypes.c_int32 * len(devices))(*devices)
        milliseconds = ctypes.c_int64(round(timeout * 1000))
        call("jtile_gpu_talk", self.handle, numbers, ctypes.c_int64(len(devices)), milliseconds)
        return self

    def finish(self, device: int = 0, stream: int = 7) -> None:
        """Wait for a launch."""
        call("jtile_gpu_finish", self.handle, device, ctypes.c_void_p(stream), *self.arguments((), ())[::2])

    def initialize(self, device: int = 0) -> None:
        call("jtile_gpu_initialize", self.handle, device)

    def launch(
        self, *arrays: tuple[int, int], sizes: tuple[int, ...] = (), device: int = 0, stream: int = 7
    ) -> list[str]:
        """Launch on arrays of (address, bytes); gives what the driver was asked for."""
        args = self.arguments(arrays, sizes)
        call("jtile_gpu_launch", self.handle, device, ctypes.c_void_p(stream), *args)
        return self.driver.lines()

    def node(self, *arrays: tuple[int, int], sizes: tuple[int, ...] = (), device: int = 0, stream: int = 7) -> str:
        """A call as a node of a graph; empty where it is none."""
        out = ctypes.create_string_buffer(1 << 12)
        args = self.arguments(arrays, sizes)
        call("jtile_gpu_node", self.handle, device, ctypes.c_void_p(stream), *args, out, ctypes.c_int64(len(out)))
        return out.value.decode()

    @staticmethod
    def arguments(arrays, sizes):
        packed = (Array * max(1, len(arrays)))(*(Array(*a) for a in arrays))
        return packed, ctypes.c_int64(len(arrays)), (ctypes.c_int64 * max(1, len(sizes)))(*sizes)


def call_launch(kernel: FakeKernel, *arrays: tuple[int, int], device: int = 0, stream: int = 7) -> None:
    """A launch that leaves the log alone, for use on many threads."""
    args = kernel.arguments(arrays, ())
    call("jtile_gpu_launch", kernel.handle, device, ctypes.c_void_p(stream), *args)
