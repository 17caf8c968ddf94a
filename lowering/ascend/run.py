"""Runs the kernels of this folder on tensors of torch_npu. Made by jtile; needs torch, torch_npu and CANN, not jtile.

    from run import Bundle
    y = Bundle()(x, w)             # tensors on an NPU, contiguous, of the dtypes and shapes that manifest.json lists

`sh build.sh` comes first: it makes the object of each kernel with your own CANN. jtile's developers had no NPU: nothing
in this file was ever run on one.
"""

from __future__ import annotations

import ctypes
import json
import struct
from pathlib import Path
from typing import Any

MAGIC = {"aiv": 0x41415246, "aic": 0x41494343, "mix": 0x43554245}  # kind of cores -> CANN's number of binaries for it


class BundleError(RuntimeError):
    """An object that is not built, a tensor that does not fit, or an error of CANN's run time."""


class _Option(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("value", ctypes.c_uint32 * 4)]


class _Options(ctypes.Structure):
    _fields_ = [("options", ctypes.POINTER(_Option)), ("count", ctypes.c_size_t)]


def pack(
    params: list[dict[str, Any]], addresses: list[int], blocks: int, *, sync: int = 0, workspace: int = 0
) -> bytes:
    """The arguments of a launch, each at a multiple of its size: the addresses of the flags between cores, of locks
    (none) and of the workspace, the kernel's own arguments, and three sides of the grid.

    Args:
      params: the parameters in the kernel's record.
      addresses: the addresses of its arrays: inputs, then outputs.
    """
    out = struct.pack("<QQQ", sync, 0, workspace)
    for p in params:
        value = addresses[p["buffer"]] if p["kind"] == "buffer" else _number(p.get("value", 0))
        size = 4 if p["kind"] == "i32" else 8
        out += b"\0" * (-len(out) % size) + struct.pack("<i" if size == 4 else "<Q", value)
    out += struct.pack("<iii", blocks, 1, 1)
    return out + b"\0" * (-len(out) % 8)


def _number(value: Any) -> int:
    if not isinstance(value, int):
        raise BundleError(f"the manifest has a size that depends on the call: {value}")
    return value


class Runtime:
    """The part of libascendcl that launches; it is used beside torch_npu, which has set it up."""

    def __init__(self, library: str = "libascendcl.so"):
        try:
            self._lib = ctypes.CDLL(library)
        except OSError as e:
            raise BundleError(f"{library} cannot be opened ({e}): source CANN's set_env.sh") from e

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._lib, name)(*args)
        if code:
            raise BundleError(f"{name} failed with error {code}")

    def load(self, path: Path, symbol: str, kind: str) -> ctypes.c_void_p:
        """A function of an object file."""
        option = _Option(2, (ctypes.c_uint32 * 4)(MAGIC[kind]))
        options = _Options(ctypes.pointer(option), 1)
        binary, function = ctypes.c_void_p(), ctypes.c_void_p()
        path_text = ctypes.c_char_p(str(path).encode())
        self._call("aclrtBinaryLoadFromFile", path_text, ctypes.byref(options), ctypes.byref(binary))
        self._call("aclrtBinaryGetFunction", binary, ctypes.c_char_p(symbol.encode()), ctypes.byref(function))
        return function

    def sync_address(self) -> int:
        """The address at which cube and vector cores find the flags between them."""
        out = ctypes.c_void_p()
        self._call("aclrtGetHardwareSyncAddr", ctypes.byref(out))
        return out.value or 0

    def launch(self, function: ctypes.c_void_p, blocks: int, stream: int, args: bytes) -> None:
        """Put a call on a stream; the arguments are copied before this returns."""
        empty = ctypes.c_void_p()
        self._call("aclrtLaunchKernelWithHostArgs", function, ctypes.c_uint32(blocks), ctypes.c_void_p(stream), empty,
                   ctypes.c_char_p(args), ctypes.c_size_t(len(args)), empty, ctypes.c_size_t(0))  # fmt: skip


class Bundle:
    """The program of a folder: call it with its inputs, get its outputs (one tensor, or a tuple of several)."""

    def __init__(self, folder: str | Path = Path(__file__).parent, runtime: Runtime | None = None):
        self.folder = Path(folder)
        self.manifest = json.loads((self.folder / "manifest.json").read_text())
        self._runtime = runtime or Runtime()
        self._functions: dict[str, ctypes.c_void_p] = {}

    def __call__(self, *inputs: Any) -> Any:
        import torch

        wanted = self.manifest["inputs"]
        if len(inputs) != len(wanted):
            raise BundleError(f"{len(inputs)} tensors; expected {len(wanted)}: {', '.join(w['name'] for w in wanted)}")
        for x, w in zip(inputs, wanted):
            if list(x.shape) != w["shape"] or x.dtype != getattr(torch, w["dtype"]) or not x.is_contiguous():
                raise BundleError(
                    f"{w['name']} is a tensor of {list(x.shape)} {x.dtype}; expected a contiguous one of {w['shape']} "
                    f"{w['dtype']}"
                )
        device = inputs[0].device if inputs else "npu"
        given, made = list(inputs), []  # `made`: the arrays that kernels make for the kernels behind them
        for number, k in enumerate(self.manifest["kernels"]):
            made.append(self._run(torch, k, [given[i] for i in k["inputs"]], device))
            given += [made[number][r["output"]] for r in self.manifest["between"] if r["kernel"] == number]
        outputs = []
        for result, o in zip(self.manifest["results"], self.manifest["outputs"]):
            x = made[result["kernel"]][result["output"]]
            for _ in range(result["partials"]):
                x = x.sum(0)
            outputs.append(x.to(getattr(torch, o["dtype"])))
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _run(self, torch: Any, kernel: dict[str, Any], inputs: list[Any], device: Any) -> list[Any]:
        """Launch one kernel; the start values of its outputs, its tables and its scratch arrays are made here."""
        arrays = list(inputs)
        for start in kernel["starts"]:
            dtype = getattr(torch, start["dtype"])
            value = start["value"]  # "nan" and "inf" are no numbers of JSON
            value = float(value) if isinstance(value, str) else value
            arrays.append(torch.full(start["shape"], value, dtype=dtype, device=device))
        for t in kernel["tables"]:
            data = torch.from_numpy(_load(self.folder / t["file"])).view(getattr(torch, t["dtype"]))
            arrays.append(data.reshape(t["shape"]).to(device))
        shared = {o: i for i, o in kernel["aliases"]}
        for k, o in enumerate(kernel["outputs"]):
            if k not in shared:
                arrays.append(torch.empty(o["shape"], dtype=getattr(torch, o["dtype"]), device=device))
            else:  # the kernel writes over its input, which stays the caller's
                own = shared[k] < len(inputs)
                arrays[shared[k]] = arrays[shared[k]].clone() if own else arrays[shared[k]]
                arrays.append(arrays[shared[k]])
        count = len(arrays)
        arrays += [torch.empty([n], dtype=torch.uint8, device=device) for n in kernel["extra"]]
        record = kernel["record"]
        for k in record["zeroed"]:
            arrays[k].zero_()
        blocks = _number(record["grid"])
        workspace = torch.empty([max(1, kernel["workspace"] * blocks)], dtype=torch.uint8, device=device)
        if blocks:
            sync = self._runtime.sync_address() if kernel["kind"] == "mix" else 0
            addresses = [x.data_ptr() for x in arrays]
            space = workspace.data_ptr() if kernel["workspace"] else 0
            args = pack(record["params"], addresses, blocks, sync=sync, workspace=space)
            stream = torch.npu.current_stream().npu_stream
            self._runtime.launch(self._function(kernel), blocks, stream, args)
        return arrays[count - len(kernel["outputs"]) : count]

    def _function(self, kernel: dict[str, Any]) -> ctypes.c_void_p:
        path = self.folder / kernel["object"]
        if not path.is_file():
            raise BundleError(f"{path} is not there: run build.sh, which makes it with your CANN")
        if kernel["object"] not in self._functions:
            self._functions[kernel["object"]] = self._runtime.load(path, kernel["symbol"], kernel["kind"])
        return self._functions[kernel["object"]]


def _load(path: Path) -> Any:
    import numpy

    return numpy.load(path)


def main() -> None:
    """Run the bundle of this folder on random numbers, and print what comes out."""
    import torch
    import torch_npu  # noqa: F401  # pyright: ignore[reportMissingImports]

    bundle = Bundle()
    inputs = []
    for w in bundle.manifest["inputs"]:
        x = torch.randn(w["shape"]) if "float" in w["dtype"] else torch.zeros(w["shape"])
        inputs.append(x.to(getattr(torch, w["dtype"])).npu())
    outputs = bundle(*inputs)
    torch.npu.synchronize()
    for o, x in zip(bundle.manifest["outputs"], outputs if isinstance(outputs, tuple) else (outputs,)):
        print(o["name"], tuple(x.shape), x.dtype, "mean", x.float().mean().item())


if __name__ == "__main__":
    main()
