"""Sizes that are known when a kernel runs, as LLVM code: arithmetic on the symbols that the host passes in `dims`."""

from __future__ import annotations

from collections.abc import Sequence

from jtile import ir
from jtile._errors import UnsupportedError

from .llvm import Code, Module, Val, i64

GRID = "jtile_grid"
MAX_SYMBOLS, MAX_AXES = 64, 16  # as ffi/csrc/program.h and program.cc have them


def sizes_of(kernel: ir.Kernel) -> list[ir.Extent]:
    """Every size of a kernel's Refs, grid and body that has symbols, each once."""
    sizes = [*(n for v in kernel.params for n in v.shape), *kernel.grid]
    sizes += [op.size for op in kernel.body.walk() if isinstance(op, ir.SizeOf)]
    return list(dict.fromkeys(n for n in sizes if isinstance(n, ir.Extent)))


def load_symbols(code: Code, kernel: ir.Kernel, dims: Val) -> dict[str, Val]:
    return {n: code.load("i64", code.gep("i64", dims, k), align=8) for k, n in enumerate(ir.launch_symbols(kernel))}


def emit_size(code: Code, n: ir.Size, symbols: dict[str, Val]) -> Val:
    """The value of a size, as an i64, from the symbols' values."""
    if isinstance(n, int):
        return i64(n)
    total = i64(0)
    for atoms, k in n.terms:
        product = i64(k)
        for a in atoms:
            factor = symbols[a] if isinstance(a, str) else _call(code, a.fn, a.args, symbols)
            product = code.mul(product, factor)
        total = code.add(total, product)
    return total


def _call(code: Code, fn: str, args: Sequence[ir.Size], symbols: dict[str, Val]) -> Val:
    a, b = (emit_size(code, x, symbols) for x in args)
    if fn in ("max", "min"):
        return code.intrinsic(f"s{fn}", "i64", a, b)
    if fn == "cdiv":
        return code.sub(0, _floor(code, code.sub(0, a), b))
    quotient = _floor(code, a, b)
    return quotient if fn == "floordiv" else code.sub(a, code.mul(quotient, b))


def _floor(code: Code, a: Val, b: Val) -> Val:
    """`a // b` towards minus infinity."""
    quotient = code.binary("sdiv", a, b)
    rest = code.binary("sub", a, code.binary("mul", quotient, b))
    opposite = code.cmp("icmp", "slt", code.binary("xor", rest, b), i64(0))
    down = code.binary("and", code.cmp("icmp", "ne", rest, i64(0)), opposite)
    return code.binary("sub", quotient, code.cast("zext", down, "i64"))


def emit_grid(module: Module, kernel: ir.Kernel) -> None:
    """Emit `int64_t jtile_grid(const int64_t* dims, int64_t* sides)`, which writes the number of programs on each axis
    to `sides` and returns how many axes there are."""
    dims, sides = Val("ptr", "%dims"), Val("ptr", "%sides")
    code = Code(module, GRID, [dims, sides], ret="i64", linkage="dso_local")
    symbols = load_symbols(code, kernel, dims)
    for k, n in enumerate(kernel.grid):
        code.store(emit_size(code, n, symbols), code.gep("i64", sides, k), align=8)
    code.finish(i64(len(kernel.grid)))


def dims_attribute(kernel: ir.Kernel) -> list[int]:
    """What the host fills `dims` from: for each dynamic dimension of an input its input, axis, place and multiple."""
    places = {name: k for k, name in enumerate(ir.launch_symbols(kernel))}
    if len(places) > MAX_SYMBOLS or len(kernel.grid) > MAX_AXES:
        raise UnsupportedError(
            f"kernel {kernel.name} has {len(places)} dynamic sizes on a grid of {len(kernel.grid)} axes: cpu code "
            f"takes at most {MAX_SYMBOLS} sizes and {MAX_AXES} axes; mark fewer dimensions dynamic",
            (kernel.loc.file, kernel.loc.line) if kernel.loc.file else None,
        )
    sources = ir.sources(kernel)
    return [x for name, k in places.items() for s in sources[name] for x in (s.operand, s.axis, k, s.multiple)]
