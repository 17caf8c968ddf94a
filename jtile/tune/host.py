"""What the CPUs of this machine can do at most: measured copy bandwidth and multiply-add rates, the time they allow.

`jt.explain` and the benchmarks compare kernels with it: a CPU has no data sheet that says what its memory gives.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import dataclasses
import functools
import time
from collections.abc import Collection

import numpy as np

from jtile._cores import cores_here

# One loop of independent multiply-adds in registers, twelve chains to cover the latency; the text is for one width and
# one instruction. `{{}}` stays a brace of LLVM.
_LOOP = """
declare {acc} {intrinsic}
define void @peak(i64 %n, ptr %out) "prefer-vector-width"="512" {{
entry:
  br label %loop
loop:
  %i = phi i64 [0, %entry], [%next, %loop]
{phis}
{steps}
  %next = add i64 %i, 1
  %more = icmp ult i64 %next, %n
  br i1 %more, label %loop, label %end
end:
{sum}
  store {acc} %s{last}, ptr %out, align 1
  ret void
}}
"""
_CHAINS = 12


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Rates of one machine; `threads` is how many cores the kernels use, `device` what records are filed under."""

    device: str
    threads: int

    def bound_us(self, bytes_moved: int, flops: int, unit: str) -> float:
        """Microseconds that the work takes at least: the larger of the time to move and the time to compute."""
        move = bytes_moved / self.bandwidth(bytes_moved) if bytes_moved else 0.0
        return 1e6 * max(move, flops / self.peak(unit) if flops else 0.0)

    def bandwidth(self, working_set: int) -> float:
        """Bytes a second of a copy (read + written) that touches `working_set` bytes over and over."""
        size = 1 << max(16, (working_set - 1).bit_length())  # a power of two: few different measurements
        return _copy_rate(min(size, 1 << 28), self.threads)

    def peak(self, unit: str) -> float:
        """Operations a second, a multiply-add counting as two, of `threads` cores together."""
        return _multiply_add_rate(unit, self.threads)


# dtype of a product -> unit that computes it, and the share of the unit's rate
_PRODUCTS = {"float32": ("f32", 1.0), "float64": ("f32", 0.5), "bfloat16": ("bf16", 1.0), "int8": ("int8", 1.0)}


def rates(working_set: int, wanted: Collection[str]) -> dict[str, float]:
    """What `jt.explain` takes as `rates`: bytes a second of a copy of so many bytes, as `"memory"`, and operations a
    second of products by dtype; of the names that are wanted, those that are known. They are measured when they are
    first asked for, in a tenth of a second each."""
    here = measure()
    found = {"memory": here.bandwidth(working_set)} if "memory" in wanted else {}
    return found | {name: share * here.peak(unit) for name, (unit, share) in _PRODUCTS.items() if name in wanted}


def measure(threads: int | None = None) -> Roofline:
    """The roofline of this machine; rates are measured when they are asked for, and kept."""
    import llvmlite.binding as llvm

    threads = threads or cores_here()
    return Roofline(f"{llvm.get_host_cpu_name()}-{threads}t", threads)


@functools.cache
def _copy_rate(working_set: int, threads: int) -> float:
    count = working_set // (2 * threads)
    pairs = [(np.ones(count, np.uint8), np.empty(count, np.uint8)) for _ in range(threads)]
    rounds = max(2, (1 << 27) // working_set)

    def copy(pair):
        for _ in range(rounds):
            np.copyto(pair[1], pair[0])

    return 2 * count * threads * rounds / _best_seconds(copy, pairs)


@functools.cache
def _multiply_add_rate(unit: str, threads: int) -> float:
    engine, flops = _compiled(unit)
    function = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_void_p)(engine.get_function_address("peak"))
    outs = [np.zeros(256, np.uint8) for _ in range(threads)]
    turns = 2_000_000
    return flops * turns * threads / _best_seconds(lambda out: function(turns, out.ctypes.data), outs)


def _best_seconds(work, items) -> float:
    with concurrent.futures.ThreadPoolExecutor(len(items)) as pool:
        seconds = []
        for _ in range(12):
            start = time.perf_counter()
            list(pool.map(work, items))
            seconds.append(time.perf_counter() - start)
    return min(seconds)


def _compiled(unit: str):
    """The engine that holds @peak, and the operations of one turn of its loop."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    text, flops = _text(unit, {name for name, on in llvm.get_host_cpu_features().items() if on})
    module = llvm.parse_assembly(text)
    target = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=2
    )
    engine = llvm.create_mcjit_compiler(module, target)
    engine.finalize_object()
    return engine, flops


def _text(unit: str, features: set[str]) -> tuple[str, int]:
    bits = 512 if "avx512f" in features else 256 if "avx2" in features else 128
    lanes = bits // 32
    if unit == "bf16" and "avx512bf16" in features:
        acc, pair, name, factor = f"<{lanes} x float>", f"<{2 * lanes} x bfloat>", "llvm.x86.avx512bf16.dpbf16ps.512", 2
        call = lambda x: f"call {acc} @{name}({acc} {x}, {pair} splat (bfloat 1.0), {pair} splat (bfloat 1.0))"
        intrinsic = f"@{name}({acc}, {pair}, {pair})"
    elif unit == "int8" and "avx512vnni" in features:
        # LLVM 22 types the bytes as bytes
        acc, pair, name, factor = f"<{lanes} x i32>", f"<{4 * lanes} x i8>", "llvm.x86.avx512.vpdpbusd.512", 4
        call = lambda x: f"call {acc} @{name}({acc} {x}, {pair} splat (i8 1), {pair} splat (i8 1))"
        intrinsic = f"@{name}({acc}, {pair}, {pair})"
    else:
        acc, name, factor = f"<{lanes} x float>", f"llvm.fma.v{lanes}f32", 1
        call = lambda x: f"call {acc} @{name}({acc} {x}, {acc} splat (float 1.0), {acc} splat (float 1.0))"
        intrinsic = f"@{name}({acc}, {acc}, {acc})"
    add = "add" if "i32" in acc else "fadd"
    zero = "splat (i32 1)" if "i32" in acc else "splat (float 1.0)"
    chains = range(_CHAINS)
    text = _LOOP.format(
        acc=acc,
        intrinsic=intrinsic,
        phis="\n".join(f"  %a{i} = phi {acc} [{zero}, %entry], [%b{i}, %loop]" for i in chains),
        steps="\n".join(f"  %b{i} = {call(f'%a{i}')}" for i in chains),
        sum="\n".join(f"  %s{i} = {add} {acc} %b{i}, {'%b0' if i == 1 else f'%s{i - 1}'}" for i in chains if i),
        last=_CHAINS - 1,
    )
    return text, 2 * lanes * factor * _CHAINS
