"""Matmul of one tile: C = A . B or C += A . B as an LLVM function, specialised to sizes, dtypes and layouts.

A product runs in one of three ways (`gemm_plan`): *packed* (B copied to panels, a register-blocked micro-kernel),
*direct* (few rows: B is read once, in place) and *dot* (few rows or columns against k-contiguous data: vectors
along k).
Floats accumulate in f32 (f64 for f64), integers modulo 2**32 or 2**64.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools

from . import gemm_pack as pack
from . import tiles
from .gemm_kernels import STEPS_AHEAD, DotShape, PanelShape, bank_count, dot_kernel, fetches_ahead, panel_kernel
from .gemm_modes import ACCUMULATORS, BYTES, STORAGE, choose_mode
from .gemm_plan import Columns, Plan, make_plan
from .gemm_tiles import STEPS, TileShape, configure, tile_kernel
from .gemm_vector import ATTRIBUTES, call, offset, store_part, zeros
from .isa import Isa
from .llvm import Code, Module, Val, i64, vec

_MAX_ROWS = 256  # taller products go in parts of this, so that a k block of A stays in L2

_A_PACK_STEPS = 128
_PAGE = 4096  # bytes between addresses in the same set of a first-level cache
_LONG_SUMS = 128  # steps of a k block beside which it costs nothing to ask for sums
_FAR = 256 << 10  # bytes of a B that does not lie in the second-level cache beside A and C
_MOST_ASKED = 4  # rows of units that a micro-kernel asks for at a time


@dataclasses.dataclass(frozen=True)
class GemmSpec:
    """A tile product C[m, n] (+)= A[m, k] . B[k, n] with static sizes, each at least 0.

    Attributes:
      a, b: jtile dtype names of the operands; acc: dtype of C ("float32", "float64", "int32", "int64").
      trans_a: A is stored [k, m] with unit stride along m; otherwise [m, k] with unit stride along k.
      trans_b: B is stored [n, k]; otherwise [k, n].
      accumulate: add to C instead of overwriting it.
      made: B was computed for this product, so that no time is left to bring it to another layout. With `trans_b` every
        element of C is then one sum along k, in an order that does not depend on m or n.
      banks: in how many sums the terms of an element are that are added up in the end, where the products runs in
        panels; 0: as many as are fast.
      terms: how many terms these are the sums of, before they are added to C and the next ones begin; 0: all. It
        divides k, where the product runs in panels and k is one block.
    """

    m: int
    n: int
    k: int
    a: str
    b: str
    acc: str
    trans_a: bool = False
    trans_b: bool = False
    accumulate: bool = False
    made: bool = False
    banks: int = 0
    terms: int = 0

    @property
    def sets(self) -> int:
        """Sets of accumulators that a block of C has in registers at least; 0: as many as are fast."""
        return self.banks + (self.terms > 0)

    @property
    def name(self) -> str:
        layout = (
            ("t" if self.trans_a else "n")
            + ("t" if self.trans_b else "n")
            + "_add" * self.accumulate
            + "_made" * self.made
            + f"_banks{self.banks}" * bool(self.banks)
            + f"_terms{self.terms}" * bool(self.terms)
        )
        return f"gemm_{self.m}x{self.n}x{self.k}_{self.a}_{self.b}_{self.acc}_{layout}"


@dataclasses.dataclass(frozen=True)
class Gemm:
    """An emitted product: the function's name and the bytes of 64-byte aligned scratch it wants."""

    name: str
    workspace: int


def emit_gemm(module: Module, isa: Isa, spec: GemmSpec) -> Gemm:
    """Add `void @name(ptr A, i64 lda, ptr B, i64 ldb, ptr C, i64 ldc, ptr workspace)` to the module, once per spec.

    Strides count elements; the buffers need element alignment only, the workspace 64 bytes. No byte outside the
    operands is read, none outside C[:m, :n] is written.

    Raises:
      ValueError: the dtypes do not go together (`choose_mode`).
    """
    mode = choose_mode(isa, spec.a, spec.b, spec.acc)
    if 0 in (spec.m, spec.n, spec.k):
        return Gemm(_emit_empty(module, isa, spec), 0)
    if spec.trans_a and spec.n <= 4 and spec.m > 8:
        return _emit_turned(module, isa, spec)
    plan = make_plan(mode, spec.m, spec.n, spec.k, spec.trans_a, spec.trans_b, spec.made, spec.sets)
    if plan.strategy == "packed" and spec.m > _MAX_ROWS:
        return _emit_split(module, isa, spec, plan)
    if spec.name not in module.functions:
        c = Code(module, spec.name, _PARAMS, attributes=ATTRIBUTES)
        (_emit_dot if plan.strategy == "dot" else _emit_panels)(c, spec, plan)
        c.finish()
    return Gemm(spec.name, plan.workspace)


@dataclasses.dataclass(frozen=True)
class Order:
    """The order in which the products of an element are added up: `banks` sums take them in turns, and are added up
    after `terms` of them. Products of one order have the same bits, however many rows and columns there are."""

    banks: int
    terms: int


ANY_ORDER = Order(0, 0)  # of integers


def order_of(isa: Isa, spec: GemmSpec) -> Order | None:
    """The order of the sums of a product; None where it is another one, or not one for all elements."""
    mode = choose_mode(isa, spec.a, spec.b, spec.acc)
    if mode.acc not in ("float", "double"):
        return ANY_ORDER
    turned = spec.trans_a and spec.n <= 4 and spec.m > 8
    if mode.kind != "fma" or 0 in (spec.m, spec.n, spec.k) or turned or spec.m > _MAX_ROWS:
        return None
    plan = make_plan(mode, spec.m, spec.n, spec.k, spec.trans_a, spec.trans_b, spec.made, spec.sets)
    if plan.strategy == "dot" or plan.blocks != 1:
        return None
    blocks = itertools.product(plan.rows, plan.columns)
    counts = {bank_count(mode, PanelShape(r.rows, c.vectors, c.tail, banks=spec.banks)) for r, c in blocks}
    return Order(counts.pop(), spec.terms or spec.k) if len(counts) == 1 else None


_A, _LDA, _B, _LDB, _C, _LDC, _WORK = _PARAMS = [
    Val("ptr", "%A"), Val("i64", "%lda"), Val("ptr", "%B"), Val("i64", "%ldb"), Val("ptr", "%C"), Val("i64", "%ldc"),
    Val("ptr", "%workspace"),
]  # fmt: skip


def _emit_empty(module: Module, isa: Isa, spec: GemmSpec) -> str:
    """A product without terms: zero, or C unchanged."""
    if spec.name not in module.functions:
        c = Code(module, spec.name, _PARAMS, attributes=ATTRIBUTES)
        acc = ACCUMULATORS[spec.acc]
        lanes = isa.lanes(8 * BYTES[acc])
        if spec.m and spec.n and not spec.accumulate:
            with c.loop(0, spec.m) as i:
                row = offset(c, _C, c.mul(i, _LDC), BYTES[acc])
                with c.loop(0, spec.n // lanes * lanes, lanes) as j:
                    store_part(c, isa, zeros(vec(lanes, acc)), offset(c, row, j, BYTES[acc]), lanes)
                if rest := spec.n % lanes:
                    store_part(c, isa, zeros(vec(lanes, acc)), offset(c, row, spec.n - rest, BYTES[acc]), rest)
        c.finish()
    return spec.name


def _emit_split(module: Module, isa: Isa, spec: GemmSpec, plan: Plan) -> Gemm:
    """A tall product as a column of lower ones, nearly equal so that little code is needed."""
    done = spec.name in module.functions
    c = Code(module, spec.name, _PARAMS, attributes=ATTRIBUTES)
    workspace = 0
    for start, count, m in _even(spec.m, _MAX_ROWS, plan.rows[0].rows):
        part = emit_gemm(module, isa, dataclasses.replace(spec, m=m))
        workspace = max(workspace, part.workspace)
        with c.loop(0, count) as i:
            row = c.add(start, c.mul(i, m))
            a = offset(c, _A, row if spec.trans_a else c.mul(row, _LDA), BYTES[STORAGE[spec.a]])
            out = offset(c, _C, c.mul(row, _LDC), BYTES[plan.mode.acc])
            call(c, part.name, a, _LDA, _B, _LDB, out, _LDC, _WORK)
    if not done:
        c.finish()
    return Gemm(spec.name, workspace)


def _emit_turned(module: Module, isa: Isa, spec: GemmSpec) -> Gemm:
    """A narrow C with A stored [k, m]: its transpose is a product of few rows, which turn into the columns of C."""
    turned = GemmSpec(spec.n, spec.m, spec.k, spec.b, spec.a, spec.acc, not spec.trans_b, False)
    inner = emit_gemm(module, isa, turned)
    acc = ACCUMULATORS[spec.acc]
    if spec.name not in module.functions:
        c = Code(module, spec.name, _PARAMS, attributes=ATTRIBUTES)
        rows = offset(c, _WORK, inner.workspace, 1)
        call(c, inner.name, _B, _LDB, _A, _LDA, rows, i64(spec.m), _WORK)
        plus = "fadd" if acc in ("float", "double") else "add"
        with c.loop(0, spec.m) as i:
            line = offset(c, _C, c.mul(i, _LDC), BYTES[acc])
            for j in range(spec.n):
                x = c.load(acc, offset(c, rows, c.add(i, j * spec.m), BYTES[acc]), align=BYTES[acc])
                ptr = offset(c, line, j, BYTES[acc])
                c.store(
                    c.binary(plus, c.load(acc, ptr, align=BYTES[acc]), x) if spec.accumulate else x,
                    ptr,
                    align=BYTES[acc],
                )
        c.finish()
    return Gemm(spec.name, inner.workspace + -(-spec.n * spec.m * BYTES[acc] // 64) * 64)


def _even(size: int, limit: int, unit: int) -> list[tuple[int, int, int]]:
    """(start, count, size) of equal parts of at most `limit` and one smaller rest; parts are multiples of `unit`."""
    least = -(-size // -(-size // limit))
    each = min(-(-least // unit) * unit, size)
    count, rest = divmod(size, each)
    return [(0, count, each)] + ([(size - rest, 1, rest)] if rest else [])


@dataclasses.dataclass(frozen=True)
class _Block:
    """One k block: start, elements, groups (also the partial one), whole groups, whether it is last or adds to C."""

    k0: Val
    kc: Val
    steps: Val
    whole: Val
    last: Val
    add: Val
    may_add: bool


def _k_block(c: Code, spec: GemmSpec, plan: Plan, k0: Val) -> _Block:
    group = plan.mode.group
    if plan.blocks == 1:
        add = Val("i1", "true" if spec.accumulate else "false")
        whole = i64(spec.k // group)
        return _Block(k0, i64(spec.k), i64(-(-spec.k // group)), whole, Val("i1", "true"), add, spec.accumulate)
    kc = c.intrinsic("smin", "i64", c.sub(spec.k, k0), i64(plan.kc))
    steps, whole = (c.binary("lshr", c.add(kc, extra), i64(group.bit_length() - 1)) for extra in (group - 1, 0))
    add = Val("i1", "true") if spec.accumulate else c.cmp("icmp", "ne", k0, i64(0))
    return _Block(k0, kc, steps, whole, c.cmp("icmp", "slt", kc, i64(plan.kc)), add, True)


def _emit_panels(c: Code, spec: GemmSpec, plan: Plan) -> None:
    """The packed and the direct strategy: k blocks, then column panels (one packed at a time), then row panels."""
    panel = offset(c, _WORK, plan.a_bytes, 1)
    sums = offset(c, panel, plan.b_bytes, 1)
    with tiles.kept(c) if plan.mode.tiles else contextlib.nullcontext(), c.loop(0, spec.k, plan.kc) as k0:
        block = _k_block(c, spec, plan, k0)
        _pack_a(c, spec, plan, block)
        for columns in plan.columns:
            with c.loop(0, columns.count) as j:
                first = c.add(columns.start, c.mul(j, columns.width))
                if plan.strategy == "packed":
                    _pack_b(c, spec, plan, block, columns, first, panel, sums)
                    multiply = _row_panels_of_tiles if plan.mode.tiles else _row_panels
                    multiply(c, spec, plan, block, columns, first, panel, sums)
                else:
                    b = offset(c, _B, c.add(c.mul(k0, _LDB), first), BYTES[STORAGE[spec.b]])
                    _row_panels(c, spec, plan, block, columns, first, b, sums)


def _pack_a(c: Code, spec: GemmSpec, plan: Plan, block: _Block) -> None:
    """Bring this k block of A to the layout that the micro-kernel reads, where it is not there already."""
    size = BYTES[STORAGE[spec.a]]
    ld = c.mul(_LDA, size)
    if plan.a_layout == "rows":
        if spec.trans_a:
            name = pack.turned_rows(c.module, plan.mode, spec.a, spec.k, spec.m)
            call(c, name, c.gep("i8", _A, c.mul(block.k0, ld)), ld, _WORK, i64(plan.a_row_bytes), block.kc)
            return
        name = pack.rows_from_rows(c.module, plan.mode, spec.a, spec.k)
        call(c, name, offset(c, _A, block.k0, size), ld, _WORK, i64(plan.a_row_bytes), i64(spec.m), block.kc)
    elif plan.a_spread:
        name = pack.rows_from_rows(c.module, plan.mode, spec.a, spec.k)
        with c.when(_is_crowded(c, ld)):
            call(c, name, offset(c, _A, block.k0, size), ld, _WORK, i64(plan.a_row_bytes), i64(spec.m), block.kc)
    elif plan.a_layout == "panels":
        width, unit = plan.a_width, plan.mode.unit_bytes
        with c.loop(0, block.kc, _A_PACK_STEPS) as k1:  # few enough k rows that neighbouring panels find them in L1
            kc = c.intrinsic("smin", "i64", c.sub(block.kc, k1), i64(_A_PACK_STEPS))
            source = c.gep("i8", _A, c.mul(c.add(block.k0, k1), ld))
            start = offset(c, _WORK, c.binary("sdiv", k1, i64(plan.mode.group)), width * unit)
            for rows in plan.rows:
                name = pack.panel_from_lanes(c.module, plan.mode, spec.a, spec.k, width, rows.rows, "a")
                with c.loop(0, rows.count) as p:
                    row = c.add(rows.start, c.mul(p, rows.rows))
                    panel = offset(c, start, c.add(rows.panel, p), width * plan.a_row_bytes)
                    call(c, name, offset(c, source, row, size), ld, panel, kc)


def _pack_b(
    c: Code, spec: GemmSpec, plan: Plan, block: _Block, columns: Columns, first: Val, panel: Val, sums: Val
) -> None:
    """Pack one column panel of this k block of B, and its column sums where the mode wants them."""
    mode, size = plan.mode, BYTES[STORAGE[spec.b]]
    width, ld = columns.vectors * mode.lanes, c.mul(_LDB, size)
    if not spec.trans_b:
        name = pack.panel_from_lanes(c.module, mode, spec.b, spec.k, width, columns.width, "b")
        source = offset(c, c.gep("i8", _B, c.mul(block.k0, ld)), first, size)
        call(c, name, source, ld, panel, block.kc, *[sums] * mode.flip)
        return
    source = c.gep("i8", offset(c, _B, block.k0, size), c.mul(first, ld))
    name = pack.panel_from_rows(c.module, mode, spec.b, spec.k, width)
    with c.loop(0, columns.vectors) as v:
        lane = c.mul(v, mode.lanes)
        target = offset(c, panel, lane, mode.unit_bytes)
        real = c.intrinsic("smin", "i64", c.sub(columns.width, lane), i64(mode.lanes))
        extra = [offset(c, sums, lane, 4)] * mode.flip
        call(c, name, c.gep("i8", source, c.mul(lane, ld)), ld, target, block.kc, real, *extra)


def _row_panels(
    c: Code, spec: GemmSpec, plan: Plan, block: _Block, columns: Columns, first: Val, b: Val, sums: Val
) -> None:
    """Run the micro-kernel over all row panels of one column panel."""
    mode, direct = plan.mode, plan.strategy == "direct"
    a_size = BYTES[STORAGE[spec.a]]
    b_step = c.mul(_LDB, BYTES[STORAGE[spec.b]]) if direct else i64(columns.vectors * mode.lanes * mode.unit_bytes)
    k_tail = spec.k % mode.group if direct else 0
    steps, last = (block.whole, block.last) if direct else (block.steps, Val("i1", "false"))
    ahead = _rows_ahead(spec, plan)
    source = _next_panel(c, spec, plan, block, columns, first) if ahead else Val("ptr", "null")
    for rows in plan.rows:
        shape = PanelShape(
            rows.rows, columns.vectors, columns.tail, direct, k_tail, block.may_add, mode.flip and not direct,
            fetch=not direct and plan.kc >= _LONG_SUMS * mode.group, banks=spec.banks,
            terms=spec.terms,
        )  # fmt: skip
        if ahead and fetches_ahead(mode, shape):
            shape = dataclasses.replace(shape, ahead=(ahead, columns.width * BYTES[STORAGE[spec.b]]))
        name = panel_kernel(c.module, mode, shape)
        with c.loop(0, rows.count) as p:
            row = c.add(rows.start, c.mul(p, rows.rows))
            a, a_row, a_step = _a_access(c, plan, block, a_size, row, c.add(rows.panel, p))
            out = offset(c, _C, c.add(c.mul(row, _LDC), first), BYTES[mode.acc])
            ld = c.mul(_LDB, BYTES[STORAGE[spec.b]])
            asked = c.mul(c.add(rows.panel, p), ahead * _chunks(plan))  # by the row panels above
            fetched = c.gep("i8", source, c.mul(asked, ld)) if shape.ahead[0] else source
            call(c, name, a, a_row, a_step, b, b_step, out, _LDC, steps, block.add, sums, last, fetched, ld)


def _chunks(plan: Plan) -> int:
    """How often a micro-kernel asks for what comes next while it sums a k block."""
    return -(-plan.kc // ((STEPS if plan.mode.tiles else STEPS_AHEAD) * plan.mode.group))


def _rows_ahead(spec: GemmSpec, plan: Plan) -> int:
    """How many rows of the next panel of B a micro-kernel asks for at a time, so that all row panels together ask for
    all of them; 0: B is near or lies along k, or there is no next panel, or each would have to ask for too much."""
    panels = sum(rows.count for rows in plan.rows)
    near = spec.n * spec.k * BYTES[STORAGE[spec.b]] <= _FAR
    alone = plan.blocks * sum(columns.count for columns in plan.columns) == 1
    if plan.strategy != "packed" or spec.trans_b or near or alone:
        return 0
    each = -(-plan.kc // (panels * _chunks(plan)))
    return each if each <= _MOST_ASKED * plan.mode.group else 0


def _next_panel(c: Code, spec: GemmSpec, plan: Plan, block: _Block, columns: Columns, first: Val) -> Val:
    """Where the panel of B lies that is packed after this one; behind the last, the first one again."""
    column = c.add(first, columns.width)
    k1 = c.add(block.k0, plan.kc)
    ends = c.cmp("icmp", "sge", column, i64(spec.n))
    k1 = c.select(ends, c.select(c.cmp("icmp", "sge", k1, i64(spec.k)), i64(0), k1), block.k0)
    size = BYTES[STORAGE[spec.b]]
    row = c.gep("i8", _B, c.mul(c.mul(k1, _LDB), size))
    return offset(c, row, c.select(ends, i64(0), column), size)


def _row_panels_of_tiles(
    c: Code, spec: GemmSpec, plan: Plan, block: _Block, columns: Columns, first: Val, b: Val, _sums: Val
) -> None:
    """Run the micro-kernel on tiles over all row panels of one column panel."""
    mode = plan.mode
    b_step = i64(columns.vectors * mode.lanes * mode.unit_bytes)
    steps = c.binary("and", c.add(block.steps, STEPS - 1), i64(-STEPS))
    ahead = _rows_ahead(spec, plan)
    source = _next_panel(c, spec, plan, block, columns, first) if ahead else Val("ptr", "null")
    ld = c.mul(_LDB, BYTES[STORAGE[spec.b]])
    for rows in plan.rows:
        fetched = (ahead, columns.width * BYTES[STORAGE[spec.b]])
        shape = TileShape(rows.rows, columns.vectors, columns.tail, block.may_add, fetched if ahead else (0, 0))
        name = tile_kernel(c.module, mode, shape)
        configure(c, shape)
        with c.loop(0, rows.count) as p:
            row = c.add(rows.start, c.mul(p, rows.rows))
            a, a_row, _ = _a_access(c, plan, block, BYTES[STORAGE[spec.a]], row, c.add(rows.panel, p))
            out = offset(c, _C, c.add(c.mul(row, _LDC), first), BYTES[mode.acc])
            asked = c.mul(c.add(rows.panel, p), ahead * _chunks(plan))  # by the row panels above
            at = c.gep("i8", source, c.mul(asked, ld)) if ahead else source
            call(c, name, a, a_row, b, b_step, out, _LDC, steps, block.add, at, ld)


def _a_access(c: Code, plan: Plan, block: _Block, size: int, row: Val, panel: Val) -> tuple[Val, Val, Val]:
    """Pointer, row stride and step stride (bytes) of one row panel of A in its layout."""
    unit = plan.mode.unit_bytes
    if plan.a_layout == "raw":
        here, ld = offset(c, _A, c.add(c.mul(row, _LDA), block.k0), size), c.mul(_LDA, size)
        if plan.a_spread:
            crowded = _is_crowded(c, ld)
            here = c.select(crowded, offset(c, _WORK, row, plan.a_row_bytes), here)
            ld = c.select(crowded, i64(plan.a_row_bytes), ld)
        return here, ld, i64(unit)
    if plan.a_layout == "raw_lanes":
        return offset(c, _A, c.add(c.mul(block.k0, _LDA), row), size), i64(unit), c.mul(_LDA, size)
    if plan.a_layout == "rows":
        return offset(c, _WORK, row, plan.a_row_bytes), i64(plan.a_row_bytes), i64(unit)
    return offset(c, _WORK, panel, plan.a_width * plan.a_row_bytes), i64(unit), i64(plan.a_width * unit)


def _is_crowded(c: Code, ld: Val) -> Val:
    """Whether rows `ld` bytes apart all begin in the same set of the first-level cache, where there is no room for a
    row of each and the panel of B."""
    return c.cmp("icmp", "eq", c.binary("and", ld, i64(_PAGE - 1)), i64(0))


def _emit_dot(c: Code, spec: GemmSpec, plan: Plan) -> None:
    """The dot strategy: the thin side against groups of streamed rows."""
    mode = plan.mode
    thin, thin_ld, long, long_ld = (_B, _LDB, _A, _LDA) if plan.swap else (_A, _LDA, _B, _LDB)
    thin_size, long_size = BYTES[STORAGE[mode.a]], BYTES[STORAGE[mode.b]]
    x_ld = c.mul(thin_ld, thin_size)
    tail = spec.k % (mode.lanes * mode.group)
    with c.loop(0, spec.k, plan.kc) as k0:
        block = _k_block(c, spec, plan, k0)
        x, x_row = offset(c, thin, k0, thin_size), x_ld
        if plan.a_layout != "raw":
            packer = pack.rows_from_rows if plan.a_layout == "rows" else pack.rows_from_lanes
            source = x if plan.a_layout == "rows" else c.gep("i8", thin, c.mul(k0, x_ld))
            x, x_row = _WORK, i64(plan.a_row_bytes)
            count = sum(rows.count * rows.rows for rows in plan.rows)
            call(c, packer(c.module, mode, mode.a, spec.k), source, x_ld, x, x_row, i64(count), block.kc)
        for rows, columns in itertools.product(plan.rows, plan.columns):
            shape = DotShape(rows.rows, columns.width, tail, plan.a_layout != "raw", plan.swap, block.may_add)
            name = dot_kernel(c.module, mode, shape)
            with c.loop(0, rows.count) as i, c.loop(0, columns.count) as j:
                row = c.add(rows.start, c.mul(i, rows.rows))
                first = c.add(columns.start, c.mul(j, columns.width))
                y = offset(c, long, c.add(c.mul(first, long_ld), k0), long_size)
                at = c.add(c.mul(first, _LDC), row) if plan.swap else c.add(c.mul(row, _LDC), first)
                out, left = offset(c, _C, at, BYTES[mode.acc]), c.gep("i8", x, c.mul(row, x_row))
                call(c, name, left, x_row, y, c.mul(long_ld, long_size), out, _LDC, block.kc, block.add)
