"""Loops and branches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from jtile import ir

from . import versions
from .emitter import Emitter, elem_of, emits, padded
from .hazards import in_order
from .ttir import Val

# ---- for ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Range:
    """A loop as `scf.for` runs it: signed bounds of one width, a positive step, and no overflow at the end.

    The index of the kernel's loop is `base + counter * scale`; `base` is None where the counter itself is it.
    """

    lo: Val
    hi: Val
    step: Val
    base: Val | None = None
    scale: Val | None = None

    @property
    def elem(self) -> str:
        return self.lo.elem


@emits(ir.For)
def _for(em: Emitter, op: ir.For) -> list[Val]:
    r = range_of(em, op)
    if em.around or _carried(em, (op.lo, op.hi, op.step)):
        r = dataclasses.replace(r, lo=em.kept(r.lo), hi=em.kept(r.hi), step=em.kept(r.step))
    inits = [em.val(v) for v in op.inits]
    results, yields = for_loop(em, op, r, inits, lambda args: em.block(op.body, args), _attributes(em, op))
    return _agreed(results, inits, yields)


# Emits the body of a region from its arguments; gives what it yields.
Body = Callable[[list[Val]], list[Val]]


def for_loop(
    em: Emitter, op: ir.For, r: Range, inits: Sequence[Val], body: Body, attributes: str = ""
) -> tuple[list[Val], list[Val]]:
    """A `scf.for` whose carries start from `inits`: its results, and what its body yields."""
    code = em.code
    counter, params = Val(code.name(), (), r.elem), [fresh(em, v) for v in inits]
    carry = ", ".join(f"{p.name} = {v.name}" for p, v in zip(params, inits, strict=True))
    carry = f" iter_args({carry}) -> ({types_of(inits)})" if inits else ""
    head = f"scf.for {counter.name} = {r.lo.name} to {r.hi.name} step {r.step.name}{carry} : {r.elem} {{"
    results = opened(em, head, inits)
    with code.region():
        yields = body([index_of(em, op, r, counter), *params])
        yield_values(em, yields)
    code.do("}" + attributes)
    return results, yields


def _carried(em: Emitter, bounds: Sequence[ir.Value]) -> bool:
    """Whether a bound of a loop may depend on what a loop around it carries."""
    if "carries" not in em.memo:
        loops = (op for op in em.kernel.body.walk() if isinstance(op, ir.For))
        em.memo["carries"] = {p for op in loops for p in op.body.params[1:]}
    carries = em.memo["carries"]
    todo, seen = list(bounds) if carries else [], set(bounds)
    while todo:
        v = todo.pop()
        if v in carries or (v.op is not None and v.op.blocks()):
            return True
        new = [x for x in (v.op.operands() if v.op is not None else ()) if x not in seen]
        todo += new
        seen.update(new)
    return False


def _attributes(em: Emitter, op: ir.For) -> str:
    """What the pipeliner and the unroller of triton read on a loop. `num_stages` of the user is taken at its word."""
    asked = em.num_stages or min(op.stages or 0, em.features.stages)
    stages = 1 if in_order(em, op.body) or any(x in em.paged for x in op.body.walk()) else asked
    out = [f"tt.num_stages = {stages} : i32"] * bool(stages)
    out += [f"tt.loop_unroll_factor = {op.unroll} : i32"] * (op.unroll > 1)
    return f" {{{', '.join(out)}}}" if out else ""


def range_of(em: Emitter, op: ir.For) -> Range:
    """The cheapest form of a loop: as it stands, in wider integers, or by counting its iterations."""
    code = em.code
    lo, hi, step = (em.val(v) for v in (op.lo, op.hi, op.step))
    info = ir.DTYPES[op.lo.dtype]
    if all(v.number is not None for v in (lo, hi, step)):
        return _static_range(em, op, [_exact(v, op) for v in (lo, hi, step)])
    by = None if step.number is None else _exact(step, op)
    signed = info.kind == "i"
    if by is None or by <= 0 or (info.bits == 64 and not (signed and by == 1)):
        return _counted(em, op)
    # A wider counter does not overflow past the last index, and holds every unsigned bound.
    ends = by == 1 or (hi.number is not None and _exact(hi, op) + by < 2**31)
    wide = "i32" if info.bits < 32 or (info.bits == 32 and signed and ends) else "i64"
    return Range(*(code.to_int(v, wide, signed=signed) for v in (lo, hi, step)))


def _exact(v: Val, op: ir.For) -> int:
    """The value of a constant bound in the loop's dtype."""
    info = ir.DTYPES[op.lo.dtype]
    n = int(v.number or 0) % 2**info.bits
    return n - 2**info.bits if info.kind == "i" and n >> (info.bits - 1) else n


def _static_range(em: Emitter, op: ir.For, numbers: list[int]) -> Range:
    code = em.code
    lo, hi, step = numbers
    count = len(range(lo, hi, step)) if step else 0
    if step > 0 and lo >= -(2**31) and max(hi, lo) + step < 2**31:
        return Range(*(code.i32(n) for n in (lo, hi, step)))
    wide = "i32" if count < 2**31 else "i64"
    base, scale = (em.integer(v, _index_elem(op)) for v in (op.lo, op.step))
    return Range(code.const(0, wide), code.const(count, wide), code.const(1, wide), base, scale)


def _counted(em: Emitter, op: ir.For) -> Range:
    """A loop over the number of its iterations: `ceil((hi - lo) / step)`; a step of 0 runs none."""
    code = em.code
    signed = ir.DTYPES[op.lo.dtype].kind == "i"
    lo, hi, step = (em.integer(v, "i64") for v in (op.lo, op.hi, op.step))
    zero, one = code.const(0, "i64"), code.const(1, "i64")
    up = code.cmp("sgt", step, zero) if signed else code.cmp("ne", step, zero)
    down = code.cmp("slt", step, zero) if signed else code.const(False, "i1")
    first, last = code.select(down, hi, lo), code.select(down, lo, hi)
    some = code.cmp("slt" if signed else "ult", first, last)
    some = code.op("arith.andi", some, code.op("arith.ori", up, down))
    size = code.select(down, code.sub(zero, step), step)
    size = code.op("arith.maxui", size, one)
    count = code.op("arith.divui", code.sub(code.sub(last, first), one), size)
    count = code.select(some, code.add(count, one), zero)
    return Range(zero, count, one, em.integer(op.lo, _index_elem(op)), em.integer(op.step, _index_elem(op)))


def _index_elem(op: ir.For) -> str:
    return "i64" if ir.DTYPES[op.lo.dtype].bits == 64 else "i32"


def index_of(em: Emitter, op: ir.For, r: Range, counter: Val) -> Val:
    """The index of an iteration, in the loop's own dtype."""
    code = em.code
    elem = elem_of(op.lo.dtype)
    if r.base is None or r.scale is None:
        return code.to_int(counter, elem, signed=ir.DTYPES[op.lo.dtype].kind == "i")
    at = code.add(r.base, code.mul(code.to_int(counter, r.base.elem), r.scale))
    return at if at.elem == elem else code.to_int(at, elem)


# ---- while, if ------------------------------------------------------------------------------------------------------


@emits(ir.While)
def _while(em: Emitter, op: ir.While) -> list[Val]:
    inits = [em.val(v) for v in op.inits]
    results, yields = while_loop(em, op, inits, lambda args: em.block(op.body, args))
    return _agreed(results, inits, yields)


def while_loop(em: Emitter, op: ir.While, inits: Sequence[Val], body: Body) -> tuple[list[Val], list[Val]]:
    """A `scf.while` whose carries start from `inits`: its results, and what its body yields."""
    code = em.code
    tested, params = [[fresh(em, v) for v in inits] for _ in range(2)]
    carry = ", ".join(f"{p.name} = {v.name}" for p, v in zip(tested, inits, strict=True))
    carry, kinds = f" ({carry})" if inits else "", types_of(inits)
    results = opened(em, f"scf.while{carry} : ({kinds}) -> ({kinds}) {{", inits)
    with code.region():
        (go,) = em.block(op.cond, tested)
        _end_of_test(em, go, tested)
    code.do("} do {")
    if inits:
        code.do(f"^bb0({', '.join(f'{p.name}: {p.type}' for p in params)}):")
    with code.region():
        yields = body(params)
        yield_values(em, yields, always=True)
    code.do("}")
    return results, yields


def _end_of_test(em: Emitter, go: Val, passed: Sequence[Val]) -> None:
    """The end of the condition of a `scf.while`: whether it goes on, and what it hands to its body."""
    code = em.code
    if not (em.features.npu or versions.constant_conditions()):  # no analysis knows that `never` is false
        never = code.cmp("slt", code.let("tt.get_program_id x : i32", (), "i32"), code.i32(0))
        go = code.op("arith.ori", go, never)
    handed = f" {', '.join(v.name for v in passed)} : {types_of(passed)}" if passed else ""
    code.do(f"scf.condition({go.name}){handed}")


@emits(ir.If)
def _if(em: Emitter, op: ir.If) -> list[Val]:
    code = em.code
    kinds = [Val("", padded(v.shape), elem_of(v.dtype)) for v in op.results]
    returns = f" -> ({types_of(kinds)})" if kinds else ""
    results = opened(em, f"scf.if {em.val(op.cond).name}{returns} {{", kinds)
    branches = []
    for text, block in (("} else {", op.then), ("}", op.orelse)):
        with code.region():
            branches.append(em.block(block))
            yield_values(em, branches[-1])
        code.do(text)
    return _agreed(results, *branches)


# ---- regions --------------------------------------------------------------------------------------------------------


def fresh(em: Emitter, like: Val) -> Val:
    """A parameter of a region: what its lanes beyond the tile hold is not known, for it changes from turn to turn."""
    return dataclasses.replace(like, name=em.code.name(), fill=None, number=None)


def opened(em: Emitter, head: str, results: Sequence[Val]) -> list[Val]:
    """The first line of an op with regions; its results are of the types of `results`."""
    if not results:
        em.code.do(head)
        return []
    return em.code.let_many(head, [(v.shape, v.elem) for v in results], [v.layout for v in results])


def yield_values(em: Emitter, values: Sequence[Val], *, always: bool = False) -> None:
    """The end of a region; one that yields nothing says so only where it must (`always`)."""
    if values:
        em.code.do(f"scf.yield {', '.join(v.name for v in values)} : {types_of(values)}")
    elif always:
        em.code.do("scf.yield")


def types_of(values: Sequence[Val]) -> str:
    """The types of values, as a list in text."""
    return ", ".join(v.type for v in values)


def _agreed(results: Sequence[Val], one: Sequence[Val], other: Sequence[Val]) -> list[Val]:
    """Results with the fill that both sources have: a loop gives its start or what its body yields last."""
    return [
        dataclasses.replace(r, fill=a.fill) if type(a.fill) is type(b.fill) and a.fill == b.fill else r
        for r, a, b in zip(results, one, other, strict=True)
    ]
