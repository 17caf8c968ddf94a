"""Which products are those of `byte_digits`: rows (256 h + l) s of bytes h and l, and weights in panels, for whose
product the precision is left to the target. What the operands are made by is then computed by nobody."""

from __future__ import annotations

from typing import NamedTuple

from jtile import ir

from . import byte_columns, byte_digits, nibbles
from .isa import Isa
from .plan import BlockPlan, used_by
from .scaled_columns import BLOCK, SCALES

_FLOATS = ("float32", "float16", "bfloat16")
MOST = 65472  # terms, of which each adds up to 2**15 to an int32: the next multiple of a tile's terms is 2**16


class Digits(NamedTuple):
    """The operands of a product as they are stored: bytes high, low [m, k] and the scale of all rows, or of each, [m]
    or [m, 1]; and `of_b`: words of codes, scales and perhaps lows in panels; or bytes high, low and perhaps scales, as
    of rows. made: the values between these and the product. fade: (x, a number for each row) of an accumulator that is
    their product, which nobody else reads."""

    of_a: tuple[ir.Value, ir.Value, ir.Value]
    of_b: tuple[ir.Value, ...]
    spec: byte_columns.DigitSpec
    made: frozenset[ir.Value]
    fade: tuple[ir.Value, ir.Value] | None = None


def digits(isa: Isa, op: ir.Dot) -> Digits | None:
    """The operands of such a product; None: it is another one."""
    if op.precision != "fast" or not byte_digits.fits(isa) or op.a.type.rank != 2 or op.trans_a:
        return None
    _, m, n, k = op.sizes()
    if m % byte_columns.ROWS or n % byte_columns.ROWS or k % byte_columns.STEP or 0 in (m, n, k) or k > MOST:
        return None
    made: set[ir.Value] = set()
    of_a = _rows(made, op.a)
    of_b = _weights(made, op.b) if op.trans_b else None
    spec = None if of_b is None else _of_weights(m, n, k, *of_b)
    if of_b is None:
        of_b = _columns(made, op.b, op.trans_b)
        scale = None if of_b is None or of_b[2] is None else "float32"
        spec = byte_columns.DigitSpec(m, n, k, "rows" if op.trans_b else "lanes", scale)
    if of_a is None or of_b is None:
        return None
    given = tuple(v for v in of_b if isinstance(v, ir.Value))
    return Digits(of_a, given, spec, frozenset(made), _fade(op.acc))


def _fade(acc: ir.Value | None) -> tuple[ir.Value, ir.Value] | None:
    """(x, f) of x times a number f for each row."""
    x, f = _two(set(), acc, "mul") or (None, None)
    by_rows = f is not None and isinstance(f.op, ir.Broadcast) and (f.op.dims, f.op.x.shape) == ((0,), f.shape[:1])
    return (x, f.op.x) if by_rows else None


def _of_weights(m: int, n: int, k: int, words: ir.Value, scale: ir.Value, low) -> byte_columns.DigitSpec:
    form = "codes" if words.shape[1] * 8 == k else "bytes"
    of_low = low.dtype if isinstance(low, ir.Value) else low
    return byte_columns.DigitSpec(m, n, k, form, scale.dtype, of_low, k // BLOCK // scale.shape[1])


def absorbed(isa: Isa, plan: BlockPlan) -> tuple[dict[ir.Dot, Digits], set[ir.Value]]:
    """Of a block, the products of digits, and the values that nobody else reads and that are computed by nobody."""
    ops = plan.block.ops
    found = {op: of for op in ops if isinstance(op, ir.Dot) and (of := digits(isa, op)) is not None}

    def inside(v: ir.Value) -> bool:
        if isinstance(v.op, ir.Map | ir.Cast | ir.Broadcast):  # computed where they are read, by whoever it may be
            return True
        readers = [ops[k] if k < len(ops) else None for k in plan.uses.get(v, [])]
        return v in plan.defined and all(r in found or (r and r.results[0] in known) for r in readers)

    while True:
        known = {v for of in found.values() for v in of.made}
        left = {op: of for op, of in found.items() if all(map(inside, of.made))}
        if len(left) == len(found):
            return {op: _alone(plan, op, of) for op, of in found.items()}, known
        found = left


def _alone(plan: BlockPlan, op: ir.Dot, of: Digits) -> Digits:
    """The product with an accumulator that fades if it is made for this product alone."""
    alone = of.fade is not None and op.acc in plan.defined and len(plan.uses[op.acc]) == 1
    return of if alone else of._replace(fade=None)


def read(isa: Isa, op: ir.Op) -> list[ir.Value]:
    """What a product of digits reads; of another op what it uses, and what products of digits in its regions read."""
    of = digits(isa, op) if isinstance(op, ir.Dot) else None
    if of is not None:
        return [*of.of_a, *of.of_b, *([] if op.acc is None else [op.acc])]
    inner = [v for block in op.blocks() for o in block.ops for v in read(isa, o)]
    return [*used_by(op), *inner]


def _columns(made: set[ir.Value], v: ir.Value, turned: bool):
    """(h, l, s or None) of columns (256 h + l) s, which are turned where they have scales."""
    if not turned or not isinstance(v.op, ir.Map) or v.op.fn != "mul":
        found = _whole(made, v)
        return None if found is None else (*found, None)
    return _rows(made, v)


def _rows(made: set[ir.Value], v: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value] | None:
    """(h, l, s) of (256 h + l) s."""
    whole, scale = _two(made, v, "mul") or (None, None)
    found = _whole(made, whole)
    if found is None or scale is None or not isinstance(scale.op, ir.Broadcast) or scale.dtype != "float32":
        return None
    made.add(scale)
    of, dims = scale.op.x, scale.op.dims
    known = (of.shape, dims) in (((), ()), (v.shape[:1], (0,)), ((v.shape[0], 1), (0, 1)))
    return (*found, of) if known else None


def _whole(made: set[ir.Value], v: ir.Value | None) -> tuple[ir.Value, ir.Value] | None:
    """(h, l) of 256 h + l."""
    large, low = _two(made, v, "add") or (None, None)
    high, factor = _two(made, large, "mul") or (None, None)
    if not _is_full(made, factor, 256):
        return None
    high, low = (_cast(made, x, ("int8",)) for x in (high, low))
    return None if high is None or low is None else (high, low)


def _weights(made: set[ir.Value], v: ir.Value):
    """(words, scales, lows) of weights in panels."""
    if not isinstance(v.op, ir.Reshape) or v.op.x.type.rank != 3:
        return None
    n, groups, _ = v.op.x.shape
    made.add(v)
    numbers, low = _two(made, v.op.x, "add") or (v.op.x, None)
    numbers, scale = _two(made, numbers, "mul") or (None, None)
    less = _two(made, numbers, "sub") if numbers is not None and low is None else None
    if less is not None:
        numbers, low = less[0] if _is_full(made, less[1], 8) else None, SCALES
    words = _words(made, numbers, v.shape)
    of_group = _of_groups(made, scale, (n, groups))
    of_low = _of_groups(made, low, (n, groups)) if isinstance(low, ir.Value) else low
    if words is None or of_group is None or (isinstance(low, ir.Value) and of_low is None):
        return None
    four = words.shape[1] * 8 == v.shape[1]
    whole = v.shape[1] % (groups * BLOCK) == 0
    return (words, of_group, of_low) if whole and four == (of_low is not None) else None


def _words(made: set[ir.Value], numbers: ir.Value | None, shape: tuple[int, ...]) -> ir.Value | None:
    """The words of codes [n, k] that stand as floats [n, groups, k / groups]."""
    if numbers is None or not isinstance(numbers.op, ir.Reshape):
        return None
    made.add(numbers)
    codes = _cast(made, numbers.op.x, ("uint8", "int8"))
    words = None if codes is None or codes.shape != shape else nibbles.panel_words(codes)
    return None if words is None else _chain(made, codes, words)


def _of_groups(made: set[ir.Value], v: ir.Value | None, shape: tuple[int, int]) -> ir.Value | None:
    """The numbers of panels of 16 rows [n, groups] that stand as floats [n, groups, any]."""
    rows = _spread(made, v)
    if rows is None or rows.shape[:2] != shape:
        return None
    rows = _cast(made, rows, _FLOATS) or rows
    numbers = nibbles.panel_numbers(rows)
    return None if numbers is None or numbers.dtype not in _FLOATS else _chain(made, rows, numbers)


def _two(made: set[ir.Value], v: ir.Value | None, fn: str) -> tuple[ir.Value, ir.Value] | None:
    """The operands of a function of two."""
    if v is None or not isinstance(v.op, ir.Map) or v.op.fn != fn:
        return None
    made.add(v)
    return v.op.args[0], v.op.args[1]


def _cast(made: set[ir.Value], v: ir.Value | None, dtypes: tuple[str, ...]) -> ir.Value | None:
    """What was cast to float32 from one of some dtypes."""
    if v is None or not isinstance(v.op, ir.Cast) or v.dtype != "float32" or v.op.x.dtype not in dtypes:
        return None
    made.add(v)
    return v.op.x


def _spread(made: set[ir.Value], v: ir.Value | None) -> ir.Value | None:
    """What was broadcast along its last axis or axes that are new."""
    while v is not None and isinstance(v.op, ir.Broadcast):
        if v.op.dims != tuple(range(v.op.x.type.rank)):
            return None
        made.add(v)
        v = v.op.x
    return v


def _is_full(made: set[ir.Value], v: ir.Value | None, value: float) -> bool:
    if v is not None and isinstance(v.op, ir.Broadcast):
        made.add(v)
        v = v.op.x
    return v is not None and isinstance(v.op, ir.Full) and v.op.value == value


def _chain(made: set[ir.Value], v: ir.Value, end: ir.Value) -> ir.Value:
    """Notes what `v` is made by, up to `end`, and gives that."""
    todo = [v]
    while todo:
        x = todo.pop()
        if x is not end and x not in made and not isinstance(x.op, ir.Full) and x.op is not None:
            made.add(x)
            todo += x.op.operands()
    return end
