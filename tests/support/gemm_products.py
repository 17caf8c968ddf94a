"""Compiled products of `lowering/cpu/gemm.py`, run with poison around every buffer, and compared with NumPy."""

from __future__ import annotations

import ctypes

import llvmlite.binding as llvm
import ml_dtypes
import numpy as np
from draws import thorough

import jtile as jt
from jtile.lowering.cpu.compile import assemble, initialize, new_machine
from jtile.lowering.cpu.gemm import GemmSpec, emit_gemm
from jtile.lowering.cpu.isa import Isa, host_isa
from jtile.lowering.cpu.llvm import Code, Module, Val

# Error over the sum of the products' magnitudes. Sums of k terms in blocks; k goes to about 1500.
TOLERANCE = {"float32": 1e-6, "float64": 2e-15}
PAD = 80  # elements before and after every operand


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


class Products:
    """Compiled products of one instruction set: `run` checks every buffer's surroundings and returns C."""

    def __init__(self, isa: Isa, specs: list[GemmSpec], undefined):
        initialize(isa)
        module = Module(isa.triple, attributes=f'nounwind "no-builtins" "prefer-vector-width"="{isa.vector_bits}"')
        self.products = {}
        names = {}
        for i, spec in enumerate(dict.fromkeys(specs)):
            gemm = emit_gemm(module, isa, spec)
            params = [Val(t, f"%p{k}") for k, t in enumerate(["ptr", "i64"] * 3 + ["ptr"])]
            code = Code(module, f"test{i}", params, linkage="dso_local")
            code.do(f"call void @{gemm.name}({', '.join(map(str, params))})")
            code.finish()
            names[spec] = f"test{i}", gemm.workspace
        with jt.config(optimize=isa == host_isa() or thorough()):  # for other machines: two thirds of LLVM's time
            image, _ = assemble(module.text(), isa)
        assert undefined(image) == []
        if isa.arch != host_isa().arch or not isa.features <= host_isa().features:
            return
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), new_machine(host_isa(), 2))
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(image))
        self._engine.finalize_object()
        kind = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p, ctypes.c_int64] * 3, ctypes.c_void_p)
        for spec, (name, workspace) in names.items():
            self.products[spec] = kind(self._engine.get_function_address(name)), workspace

    def run(self, spec: GemmSpec, a: np.ndarray, b: np.ndarray, c: np.ndarray, slack: int = 0) -> np.ndarray:
        """C after the product of logical a [m, k] and b [k, n]; rows in memory are `slack` elements apart."""
        function, workspace = self.products[spec]
        assert a.shape == (spec.m, spec.k) and b.shape == (spec.k, spec.n) and c.shape == (spec.m, spec.n)
        operands = [
            Guarded(x, slack + i) for i, x in enumerate((a.T if spec.trans_a else a, b.T if spec.trans_b else b, c))
        ]
        scratch = np.full(workspace + 192, 0xFF, np.uint8)  # NaN in every float format
        start = -scratch.ctypes.data % 64 + 64
        args = [x for operand in operands for x in (operand.address, operand.stride)]
        function(*args, scratch.ctypes.data + start)
        assert (scratch[:start] == 0xFF).all() and (scratch[start + workspace :] == 0xFF).all(), "beyond the workspace"
        for operand, name in zip(operands, "ABC", strict=True):
            operand.check(name, written=name == "C")
        return operands[2].inside()


class Guarded:
    """A matrix in the middle of a buffer of NaN bytes (integers: -1), rows further apart than they are long."""

    def __init__(self, x: np.ndarray, slack: int):
        self.stride = x.shape[1] + slack
        rows = np.arange(x.shape[0])[:, None] * self.stride
        self.at = (PAD + rows + np.arange(x.shape[1])[None]).astype(np.int64)
        size = 2 * PAD + x.shape[0] * self.stride
        self.bytes = np.full(size * x.dtype.itemsize, 0xFF, np.uint8)
        self.buffer = self.bytes.view(x.dtype)
        self.buffer[self.at.ravel()] = x.ravel()
        self.before = self.bytes.copy()
        self.address = self.bytes.ctypes.data + PAD * x.dtype.itemsize

    def check(self, name: str, written: bool) -> None:
        now = self.bytes.copy()
        if written:
            now.view(self.buffer.dtype)[self.at.ravel()] = self.before.view(self.buffer.dtype)[self.at.ravel()]
        assert np.array_equal(now, self.before), f"{name} was written where it must not be"

    def inside(self) -> np.ndarray:
        return self.buffer[self.at.ravel()].reshape(self.at.shape)


def random_matrix(rng: np.random.Generator, shape: tuple[int, int], dtype: str) -> np.ndarray:
    kind = numpy_dtype(dtype)
    if dtype == "bool":
        return rng.random(shape) < 0.5
    if dtype == "float8_e8m0fnu":  # powers of two
        return (2.0 ** rng.integers(-3, 4, shape)).astype(kind)
    if "int" in dtype:
        limits = np.iinfo(kind)
        return rng.integers(limits.min, limits.max, shape, dtype=kind, endpoint=True)
    return rng.standard_normal(shape).astype(np.float32).astype(kind)


def check(products: Products, spec: GemmSpec, seed: int = 0) -> None:
    """Compare one product on random data with NumPy: exactly for integers, to TOLERANCE for floats."""
    rng = np.random.default_rng(seed)
    a = random_matrix(rng, (spec.m, spec.k), spec.a)
    b = random_matrix(rng, (spec.k, spec.n), spec.b)
    c = random_matrix(rng, (spec.m, spec.n), spec.acc)
    got = products.run(spec, a, b, c, slack=seed % 5)
    start = c if spec.accumulate else np.zeros_like(c)
    if "int" in spec.acc:
        with np.errstate(over="ignore"):
            want = (a.astype(np.int64) @ b.astype(np.int64) + start).astype(c.dtype)
        np.testing.assert_array_equal(got, want, err_msg=str(spec))
        return
    wide = [x.astype(np.float64) for x in (a, b, start)]
    want = wide[0] @ wide[1] + wide[2]
    magnitude = np.abs(wide[0]) @ np.abs(wide[1]) + np.abs(wide[2])
    assert not np.isnan(got).any(), spec
    assert (np.abs(got - want) <= TOLERANCE[spec.acc] * magnitude).all(), spec
