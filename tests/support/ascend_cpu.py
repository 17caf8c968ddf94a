"""Runs the linalg text that the vendor's compiler made of a kernel on the CPU: numbers without an NPU.

`bishengir-opt` takes it to the LLVM dialect, triton to LLVM IR, llvmlite runs it, one block of the grid after the
other. What a vector core computes another way than LLVM and libm (exponentials, orders of sums) is not seen here.
"""

from __future__ import annotations

import ctypes
import functools
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import ml_dtypes
import numpy as np
from ttir.launch import buffers, value_of

from jtile.ir import Kernel
from jtile.lowering.ascend import tools
from jtile.lowering.triton.record import Record

_TO_LLVM = (
    "--execution-engine-convert-hfusion-to-upstream", "--annotation-lowering", "--canonicalize",
    "--convert-elementwise-to-linalg", "--empty-tensor-to-alloc-tensor",
    "--one-shot-bufferize=allow-return-allocs-from-loops", "--convert-bufferization-to-memref",
    "--convert-linalg-to-loops", "--expand-strided-metadata", "--lower-affine", "--convert-scf-to-cf",
    "--arith-expand=include-bf16=true", "--convert-math-to-llvm", "--convert-math-to-libm",
    "--finalize-memref-to-llvm", "--convert-arith-to-llvm", "--convert-index-to-llvm", "--convert-cf-to-llvm",
    "--convert-func-to-llvm", "--reconcile-unrealized-casts",
)  # fmt: skip


class NotOnCpuError(Exception):
    """The path to the CPU does not take an op of the text."""


def run_linalg(text: str, symbol: str, record: Record, kernel: Kernel, inputs: Sequence[np.ndarray]):
    """The outputs of a kernel from its linalg text; NotOnCpuError where the path does not take it."""
    b = buffers(kernel, record, inputs)
    arrays = b.all
    engine, address, pointers = _compiled(text, symbol)
    spare = np.zeros(64, np.uint8)
    words: list[Any] = [*_memref(spare), *_memref(spare)]  # locks between blocks, the workspace of cores
    for p in record.params:
        if p["kind"] == "buffer":
            words += _memref(arrays[p["buffer"]])
        else:
            words.append(ctypes.c_int32(value_of(p["value"], b.symbols)))
    blocks = value_of(record.grid, b.symbols)
    function = ctypes.CFUNCTYPE(None, *(type(w) for w in words), *[ctypes.c_int32] * 6)(address)
    assert pointers == 2 + sum(p["kind"] == "buffer" for p in record.params)
    for block in range(blocks):
        function(*words, blocks, 1, 1, block, 0, 0)
    del engine
    return b.outputs()


def _memref(x: np.ndarray) -> Iterator[Any]:
    """A memref of rank 1 as LLVM passes it: base, data, offset, size, stride."""
    pointer = ctypes.c_void_p(x.ctypes.data)
    size = max(x.size, 1)
    return iter([pointer, pointer, ctypes.c_int64(0), ctypes.c_int64(size), ctypes.c_int64(1)])


@functools.lru_cache(8)
def _compiled(text: str, symbol: str) -> tuple[Any, int, int]:
    ir = _llvm_ir(text)
    _functions()
    target = llvm.Target.from_default_triple()
    host = {"cpu": llvm.get_host_cpu_name(), "features": llvm.get_host_cpu_features().flatten()}
    machine = target.create_target_machine(**host, opt=1)
    module = llvm.parse_assembly(ir)
    module.verify()
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    head = re.search(rf"define void @{symbol}\(([^)]*)\)", ir)
    assert head
    return engine, engine.get_function_address(symbol), head[1].count("ptr ") // 2


_CALL = re.compile(r"(%[\w#]+) = (?:func\.)?call @triton_(\w+?)(?:_\d+)?\(([^)]*)\) : \((.*)\) -> (tensor<\S+>)")


def _inlined(text: str) -> str:
    """The text with scans and gathers, which the vendor's compiler has in libraries of an NPU, written out."""
    constants = dict(re.findall(r"(%[\w]+) = arith\.constant (\S+)", text))
    made = [0]

    def one(found: re.Match[str]) -> str:
        made[0] += 1
        name, kind, operands, _, result = found.groups()
        args = operands.split(", ")
        kinds = re.findall(r"tensor<[^>]*>", found[4])
        write = {"gather": _gather, "cumsum": _scan, "cumprod": _scan}.get(kind)
        if write is None:
            raise NotOnCpuError(f"a call of the vendor's function triton_{kind}")
        return write(name, kind, args, kinds, result, constants, f"%x{made[0]}")

    text = _CALL.sub(one, text)
    return re.sub(r"^ *func\.func private @triton_\w+\(.*\n", "", text, flags=re.M)


def _indices(result: str, new: str) -> tuple[list[str], str]:
    names = [f"{new}_{k}" for k in range(result.count("x"))]
    return names, ", ".join(f"{n}: index" for n in names)


def _elem(kind: str) -> str:
    return kind.removesuffix(">").split("x")[-1].removeprefix("tensor<")


def _gather(name, kind, args, kinds, result, constants, new) -> str:
    source, index, axis = args
    names, head = _indices(result, new)
    places = [*names]
    places[int(constants[axis])] = f"{new}_p"
    return (
        f"{name} = tensor.generate {{\n^bb0({head}):\n"
        f"{new}_i = tensor.extract {index}[{', '.join(names)}] : {kinds[1]}\n"
        f"{new}_p = arith.index_cast {new}_i : {_elem(kinds[1])} to index\n"
        f"{new}_v = tensor.extract {source}[{', '.join(places)}] : {kinds[0]}\n"
        f"tensor.yield {new}_v : {_elem(kinds[0])}\n}} : {result}"
    )


def _scan(name, kind, args, kinds, result, constants, new) -> str:
    source, axis, reverse = args[0], int(constants[args[1]]), constants[args[2]] == "true"
    names, head = _indices(result, new)
    elem = _elem(result)
    side = [int(n) for n in re.findall(r"(\d+)x", result)][axis]
    places = [*names]
    places[axis] = f"{new}_k"
    letter = "f" if elem[0] in "fb" else "i"
    op, start = ("add", "0") if kind == "cumsum" else ("mul", "1")
    start = start + (".0" if letter == "f" else "")
    first, last = (names[axis], f"{new}_n") if reverse else (f"{new}_c0", f"{new}_e")
    return (
        f"{name} = tensor.generate {{\n^bb0({head}):\n"
        f"{new}_c0 = arith.constant 0 : index\n{new}_c1 = arith.constant 1 : index\n"
        f"{new}_n = arith.constant {side} : index\n{new}_s = arith.constant {start} : {elem}\n"
        f"{new}_e = arith.addi {names[axis]}, {new}_c1 : index\n"
        f"{new}_t = scf.for {new}_k = {first} to {last} step {new}_c1 iter_args({new}_a = {new}_s) -> ({elem}) {{\n"
        f"{new}_v = tensor.extract {source}[{', '.join(places)}] : {kinds[0]}\n"
        f"{new}_b = arith.{op}{letter} {new}_a, {new}_v : {elem}\nscf.yield {new}_b : {elem}\n}}\n"
        f"tensor.yield {new}_t : {elem}\n}} : {result}"
    )


def _llvm_ir(text: str) -> str:
    from triton._C.libtriton import ir as mlir
    from triton._C.libtriton import llvm as translation

    with tempfile.TemporaryDirectory(prefix="jtile-ascend-cpu-") as folder:
        source, result = Path(folder, "kernel.mlir"), Path(folder, "kernel.llvm.mlir")
        source.write_text(_inlined(text))
        done = subprocess.run([str(tools.needed(tools.OPT)), *_TO_LLVM, str(source), "-o", str(result)],
                              capture_output=True, text=True, errors="replace")  # fmt: skip
        if done.returncode:
            why = re.search(r"error: (.*)", done.stderr)
            raise NotOnCpuError(why[1] if why else f"bishengir-opt crashed: {done.stderr[-300:]}")
        context = mlir.context()
        mlir.load_dialects(context)
        try:
            module = mlir.parse_mlir_module(str(result), context)
        except RuntimeError as e:
            raise NotOnCpuError(f"triton cannot read the LLVM dialect ({e})") from e
        translation.init_targets()
        found = str(translation.to_module(module, translation.context()))
    found = re.sub(r" captures\(none\)| nocreateundeforpoison", "", found)
    return "\n".join(map(_respelled, found.splitlines()))


_TYPE = re.compile(r"\b(float|double|half|bfloat)\b")
_NUMBER = re.compile(r"(?<=[ (])(f0x[0-9A-F]+|-?\d+\.\d+e[+-]\d+|[+-]inf|[+-]q?nan)(?=[,)\s]|$)")
_KINDS = {"float": np.float32, "double": np.float64, "half": np.float16, "bfloat": ml_dtypes.bfloat16}


def _respelled(line: str) -> str:
    """A line of LLVM IR whose floats are spelled so that older LLVM reads them; each is of the type before it."""
    types = list(_TYPE.finditer(line))
    return _NUMBER.sub(lambda m: _spelled([t[1] for t in types if t.start() < m.start()][-1], m[1]), line)


def _spelled(kind: str, number: str) -> str:
    """A float as the LLVM of llvmlite reads it: in the bits of a double, or with a letter for one of 16 bits."""
    if number.startswith("f0x"):
        raw = bytes.fromhex(number[3:])[::-1]
        value = np.frombuffer(raw, _KINDS[kind])[0]
    else:
        value = _KINDS[kind](float(number.replace("q", "")))
    if kind in ("half", "bfloat"):
        return f"0x{'H' if kind == 'half' else 'R'}{value.view(np.uint16):04X}"
    return f"0x{np.float64(value).view(np.uint64):016X}"


@functools.cache
def _functions() -> Any:
    """What the code calls besides libm: copies between memrefs of any strides."""
    kind = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
    copy = kind(_copy)
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.add_symbol("memrefCopy", ctypes.cast(copy, ctypes.c_void_p).value)
    return copy


def _copy(size: int, source: int, target: int) -> None:
    a, b = (_view(size, where) for where in (source, target))
    b[...] = a


def _view(size: int, where: int) -> np.ndarray:
    """The array of an unranked memref: its rank, and a pointer to base, data, offset, sizes, strides."""
    rank, descriptor = (ctypes.c_int64 * 2).from_address(where)
    words = (ctypes.c_int64 * (3 + 2 * rank)).from_address(descriptor)
    shape, strides = words[3 : 3 + rank], words[3 + rank :]
    first = words[1] + words[2] * size
    reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1 if all(n > 0 for n in shape) else 0
    memory = (ctypes.c_uint8 * (reach * size)).from_address(first)
    flat = np.frombuffer(memory, f"V{size}") if reach else np.empty(0, f"V{size}")
    return np.lib.stride_tricks.as_strided(flat, shape, [s * size for s in strides])
