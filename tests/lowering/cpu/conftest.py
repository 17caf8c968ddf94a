"""`elementwise`: compiles a loop around one emitted function, checks its object, and runs it on NumPy arrays."""

from __future__ import annotations

import ctypes
import struct

import llvmlite.binding as llvm
import ml_dtypes
import numpy as np
import pytest
from draws import thorough

from jtile.lowering.cpu.compile import _optimise
from jtile.lowering.cpu.convert import emit_cast, from_memory, memory_type, to_memory
from jtile.lowering.cpu.elementwise import emit_elementwise
from jtile.lowering.cpu.isa import ISAS, Isa, host_isa
from jtile.lowering.cpu.llvm import Code, Module, Val, vec

# Types of 2 and 4 bits are one a byte here, as in registers.
_NUMPY = {
    "int2": np.int8, "uint2": np.uint8,
    "int4": np.int8, "uint4": np.uint8, "bfloat16": ml_dtypes.bfloat16, "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2, "float8_e8m0fnu": ml_dtypes.float8_e8m0fnu,
    "float4_e2m1fn": ml_dtypes.float4_e2m1fn,
}  # fmt: skip


def undefined_symbols(image: bytes) -> list[str]:
    """Names that an ELF64 relocatable object expects from elsewhere."""
    offset, count = struct.unpack_from("<Q", image, 40)[0], struct.unpack_from("<H", image, 60)[0]
    sections = [struct.unpack_from("<IIQQQQIIQQ", image, offset + 64 * i) for i in range(count)]
    names = []
    for section in (s for s in sections if s[1] == 2):
        strings = sections[section[6]][4]
        for k in range(1, section[5] // 24):
            name, _, _, index, _, _ = struct.unpack_from("<IBBHQQ", image, section[4] + 24 * k)
            if index == 0:
                start = strings + name
                names.append(image[start : image.index(b"\0", start)].decode())
    return names


class Elementwise:
    """One compiled function per (isa, fn, dtypes); `fn` is a name of `emit_elementwise`, or `"cast"`."""

    def __init__(self):
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        self._compiled: dict = {}

    @staticmethod
    def numpy_dtype(dtype: str) -> np.dtype:
        return np.dtype(_NUMPY.get(dtype, dtype))

    @staticmethod
    def module(isa: Isa) -> Module:
        target = f'"target-cpu"="{isa.cpu}" "target-features"="{isa.feature_string}"'
        width = f'"prefer-vector-width"="{isa.vector_bits}"'
        return Module(isa.triple, attributes=f'nounwind "no-builtins" {target} {width}')

    @staticmethod
    def emit(module: Module, isa: Isa, name: str, fn: str, dtypes: tuple[str, ...], out: str, lanes: int) -> None:
        """void name(int64 n, in0*, in1*, ..., out*); n a multiple of lanes."""
        params = [Val("i64", "%n"), *(Val("ptr", f"%p{i}") for i in range(len(dtypes) + 1))]
        code = Code(module, name, params, linkage="dso_local")
        with code.loop(0, params[0], lanes) as i:
            args = []
            for pointer, dtype in zip(params[1:], dtypes, strict=False):
                element = memory_type(dtype)
                loaded = code.load(vec(lanes, element), code.gep(element, pointer, i), align=1)
                args.append(from_memory(code, isa, loaded, dtype))
            if fn == "cast":
                result = emit_cast(code, isa, args[0], dtypes[0], out)
            else:
                result = emit_elementwise(code, isa, fn, args, dtypes[-1])
            element = memory_type(out)
            code.store(to_memory(code, isa, result, out), code.gep(element, params[-1], i), align=1)
        code.finish()

    @staticmethod
    def compile(module: Module, isa: Isa, optimise: bool = True, near: bool = True) -> tuple[llvm.TargetMachine, bytes]:
        """The target machine and the object, its code and its tables near each other or anywhere; fails on an undefined
        symbol."""
        parsed = llvm.parse_assembly(module.text())
        target = llvm.Target.from_triple(isa.triple)
        machine = target.create_target_machine(
            cpu=isa.cpu, features=isa.feature_string, opt=int(optimise or thorough()),
            reloc="pic" if near else "static", codemodel="small" if near else "large",
        )  # fmt: skip
        if optimise:
            _optimise(parsed, machine)  # as kernels are
        image = machine.emit_object(parsed)
        assert undefined_symbols(image) == []
        return machine, image

    def prepare(self, isa_name: str, wanted: list[tuple[str, tuple[str, ...], str]], lanes: int = 0) -> None:
        """Compile the (fn, dtypes, out) that `run` will ask for in one module, which is several times faster. LLVM
        optimises what is for this machine, and in `make test-all` the rest."""
        isa = host_isa() if isa_name == "host" else ISAS[isa_name]
        module = self.module(isa)
        new = [w for w in wanted if (isa_name, *w, lanes) not in self._compiled]
        if not new:
            return
        for i, (fn, dtypes, out) in enumerate(new):
            self.emit(module, isa, f"k{i}", fn, dtypes, out, lanes or self._lanes(isa, dtypes))
        # Where a GPU's driver holds most addresses, MCJIT puts them gigabytes apart.
        machine, image = self.compile(module, isa, isa == host_isa() or thorough(), near=False)
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        engine.add_object_file(llvm.ObjectFileRef.from_data(image))
        engine.finalize_object()
        for i, (fn, dtypes, out) in enumerate(new):
            kind = ctypes.CFUNCTYPE(None, ctypes.c_int64, *[ctypes.c_void_p] * (len(dtypes) + 1))
            function = kind(engine.get_function_address(f"k{i}"))
            self._compiled[isa_name, fn, dtypes, out, lanes] = engine, function, lanes or self._lanes(isa, dtypes)

    @staticmethod
    def _lanes(isa: Isa, dtypes: tuple[str, ...]) -> int:
        return isa.lanes(64 if "float64" in dtypes else 32)

    def run(self, isa_name: str, fn: str, dtypes: tuple[str, ...], out: str, *xs: np.ndarray, lanes: int = 0):
        """Apply fn to arrays of equal length (dtypes as NumPy has them); the result as an array of dtype `out`."""
        if (isa_name, fn, dtypes, out, lanes) not in self._compiled:
            self.prepare(isa_name, [(fn, dtypes, out)], lanes)
        _, function, lanes = self._compiled[isa_name, fn, dtypes, out, lanes]
        size = xs[0].size
        padded = -(-size // lanes) * lanes
        inputs = [np.resize(np.ascontiguousarray(x), padded) for x in xs]
        result = np.empty(padded, self.numpy_dtype(out))
        function(padded, *(x.ctypes.data for x in inputs), result.ctypes.data)
        return result[:size]


@pytest.fixture(scope="session")
def elementwise() -> Elementwise:
    return Elementwise()


@pytest.fixture(scope="session")
def undefined():
    """The function that lists an object's undefined symbols."""
    return undefined_symbols


def runnable_isas() -> list[str]:
    """The instruction sets of `ISAS` that this machine can run, narrowest first, and itself."""
    host = host_isa()
    names = [n for n in ("sse2", "avx2", "avx512") if host.arch == "x86_64" and ISAS[n].features <= host.features]
    return [*(n for n in names if n in ("sse2", "avx2")), "host"]


@pytest.fixture(scope="session")
def compiled_isas() -> list[str]:
    """The instruction sets whose code runs in other tests, which look for undefined symbols in it first: what this
    machine has includes the largest that it can run."""
    host = host_isa()
    able = [n for n, i in ISAS.items() if i.arch == host.arch and i.features <= host.features]
    alike = [n for n in able if ISAS[n].vector_bits == host.vector_bits]
    return [*runnable_isas(), *sorted(alike, key=lambda n: len(ISAS[n].features))[-1:]]


def pytest_generate_tests(metafunc):
    if "native_isa" in metafunc.fixturenames:
        metafunc.parametrize("native_isa", runnable_isas())


@pytest.fixture(autouse=True)
def as_users_have_it(optimized):
    """The code is what is tested here."""
