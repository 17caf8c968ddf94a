"""The execution graph on NVIDIA's GPUs: one persistent launch, whose blocks run the bands of a graph in lists.

Kernels that are tasks become branches of one function. Each block has a list of bands in an array of the call, the
*plan*, and goes through it: it waits until the bands that a band needs are over, runs the band's programs, and counts
the band as over. Where arrays lie is a table that each block writes before it begins, since parameters of a launch
cannot be numbered when the kernel runs.

The plan is int32 words (`ROW` names those of a band; `jtile/execution/persistent.py` writes them):

    0   where the places of inner memories begin, and how many there are; where the copies into pages begin; where
        entries for arrays of other devices begin, and how many there are (`task_devices.py`)
    16  for each block where its bands begin among the rows; one number more for the end of the last
    ..  rows: a band each, in the order of the blocks and of their lists; one row more, which nobody runs
    ..  numbers of further events that a band counts in; places of inner memories, in units of 16 bytes
    ..  for each block where its copies begin, in rows, one number more for the end of the last; a row of four words a
        copy: array, place in units of 16 bytes, bytes and place in the pages, copies to start (`task_pages.py`)

The call's memory on the device is a block as `emit_devices.py` describes it; behind its table are

    i32 epochs    for each block the launches in which it has ended: the number of the launch at hand
    i32 events    for each set of bands that a band waits for, how many of them are over, in all launches together
    i32 arrivals  counters of `jt.arrive`, for each task its own
    i32 meetings  for each set of bands that a band waits for on all devices, and each device, likewise
    memory        two sets of what other devices read

Event counters are never cleared: a launch waits until a counter has come to its number times the size of the set. So a
launch needs nothing of the host, and a command buffer can hold it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from jtile import ir

from .emit_basics import start_program
from .emit_devices import CLAIMED, EXIT, FAULT, FENCE, REPORT, TIMEOUT, WAIT
from .emitter import Buffer, Emitter, memory_elem
from .features import Features
from .record import Record
from .task_devices import FAR, UNIT, Far, Others, layout
from .task_pages import BEGIN, HERE, ROWS, START, Pages, act, loads, paged, put
from .task_pages import ROW as ROW_WORDS
from .ttir import Code, Val

STARTS = 16  # words in front of the numbers where the bands of the blocks begin
ROW = (
    "kernel", "begin", "end", "event", "count", "signal", "signal 1", "signal 2", "more", "signals", "arrivals", "band",
    "from", "bytes", "from 1", "bytes 1", "array", "array 1",
)  # fmt: skip
WORDS = ROW.index("array")  # behind these all words are numbers of arrays
SIGNALS = ("signal", "signal 1", "signal 2")  # events that a band counts in, without a further look at the plan
ENTRIES = 512  # arrays in the table, at most
AHEAD = (("array", "from", "bytes"), ("array 1", "from 1", "bytes 1"))  # parts of arrays that the next band reads

# One thread says that a band is over: what all threads have stored comes before.
_SIGNAL = (
    "{{ .reg .pred %jp; .reg .b32 %jx; mov.u32 %jx, %tid.x; setp.eq.u32 %jp, %jx, 0; "
    "{fence}@%jp red.relaxed.gpu.global.add.u32 [$1], 1; mov.b32 $0, 0; }}"
)
SIGNAL, AGAIN = _SIGNAL.format(fence="@%jp fence.acq_rel.gpu; "), _SIGNAL.format(fence="")
POLL = WAIT.replace("ld.acquire.sys", "ld.acquire.gpu")
# A parameter of the launch, by its number among those of 8 bytes.
PARAMETER = (
    "{{ .reg .b64 %ja, %jb; mov.b64 %ja, {name}_param_0; cvta.param.u64 %ja, %ja; mul.wide.u32 %jb, $1, 8; "
    "add.u64 %ja, %ja, %jb; ld.b64 $0, [%ja]; }}"
)
CLOCK = "mov.u64 $0, %globaltimer;"
# One thread asks for bytes to be brought into the second-level cache.
FETCH = (
    "{ .reg .pred %jp; .reg .b32 %jx; mov.u32 %jx, %tid.x; setp.eq.u32 %jp, %jx, 0; "
    "@%jp cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }"
)


def row_words(far: bool) -> tuple[str, ...]:
    """The words of a band in front of the numbers of its arrays; `far`: of a graph of several devices."""
    return (*ROW[:WORDS], *FAR, *ROW[WORDS:]) if far else ROW


@dataclasses.dataclass(frozen=True)
class Shape:
    """What the code of a graph depends on, besides its kernels.

    Attributes:
      arrays: (operands, results) of the call, without the plan (the last operand), the inner memory and the trace (the
        last results).
      blocks: of the launch.
      traced: there is a trace, three int64 for each band: start, end (nanoseconds) and block.
      events, arrivals: counters of each kind.
      name: of the function.
      fixed: for each kernel, by number, the inputs that no band in front of its bands writes: these load them before
        they wait.
      pages: shared memory through which tiles of such inputs come; None: none does.
      far: how it talks to other devices; None: it does not.
    """

    arrays: tuple[int, int]
    blocks: int
    traced: bool
    events: int
    arrivals: int
    name: str
    fixed: tuple[tuple[int, ...], ...] = ()
    pages: Pages | None = None
    far: Far | None = None


class Tasks:
    """Emits the function of a graph."""

    def __init__(
        self, kernels: Sequence[ir.Kernel], shape: Shape, f: Features, stages: Sequence[int | None], *,
        isolate: bool = False,
    ):  # fmt: skip
        self.kernels, self.shape, self.stages = kernels, shape, stages
        self.features = dataclasses.replace(f, tma=False, dependents=False)
        self.fetches = f.tma
        self.record = Record(grid=shape.blocks)
        self.row, self.layout = row_words(shape.far is not None), layout(shape)
        self.width = len(self.row) + max(len(k.inputs) + len(k.outputs) for k in kernels)
        self.em = self._emitter(kernels[0], None, Code(isolate=isolate))
        self.code = self.em.code
        self.others = Others(self, shape.far) if shape.far else None

    def _emitter(self, kernel: ir.Kernel, stages: int | None, code: Code) -> Emitter:
        em = Emitter(kernel, self.features, self.record, num_stages=stages)
        em.code, em.around = code, True
        return em

    def emit(self) -> tuple[str, Record]:
        em, code = self.em, self.code
        operands, results = self.shape.arrays
        aligned = lambda k, elem: em.pointer_param(k, elem)
        arrays = [*range(operands), *range(operands + 1, operands + 1 + results)]
        found = [aligned(k, "i8") for k in arrays]
        self.plan = aligned(operands, "i32")
        self.base = aligned(operands + 1 + results, "i8")
        self.trace = aligned(operands + 2 + results, "i64") if self.shape.traced else None
        self.own = em.param({"kind": "devices"}, "!tt.ptr<i8>", " {tt.divisibility = 16 : i32}")
        self.block = code.let("tt.get_program_id x : i32", (), "i32")
        self._begin(found)
        if self.shape.pages:
            self._begin_pages(self.shape.pages)
        self._bands()
        self._end()
        code.do("tt.return")
        params = ", ".join(f"{p.name}: {p.elem}{more}" for p, more in em.params)
        name = self.shape.name
        text = f"module {{\n  tt.func public @{name}({params}) {{\n{code.text()}\n  }}\n}}\n"
        self.record.devices = self._facts()
        return text, self.record

    # -- the beginning and the end ------------------------------------------------------------------------------------

    def _begin(self, found: Sequence[Val]) -> None:
        code = self.code
        fault = self.word(self.at(FAULT))
        self.epoch_at = self.moved(self.at(self.layout.epochs), self.block)
        self.epoch = self.word(self.epoch_at)
        self.timeout = code.let(f"tt.load {self.at(TIMEOUT, 'i64').name} : !tt.ptr<i64>", (), "i64")
        with self.branch(code.cmp("ne", fault, code.i32(0))):
            self.instruction(EXIT)
        table = code.bitcast(self.base, "!tt.ptr<i64>")
        start = self.address(self.base)
        self._arrays(table, start, found)
        inner = self._inner_places(table, len(found))
        if self.others:
            self.others.begin(table, start, inner)
        self.em.barrier()
        self.table, self.start = table, start

    def _begin_pages(self, pages: Pages) -> None:
        """Write the table of the block's copies, and start the first of them."""
        code, em = self.code, self.em
        base = self.pages = act(em, HERE, "=l,r", (code.i32(pages.bytes),), "i64")
        act(em, BEGIN, "=r,l,~{memory}", (base,))
        starts = self.moved(self.plan, self.word(self.moved(self.plan, code.i32(2))))
        first, end = (self.word(self.moved(starts, code.shift(self.block, k))) for k in range(2))
        count = em.kept(code.sub(end, first))
        lanes = code.arange(ROWS)
        k = Val(code.name(), (), "i32")
        code.do(f"scf.for {k.name} = {code.i32(0).name} to {count.name} step {code.i32(ROWS).name} : i32 {{")
        with code.region():
            own = code.add(lanes, code.splat(k, (ROWS,)))
            inside = code.cmp("slt", own, code.splat(count, (ROWS,)))
            at = code.add(code.splat(first, (ROWS,)), own)
            words = [self.some(self.plan, code.shift(code.scale(at, ROW_WORDS), j), inside) for j in range(ROW_WORDS)]
            far = code.add(self.some(self.table, words[0], inside), code.to_int(words[1], "i64"))
            address = code.add(code.scale(far, UNIT), code.splat(self.start, (ROWS,)))
            put(em, base, own, (address, *words[2:]))
        code.do("} {tt.num_stages = 1 : i32}")
        em.barrier()
        act(em, START, "=r,l,r,~{memory}", (base, code.i32(0)))

    def some(self, pointer: Val, at: Val, inside: Val) -> Val:
        """Elements of an array; zero where `inside` is false."""
        where, elem = self.vector(pointer, at), pointer.elem.removeprefix("!tt.ptr<").removesuffix(">")
        zero = self.code.const(0, elem, at.shape)
        return self.code.let(f"tt.load {where.name}, {inside.name}, {zero.name} : {where.type}", at.shape, elem)

    def _arrays(self, table: Val, start: Val, found: Sequence[Val]) -> None:
        """Write the places of the arrays of the call, which are its first parameters, side by side: one after another
        they would be read from the constant cache, a miss for every eight."""
        code = self.code
        lanes = code.arange(ENTRIES)
        most = code.const(len(found) - 1, "i32", (ENTRIES,))
        k = code.op("arith.minsi", lanes, most)
        text = PARAMETER.format(name=self.shape.name)
        attributes = 'constraints = "=l,r", packed_element = 1 : i32, pure = false'
        kind = f"{k.name} : {k.type} -> {code.spell((ENTRIES,), 'i64')}"
        at = code.let(f'tt.elementwise_inline_asm "{text}" {{{attributes}}} {kind}', (ENTRIES,), "i64")
        far = code.sub(at, code.splat(start, (ENTRIES,)))
        far = code.op("arith.divsi", far, code.const(UNIT, "i64", (ENTRIES,)))
        to = self.vector(table, lanes)
        inside = code.cmp("sle", lanes, most)
        code.do(f"tt.store {to.name}, {far.name}, {inside.name} : {to.type}")

    def _inner_places(self, table: Val, first: int) -> Val:
        """Write the places of inner memories behind those of the arrays of the call; gives the number of the entry
        behind them."""
        code = self.code
        at, count = (self.word(self.moved(self.plan, code.i32(k))) for k in range(2))
        lanes = code.arange(ENTRIES)
        inside = code.cmp("slt", lanes, code.splat(count, (ENTRIES,)))
        where = self.vector(self.moved(self.plan, at), lanes)
        zero = code.const(0, "i32", (ENTRIES,))
        found = code.let(f"tt.load {where.name}, {inside.name}, {zero.name} : {where.type}", (ENTRIES,), "i32")
        to = self.vector(self.moved(table, code.i32(first)), lanes)
        code.do(f"tt.store {to.name}, {code.to_int(found, 'i64').name}, {inside.name} : {to.type}")
        return code.shift(count, first)

    def vector(self, pointer: Val, lanes: Val) -> Val:
        many = self.code.splat(pointer, lanes.shape)
        right = f"tt.addptr {many.name}, {lanes.name} : {many.type}, {lanes.type}"
        return self.code.let(right, lanes.shape, pointer.elem)

    def _end(self) -> None:
        self.em.barrier()
        epoch = self.code.shift(self.epoch, 1)
        self.code.do(f"tt.store {self.epoch_at.name}, {epoch.name} : !tt.ptr<i32>")

    # -- bands --------------------------------------------------------------------------------------------------------

    def _bands(self) -> None:
        code = self.code
        starts = self.moved(self.plan, code.i32(STARTS))
        first, last = (self.word(self.moved(starts, code.shift(self.block, k))) for k in range(2))
        words = self._row(first)
        near = self.row.index("array")  # behind it all words are numbers of arrays
        carried = [*words[:near], *map(self._place, words[near:])]
        number = Val(code.name(), (), "i32")
        params = [Val(code.name(), (), w.elem) for w in carried]
        carry = ", ".join(f"{p.name} = {w.name}" for p, w in zip(params, carried, strict=True))
        kinds = ", ".join(w.elem for w in carried)
        head = f"scf.for {number.name} = {first.name} to {last.name} step {code.i32(1).name} iter_args({carry})"
        code.let_many(f"{head} -> ({kinds}) : i32 {{", [((), w.elem) for w in carried])
        with code.region():
            row, arrays = dict(zip(self.row, params)), params[len(self.row) :]
            bounds = ("end", "more", *(["more meetings"] if self.others else []))
            row |= {word: self.em.kept(row[word]) for word in bounds}  # of loops
            later = self._row(code.shift(number, 1))  # it comes while the band waits and runs
            self._switch(range(len(self.kernels)), row, [code.scale(a, UNIT) for a in arrays])
            later = [*later[:near], *map(self._place, later[near:])]
            self._over(row)
            code.do(f"scf.yield {', '.join(w.name for w in later)} : {kinds}")
        code.do("} {tt.num_stages = 1 : i32}")

    def _row(self, number: Val) -> list[Val]:
        """The words of a band."""
        code = self.code
        rows = STARTS + self.shape.blocks + 1
        at = self.moved(self.plan, code.shift(code.scale(number, self.width), rows))
        return [self.word(self.moved(at, code.i32(k))) for k in range(self.width)]

    def _over(self, row: dict[str, Val]) -> None:
        """Count a band as over."""
        code = self.code
        self.em.barrier()
        for word in SIGNALS:
            self._signal(row[word], SIGNAL if word == SIGNALS[0] else AGAIN)
        k = Val(code.name(), (), "i32")
        code.do(f"scf.for {k.name} = {code.i32(0).name} to {row['more'].name} step {code.i32(1).name} : i32 {{")
        with code.region():
            self._signal(self.word(self.moved(self.plan, code.add(row["signals"], k))), AGAIN)
        code.do("} {tt.num_stages = 1 : i32}")
        if self.others:
            self.others.tell(row)
        if self.trace:
            self._tell_time(row["band"], 1)
            place = self.moved(self.moved(self.trace, code.scale(row["band"], 3)), code.i32(2))
            code.do(f"tt.store {place.name}, {code.to_int(self.block, 'i64').name} : {place.elem}")

    def _place(self, number: Val) -> Val:
        """How far an array is from the inner memory, in units of `UNIT` bytes."""
        entry = self.moved(self.table, number)
        return self.code.let(f"tt.load {entry.name} : {entry.elem}", (), "i64")

    def _switch(self, numbers: Sequence[int], row: dict[str, Val], arrays: Sequence[Val]) -> None:
        """Run the band by its kernel, which is one of some: half of them are asked for at a time."""
        code = self.code
        if len(numbers) == 1:
            self._programs(numbers[0], row, arrays)
            return
        half = len(numbers) // 2
        code.do(f"scf.if {code.cmp('slt', row['kernel'], code.i32(numbers[half])).name} {{")
        with code.region():
            self._switch(numbers[:half], row, arrays)
        code.do("} else {")
        with code.region():
            self._switch(numbers[half:], row, arrays)
        code.do("}")

    def _programs(self, number: int, row: dict[str, Val], arrays: Sequence[Val]) -> None:
        """Run the programs of a band one after another. The first of them waits, behind the loads that need not."""
        code, kernel = self.code, self.kernels[number]
        em = self._emitter(kernel, self.stages[number], code)
        fixed = self.shape.fixed[number] if self.shape.fixed else ()
        if self.shape.pages:
            em.paged = {part.op: (part, self.pages, self.base) for part in loads(paged(kernel, fixed))}
        for k, (r, far) in enumerate(zip([*kernel.inputs, *kernel.outputs], arrays, strict=False)):
            pointer = self.moved(self.base, far)
            pointer = code.bitcast(pointer, f"!tt.ptr<{memory_elem(r.dtype)}>")
            strides = tuple(math.prod(r.shape[j + 1 :]) for j in range(len(r.shape)))
            em.refs[r] = Buffer(pointer, tuple(r.shape), strides, r.dtype, k)
        if ir.counters_of(kernel):
            em.counters = self.moved(self.at(self.layout.arrivals), row["arrivals"])
        p = Val(code.name(), (), "i32")
        code.do(f"scf.for {p.name} = {row['begin'].name} to {row['end'].name} step {code.i32(1).name} : i32 {{")
        with code.region():
            start_program(em, p, plain=True)  # bands are cut in this order
            early = _early(kernel, fixed, em.paged)
            for op in early:
                em.op(op)
            with self.branch(code.cmp("eq", p, row["begin"])):
                for part in AHEAD if self.fetches else ():
                    self._fetch(*(row[word] for word in part))
                self._wait(row, number)
            for op in kernel.body.ops:
                if op not in early:
                    em.op(op)
        code.do("} {tt.num_stages = 1 : i32}")

    def _fetch(self, place: Val, first: Val, size: Val) -> None:
        """Bring a part of an array that the next band reads into the second-level cache. `place` and `first` are in
        units of `UNIT` bytes; of no bytes there is nothing to do."""
        code = self.code
        with self.branch(code.cmp("sgt", size, code.i32(0))):
            far = code.scale(code.add(place, code.to_int(first, "i64")), UNIT)
            self.instruction(FETCH, "=r,l,r,~{memory}", (self.address(self.moved(self.base, far)), size))

    # -- waiting ------------------------------------------------------------------------------------------------------

    def _event(self, number: Val) -> Val:
        return self.moved(self.at(self.layout.events), number)

    def _signal(self, event: Val, text: str) -> None:
        with self.branch(self.code.cmp("sge", event, self.code.i32(0))):
            self.instruction(text, "=r,l,~{memory}", (self.address(self._event(event)),))

    def _wait(self, row: dict[str, Val], number: int) -> None:
        """Wait until all bands of a set are over in this launch."""
        code, event, count = self.code, row["event"], row["count"]
        with self.branch(code.cmp("sge", event, code.i32(0))):
            counter = self._event(event)
            before = code.mul(self.epoch, count)
            args = (self.address(counter), code.add(before, count), self.address(self.at(FAULT)), self.timeout)
            status = self.instruction(POLL, "=r,l,r,l,l,~{memory}", args)
            with self.branch(code.cmp("ne", status, code.i32(0))):
                with self.branch(code.cmp("eq", status, code.i32(1))):
                    stands = code.sub(self.atomic("add", counter, code.i32(0)), before)
                    self.report(event, count, stands, number)
                self.exit()
        if self.others:
            self.others.wait(row, number)
        if self.trace:
            self._tell_time(row["band"], 0)

    def report(self, event: Val, count: Val, stands: Val, number: int) -> None:
        """Report that an event did not come, unless another block has done so, and let all blocks end."""
        code = self.code
        self.em.barrier()
        claimed = self.atomic("exch", self.at(CLAIMED), code.i32(1))
        with self.branch(code.cmp("eq", claimed, code.i32(0))):
            report = code.let(f"tt.load {self.at(REPORT, 'i64').name} : !tt.ptr<i64>", (), "i64")
            for k, word in enumerate([code.i32(number), self.block, event, count, stands], 1):
                self._tell(report, k, word)
            self.instruction(FENCE)
            self._tell(report, 0, code.i32(1))
        if self.others:
            self.others.fail()
        else:
            self.atomic("or", self.at(FAULT), code.i32(1))

    def _tell(self, report: Val, k: int, word: Val) -> None:
        where = self.code.cast("tt.int_to_ptr", self.code.shift(report, 4 * k), "!tt.ptr<i32>")
        self.code.do(f"tt.store {where.name}, {word.name} : !tt.ptr<i32>")

    def _tell_time(self, band: Val, word: int) -> None:
        """Write the time into a row of the trace: 0 its start, 1 its end."""
        assert self.trace is not None
        now = self.instruction(CLOCK, "=l", elem="i64")
        where = self.moved(self.moved(self.trace, self.code.scale(band, 3)), self.code.i32(word))
        self.code.do(f"tt.store {where.name}, {now.name} : {where.elem}")

    # -- instructions -------------------------------------------------------------------------------------------------

    def at(self, offset: int, elem: str = "i32") -> Val:
        """A pointer into the block of the device."""
        return self.code.bitcast(self.moved(self.own, self.code.const(offset, "i64")), f"!tt.ptr<{elem}>")

    def moved(self, pointer: Val, by: Val) -> Val:
        """A pointer some elements further."""
        right = f"tt.addptr {pointer.name}, {by.name} : {pointer.elem}, {by.elem}"
        return self.code.let(right, (), pointer.elem)

    def word(self, pointer: Val) -> Val:
        return self.code.let(f"tt.load {pointer.name} : {pointer.elem}", (), "i32")

    def address(self, pointer: Val) -> Val:
        return self.code.cast("tt.ptr_to_int", pointer, "i64")

    def exit(self) -> None:
        self.instruction(EXIT)

    def atomic(self, fn: str, pointer: Val, value: Val, scope: str = "gpu") -> Val:
        names = ", ".join(v.name for v in (pointer, value, self.code.const(True, "i1")))
        kinds = f"({pointer.elem}, i32, i1) -> i32"
        return self.code.let(f"tt.atomic_rmw {fn}, relaxed, {scope}, {names} : {kinds}", (), "i32")

    def instruction(self, text: str, constraints: str = "=r", args: Sequence[Val] = (), elem: str = "i32") -> Val:
        attributes = f'constraints = "{constraints}", packed_element = 1 : i32, pure = false'
        kinds = f" {', '.join(a.name for a in args)} : {', '.join(a.elem for a in args)}" if args else ""
        return self.code.let(f'tt.elementwise_inline_asm "{text}" {{{attributes}}}{kinds} -> {elem}', (), elem)

    @contextlib.contextmanager
    def branch(self, cond: Val) -> Iterator[None]:
        self.code.do(f"scf.if {cond.name} {{")
        with self.code.region():
            yield
        self.code.do("}")

    def _facts(self) -> dict[str, Any]:
        """The entry `devices` of the launch record."""
        shape, at = self.shape, self.layout
        site = {"kind": "assert", "message": "graph", "args": [], "axes": 3, "lanes": 0}
        sites = [site | {"where": f"task {k.name} ({k.loc})" if k.loc.file else f"task {k.name}"} for k in self.kernels]
        axes = [list(axis) for axis in shape.far.axes] if shape.far else [["graph", 1]]
        signals = [["event", [max(shape.events, 1)]]] + ([["meeting", [shape.far.meetings]]] if shape.far else [])
        return {
            "axes": axes, "signals": signals, "table": at.table, "counters": at.epochs,
            "memory": at.memory, "bytes": at.end, "waits": True, "grid": [shape.blocks, 1, 1], "list": sites,
        }  # fmt: skip


def _early(kernel: ir.Kernel, fixed: Sequence[int], but: Collection[ir.Op] = ()) -> list[ir.Op]:
    """The loads of a kernel from inputs that nobody writes, and what computes their places, in their order: those that
    stand beside each other in its body, outside of loops."""
    refs = {kernel.inputs[k] for k in fixed}
    body = kernel.body.ops
    known: dict[ir.Value, set[ir.Op]] = {}  # values that need no waiting, and the ops that make them
    kept: set[ir.Op] = set()
    for op in body:
        load = isinstance(op, ir.Load) and op.ref in refs and op not in but
        if any(True for _ in op.blocks()) or not (load or (op.effect == "none" and not isinstance(op, ir.Load))):
            continue
        needs = [v for v in op.operands() if not isinstance(v.type, ir.RefType)]
        if any(v not in known for v in needs) or (not load and len(needs) < len(list(op.operands()))):
            continue
        made = set().union({op}, *(known[v] for v in needs))
        known.update((r, made) for r in op.results)
        kept |= made if load else set()
    return [op for op in body if op in kept]
