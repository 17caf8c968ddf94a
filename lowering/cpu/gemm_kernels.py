"""Micro-kernels of the matmul: a block of C in registers, one k step after the other.

`panel_kernel` broadcasts A against vectors of B (from a packed panel, or straight from memory); `dot_kernel` runs
vectors along k for products that are thin in m or n, where B's rows lie along k and packing would cost more than it
saves.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

from .gemm_modes import BYTES, STORAGE, Mode
from .gemm_pack import lanes_step, rows_step
from .gemm_vector import ATTRIBUTES, fetch_rows, load_part, offset, prefetch, slice_lanes, store_part, sums, zeros
from .llvm import Code, Module, Val, i64, vec

STEPS_AHEAD = 32  # prefetches come one by one between so many steps: many at once keep loads from the caches waiting


@dataclasses.dataclass(frozen=True)
class PanelShape:
    """A block of C: `rows` by `vectors` vectors of which the last holds `tail` columns.

    `direct`: B is read from memory as [k][n] with `k_tail` elements in its last, partial group (0: none).
    `add`: the kernel can add to C, where its run-time flag says so. `with_sums`: B's packer left column sums.
    `fetch`: the first-level cache is asked for the block of C before the sums are made.
    `ahead`: rows of B, and bytes of each, that the second-level cache is asked for in every `STEPS_AHEAD` steps.
    `banks`: independent sets of accumulators; 0: so many that a small block has enough sums in flight.
    `terms`: steps after which the accumulators are added to those of C, and begin with zero again; 0: all of them.
    """

    rows: int
    vectors: int
    tail: int
    direct: bool = False
    k_tail: int = 0
    add: bool = False
    with_sums: bool = False
    fetch: bool = False
    ahead: tuple[int, int] = (0, 0)
    banks: int = 0
    terms: int = 0

    @property
    def accumulators(self) -> int:
        """Vectors of them."""
        return self.rows * self.vectors


def panel_kernel(module: Module, mode: Mode, shape: PanelShape) -> str:
    """`void(ptr a, i64 a_row, i64 a_step, ptr b, i64 b_step, ptr c, i64 ldc, i64 steps, i1 add, ptr sums, i1 last, ptr
    ahead, i64 ahead_row)`.

    Strides of A and B in bytes: `a_row` between rows, `a_step` between units of one row, `b_step` between packed steps
    or between source rows when direct. `ldc` in elements. `steps` counts whole groups; `last`: the partial group of a
    direct kernel follows. `ahead`: the first of the rows `shape.ahead`, and `ahead_row` the bytes between them.
    """
    s = shape
    name = (
        f"panel_{mode.tag}_{s.rows}x{s.vectors}_{s.tail}"
        + "_add" * s.add
        + "_s" * s.with_sums
        + f"_d{s.k_tail}" * s.direct
        + "_fetch" * s.fetch
        + (f"_ahead{s.ahead[0]}x{s.ahead[1]}" if s.ahead[0] else "")
        + f"_banks{s.banks}" * bool(s.banks)
        + f"_terms{s.terms}" * bool(s.terms)
    )
    if name in module.functions:
        return name
    params = [Val("ptr", "%a"), Val("i64", "%a_row"), Val("i64", "%a_step"), Val("ptr", "%b"), Val("i64", "%b_step"),
              Val("ptr", "%c"), Val("i64", "%ldc"), Val("i64", "%steps"), Val("i1", "%add"), Val("ptr", "%sums"),
              Val("i1", "%last"), Val("ptr", "%ahead"), Val("i64", "%ahead_row")]  # fmt: skip
    k = _Panel(Code(module, name, params, attributes=ATTRIBUTES), mode, s, params)
    if s.fetch:
        k.fetch_sums()
    if s.terms:
        k.sum_in_parts()
        _write_block(k.c, mode, dataclasses.replace(s, add=False), k.totals, k.out, k.ldc, k.add)
        k.c.finish()
        return name
    k.sum_over_k()
    _add_banks(k.c, mode, k.banks)
    k.correct_signs()
    _write_block(k.c, mode, s, k.banks[0], k.out, k.ldc, k.add)
    k.c.finish()
    return name


class _Panel:
    """One panel kernel under construction: its parameters, pointers and accumulators."""

    def __init__(self, c: Code, mode: Mode, s: PanelShape, params: list[Val]):
        self.c, self.mode, self.s = c, mode, s
        a, self.a_row, self.a_step, b, self.b_step, self.out, self.ldc, self.steps, self.add = params[:9]
        self.sums, self.last, ahead, self.ahead_row = params[9:]
        self.ty = vec(mode.lanes, mode.acc)
        self.banks = [
            [[self._accumulator() for _ in range(s.vectors)] for _ in range(s.rows)] for _ in range(bank_count(mode, s))
        ]
        self.checks = [self._accumulator() for _ in range(s.vectors)] if mode.flip and s.direct else []
        self.a_slot, self.b_slot, self.ahead = c.var("ptr", a), c.var("ptr", b), c.var("ptr", ahead)
        self.b_advance = c.mul(self.b_step, mode.group if s.direct else 1)

    @functools.cached_property
    def totals(self) -> list[list[Val]]:
        """The block of C, as the kernel finds it if it adds to it, else of zeros."""
        c, s, size = self.c, self.s, BYTES[self.mode.acc]
        totals = [[self._accumulator() for _ in range(s.vectors)] for _ in range(s.rows)]
        if s.add:
            with c.when(self.add):
                for r, row in enumerate(totals):
                    for v, slot in enumerate(row):
                        ptr = offset(c, self.out, c.add(c.mul(self.ldc, r), v * self.mode.lanes), size)
                        count = s.tail if v == s.vectors - 1 else self.mode.lanes
                        c.store(load_part(c, self.mode.isa, self.mode.acc, ptr, self.mode.lanes, count), slot)
        return totals

    def sum_in_parts(self) -> None:
        """Add the sums of every `terms` steps to the block of C."""
        c, count, terms = self.c, len(self.banks), self.s.terms
        totals, plus = self.totals, _plus(self.mode)
        with c.loop(0, self.steps, terms):
            for slot in itertools.chain.from_iterable(itertools.chain.from_iterable(self.banks)):
                c.store(zeros(self.ty), slot)
            for k in range(terms):  # as `sum_over_k` does
                self.step(self.banks[k % count if k < terms // count * count else 0], self.mode.group)
            _add_banks(c, self.mode, self.banks)
            for row, sums in zip(totals, self.banks[0], strict=True):
                for total, part in zip(row, sums, strict=True):
                    c.store(c.binary(plus, c.load(self.ty, total), c.load(self.ty, part)), total)

    def _accumulator(self) -> Val:
        return self.c.var(self.ty, zeros(self.ty))

    def left(self, a: Val, r: int) -> Val:
        """The unit of row r, in every lane."""
        unit = self.c.load(
            self.mode.unit, self.c.gep("i8", a, self.c.mul(self.a_row, r)), align=BYTES[self.mode.packed]
        )
        return self.c.splat(unit, self.mode.lanes)

    def right(self, b: Val, v: int, group: int) -> Val:
        """Vector v of B; its column sums are kept where the signs need a correction."""
        y = _b_vector(self.c, self.mode, self.s, b, self.b_step, v, group)
        if self.checks:
            self.c.store(self.mode.column_sum(self.c, self.c.load(self.ty, self.checks[v]), y), self.checks[v])
        return y

    def step(self, block: list[list[Val]], group: int) -> None:
        """One unit of k for the whole block; the shorter side stays in registers while the longer one passes."""
        c, s = self.c, self.s
        a, b = c.load("ptr", self.a_slot), c.load("ptr", self.b_slot)

        def mac(r: int, v: int, x: Val, y: Val) -> None:
            c.store(self.mode.mac(c, c.load(self.ty, block[r][v]), x, y), block[r][v])

        if s.rows >= s.vectors:
            vectors = [self.right(b, v, group) for v in range(s.vectors)]
            for r in range(s.rows):
                x = self.left(a, r)
                for v, y in enumerate(vectors):
                    mac(r, v, x, y)
        else:
            rows = [self.left(a, r) for r in range(s.rows)]
            for v in range(s.vectors):
                y = self.right(b, v, group)
                for r, x in enumerate(rows):
                    mac(r, v, x, y)
        c.store(c.gep("i8", a, self.a_step), self.a_slot)
        c.store(c.gep("i8", b, self.b_advance), self.b_slot)

    def fetch_sums(self) -> None:
        """Ask the first-level cache for the block of C, which is loaded or written when the sums are made."""
        size = BYTES[self.mode.acc]
        for r in range(self.s.rows):
            line = offset(self.c, self.out, self.c.mul(self.ldc, r), size)
            for v in range(self.s.vectors):
                prefetch(self.c, offset(self.c, line, v * self.mode.lanes, size), 1)

    def fetch_ahead(self) -> None:
        """Ask the second-level cache for what is packed next."""
        behind = fetch_rows(self.c, self.c.load("ptr", self.ahead), self.ahead_row, self.s.ahead)
        self.c.store(behind, self.ahead)

    def sum_over_k(self) -> None:
        c, count = self.c, len(self.banks)
        if self.s.ahead[0]:
            with c.loop(0, self.steps, STEPS_AHEAD) as at:
                self.fetch_ahead()
                with c.loop(0, c.intrinsic("smin", "i64", c.sub(self.steps, at), i64(STEPS_AHEAD))):
                    self.step(self.banks[0], self.mode.group)
            return
        whole = c.binary("and", self.steps, i64(-count)) if count > 1 else self.steps
        with c.loop(0, whole, count):
            for block in self.banks:
                self.step(block, self.mode.group)
        if count > 1:
            with c.loop(whole, self.steps):
                self.step(self.banks[0], self.mode.group)
        if self.s.direct and self.s.k_tail:
            with c.when(self.last):
                self.step(self.banks[0], self.s.k_tail)

    def correct_signs(self) -> None:
        """Take out what the flipped sign bits of A added (column sums of B, counted here or by the packer)."""
        c, lanes = self.c, self.mode.lanes
        if self.s.with_sums:
            totals = [c.load(self.ty, offset(c, self.sums, v * lanes, 4), align=4) for v in range(self.s.vectors)]
        else:
            totals = [c.load(self.ty, slot) for slot in self.checks]
        for v, total in enumerate(totals):
            for row in self.banks[0]:
                c.store(self.mode.corrected(c, c.load(self.ty, row[v]), total), row[v])


def bank_count(mode: Mode, s: PanelShape) -> int:
    """Independent sets of accumulators, so that a small block still has enough sums in flight."""
    if s.banks:
        return s.banks
    enough = 12 if mode.isa.registers == 32 else 8
    return next(n for n in (1, 2, 4) if n == 4 or n * s.accumulators >= enough)


def fetches_ahead(mode: Mode, shape: PanelShape) -> bool:
    """Whether the kernel of such a block can ask for rows ahead: one set of accumulators takes every step."""
    return not shape.direct and bank_count(mode, shape) == 1


def _add_banks(c: Code, mode: Mode, banks: list[list[list[Val]]]) -> None:
    """Leave the sum of all banks in the first."""
    ty, plus = vec(mode.lanes, mode.acc), _plus(mode)
    for bank in banks[1:]:
        for row, other in zip(banks[0], bank, strict=True):
            for slot, more in zip(row, other, strict=True):
                c.store(c.binary(plus, c.load(ty, slot), c.load(ty, more)), slot)


def _plus(mode: Mode) -> str:
    return "fadd" if mode.acc in ("float", "double") else "add"


def _b_vector(c: Code, mode: Mode, s: PanelShape, b: Val, b_step: Val, v: int, group: int) -> Val:
    """Vector `v` of B at the current step."""
    count = s.tail if v == s.vectors - 1 else mode.lanes
    if s.direct:
        size = BYTES[STORAGE[mode.b]]
        return lanes_step(c, mode, mode.b, offset(c, b, v * mode.lanes, size), b_step, group, mode.lanes, count)
    ty = vec(mode.lanes, mode.unit)
    return c.load(ty, offset(c, b, v * mode.lanes, mode.unit_bytes), align=mode.lanes * mode.unit_bytes)


def _write_block(c: Code, mode: Mode, s: PanelShape, block: list[list[Val]], out: Val, ldc: Val, add: Val) -> None:
    """Store the accumulators to C, or add them to it."""
    ty, size = vec(mode.lanes, mode.acc), BYTES[mode.acc]
    plus = _plus(mode)

    def each(action) -> None:
        for r, row in enumerate(block):
            line = offset(c, out, c.mul(ldc, r), size)
            for v, slot in enumerate(row):
                action(slot, offset(c, line, v * mode.lanes, size), s.tail if v == s.vectors - 1 else mode.lanes)

    def accumulate(slot: Val, ptr: Val, count: int) -> None:
        old = load_part(c, mode.isa, mode.acc, ptr, mode.lanes, count)
        c.store(c.binary(plus, old, c.load(ty, slot)), slot)

    if s.add:
        with c.when(add):
            each(accumulate)
    each(lambda slot, ptr, count: store_part(c, mode.isa, c.load(ty, slot), ptr, count))


@dataclasses.dataclass(frozen=True)
class DotShape:
    """`rows` thin rows against `cols` streamed rows, both along k; `tail` elements after the last whole vector.

    `x_packed`: the thin side is packed rows (zero padded), else raw storage. `transposed`: C is written as C[col][row].
    """

    rows: int
    cols: int
    tail: int
    x_packed: bool
    transposed: bool
    add: bool = False


def dot_kernel(module: Module, mode: Mode, shape: DotShape) -> str:
    """`void(ptr x, i64 x_row, ptr y, i64 y_row, ptr c, i64 ldc, i64 kc, i1 add)`.

    Row strides in bytes, ldc in elements. The thin side x is operand A of `mode`, the streamed side y operand B. `kc`
    is a whole number of vectors, or that plus `tail`.
    """
    s = shape
    name = f"dot_{mode.tag}_{s.rows}x{s.cols}_{s.tail}" + "_add" * s.add + "_p" * s.x_packed + "_t" * s.transposed
    if name in module.functions:
        return name
    params = [Val("ptr", "%x"), Val("i64", "%x_row"), Val("ptr", "%y"), Val("i64", "%y_row"), Val("ptr", "%c"),
              Val("i64", "%ldc"), Val("i64", "%kc"), Val("i1", "%add")]  # fmt: skip
    c = Code(module, name, params, attributes=ATTRIBUTES)
    x, x_row, y, y_row, out, ldc, kc, add = params
    ty, block = vec(mode.lanes, mode.acc), mode.lanes * mode.group
    grid = [[c.var(ty, zeros(ty)) for _ in range(s.cols)] for _ in range(s.rows)]
    checks = [c.var(ty, zeros(ty)) for _ in range(s.cols)] if mode.flip else []
    x_size = BYTES[mode.packed if s.x_packed else STORAGE[mode.a]]

    def step(k0: Val, valid: int) -> None:
        left = []
        for r in range(s.rows):
            ptr = c.gep("i8", offset(c, x, k0, x_size), c.mul(x_row, r))
            left.append(_packed_row(c, mode, ptr) if s.x_packed else rows_step(c, mode, mode.a, ptr, valid))
        for j in range(s.cols):
            ptr = c.gep("i8", offset(c, y, k0, BYTES[STORAGE[mode.b]]), c.mul(y_row, j))
            right = rows_step(c, mode, mode.b, ptr, valid)
            if checks:
                c.store(mode.column_sum(c, c.load(ty, checks[j]), right), checks[j])
            for r in range(s.rows):
                c.store(mode.mac(c, c.load(ty, grid[r][j]), left[r], right), grid[r][j])

    whole = c.binary("and", kc, i64(-block)) if s.tail else kc
    with c.loop(0, whole, block) as k0:
        step(k0, block)
    if s.tail:
        with c.when(c.cmp("icmp", "ne", whole, kc)):
            step(whole, s.tail)
    for j, slot in enumerate(checks):
        for r in range(s.rows):
            c.store(mode.corrected(c, c.load(ty, grid[r][j]), c.load(ty, slot)), grid[r][j])
    _write_dots(c, mode, s, grid, out, ldc, add)
    c.finish()
    return name


def _packed_row(c: Code, mode: Mode, ptr: Val) -> Val:
    return c.load(vec(mode.lanes, mode.unit), ptr, align=mode.lanes * mode.unit_bytes)


def _write_dots(c: Code, mode: Mode, s: DotShape, grid: list[list[Val]], out: Val, ldc: Val, add: Val) -> None:
    """Sum every accumulator over its lanes, and write (or add) the results to C, a vector of its columns at a time."""
    ty, size = vec(mode.lanes, mode.acc), BYTES[mode.acc]
    lines = [[c.load(ty, slot) for slot in row] for row in grid]
    if s.transposed:
        lines = [list(column) for column in zip(*lines, strict=True)]
    for at in range(0, len(lines[0]), mode.lanes):
        part = [line[at : at + mode.lanes] for line in lines]
        _write_sums(c, mode, s, part, offset(c, out, at, size), ldc, add)


def _write_sums(c: Code, mode: Mode, s: DotShape, lines: list[list[Val]], out: Val, ldc: Val, add: Val) -> None:
    """Lines of C of at most one vector, many at a time."""
    ty, size = vec(mode.lanes, mode.acc), BYTES[mode.acc]
    count = len(lines[0])
    width = 1 << (count - 1).bit_length()
    at_once = max(1, min(mode.lanes // width, 1 << (len(lines) - 1).bit_length()))
    for first in range(0, len(lines), at_once):
        part = lines[first : first + at_once]
        vectors = [x for line in part for x in (*line, *[zeros(ty)] * (width - count))]
        vectors += [zeros(ty)] * (at_once * width - len(vectors))
        total = sums(c, vectors)
        for i in range(len(part)):
            ptr = offset(c, out, c.mul(ldc, first + i), size)
            value = slice_lanes(c, total, i * width, width)
            slot = c.var(value.ty, value)
            if s.add:
                with c.when(add):
                    old = load_part(c, mode.isa, mode.acc, ptr, width, count)
                    c.store(c.binary(_plus(mode), old, value), slot)
            store_part(c, mode.isa, c.load(value.ty, slot), ptr, count)
