"""Makes the plan of a kernel, from its products and loads, and from what the machine has."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jtile.ir import Alloc, Block, Dot, DotScaled, For, Full, If, Kernel, LastArrival, Load, Store, Value, is_dynamic
from jtile.ir.types import DTYPES, TileType
from jtile.passes.hoist import FREE
from jtile.passes.order import grouped_axes
from jtile.passes.products import operand, promoted, untransposed
from jtile.passes.rewrite import free_values

from .evict import copy_hints
from .feeds import Feeds, feeds, tile_bytes
from .maps import store_obstacle
from .plan import Machine, NoPlan, Output, Plan, Refusal, deferred, for_tiles, refuse
from .split_rows import Split, apart, split
from .uneven import balances, uneven

ROWS = 64  # rows of a warpgroup's product
RESERVE = 3072  # bytes of shared memory for barriers, and for what conversions between layouts need
MOST, ENOUGH = 8, 4  # slots of a ring; so many hide how long a copy takes
MOST_TILES = 2**31 - 2**16  # tiles; their counter goes beyond by the number of blocks
LINE = 128  # bytes of a row of a box that shared memory swizzles
# (consumers, warps of each) -> registers of a thread of a consumer, and of the producer; 0: what is left.
REGISTERS = {(1, 4): (240, 96), (1, 8): (0, 24), (2, 4): (240, 24), (3, 4): (160, 24), (4, 4): (112, 24)}


@dataclasses.dataclass(frozen=True)
class Wish:
    """What the user or the tuner wants; None leaves it to the plan."""

    consumers: int | None = None
    stages: int | None = None
    persistent: bool | None = None
    specialize: bool | None = None

    @staticmethod
    def of(options: Mapping[str, Any]) -> Wish:
        """The wish in the compiler options `consumers`, `num_stages`, `persistent` and `specialize`."""
        names = {"consumers": "consumers", "stages": "num_stages", "persistent": "persistent"}
        return Wish(specialize=options.get("specialize"), **{k: options.get(n) for k, n in names.items()})


def plan(kernel: Kernel, machine: Machine, wish: Wish) -> Plan:
    """The plan of a tile-level kernel.

    Raises:
      Refusal: there is no plan; it has the reason.
    """
    found = feeds(kernel)
    why: NoPlan | None = None
    for consumers, warps in _teams(kernel, found, wish):
        shares = split(kernel, consumers)
        if isinstance(shares, Split):
            shares = apart(shares)
        if isinstance(shares, Split):
            shares = _too_large(kernel, found, shares, warps) or shares
        if isinstance(shares, Split):
            return _sized(kernel, machine, wish, found, shares, warps)
        why = why or shares
    refuse(why.reason if why else "no number of warpgroups shares its products", None if why else found.dots[0])


def check(kernel: Kernel, wish: Wish) -> None:
    """Refuse kernels that can have no plan, before any analysis."""
    if wish.specialize is False:
        refuse("specialize=False asks for the tile level")
    dots = [op for op in kernel.body.walk() if isinstance(op, Dot | DotScaled)]
    if not dots:
        refuse("it has no matrix product to feed")
    single = [dot for dot in dots if isinstance(dot, Dot) and dot.a.dtype == "float32" and dot.precision == "fast"]
    if single and not wish.specialize:  # no device has run such a plan yet
        refuse("its product of float32 as tf32 takes roles only with specialize=True", single[0])
    if is_dynamic(kernel):
        refuse("it has sizes that are known only when it runs")
    if math.prod(kernel.grid) == 0:
        refuse("its grid has no programs")
    if math.prod(kernel.grid) > MOST_TILES:
        refuse(f"its grid has {math.prod(kernel.grid)} programs, which roles count in 32 bits")
    arrivals = [op for op in kernel.body.walk() if isinstance(op, LastArrival)]
    if arrivals:  # the copies and stores of several roles would have to be over before an arrival
        refuse("its programs arrive at counters", arrivals[0])
    private = [op for op in kernel.body.walk() if isinstance(op, Alloc)]
    if private or kernel.scratch:
        refuse("it has private memory", private[0] if private else None)


def _teams(kernel: Kernel, found: Feeds, wish: Wish) -> Iterator[tuple[int, int]]:
    """(consumers, warps of each) to try, the best first."""
    rows = {d.result.shape[0] for d in found.dots}
    if (wish.consumers or 1) > 1:
        yield wish.consumers or 1, 4
        return
    m = min(rows)
    if not wish.consumers and len(rows) == 1 and m > ROWS:
        if m == 4 * ROWS and _chained(kernel, found) and not _too_much(kernel, found, 4 * 128, REGISTERS[4, 4][0]):
            yield 4, 4  # while one consumer computes, products of the other three can run
        yield 3 if m == 3 * ROWS else 2, 4
    yield 1, 8 if m >= 2 * ROWS else 4


def _sized(kernel: Kernel, machine: Machine, wish: Wish, found: Feeds, shares: Split, warps: int) -> Plan:
    """Slots and buffers for the memory there is."""
    n = shares.consumers
    registers = REGISTERS.get((n, warps), (0, 24))
    room = machine.shared - RESERVE - _scratch_bytes(found) * n
    resident = sum(r.bytes for r in found.rings if r.resident)
    slot = sum(r.bytes for r in found.rings if not r.resident)
    outputs = _outputs(kernel, shares)
    taken = _output_bytes(kernel, outputs)
    if (room - resident - taken) // slot < 2:
        outputs, taken = {}, 0
    room -= resident + taken
    stages = min(room // slot, MOST, wish.stages or MOST)
    if wish.stages == 1:
        refuse("num_stages=1 asks for one buffer")
    if stages < 2:
        need = machine.shared - room + 2 * slot
        refuse(
            f"two rounds of its operands take {need} bytes of shared memory, a block has {machine.shared}",
            found.dots[0],
        )
    span = max(r.span for r in found.rings)
    if stages < span:
        refuse(f"it needs {span} tiles of one array at a time, and its rings have {stages} slots", found.dots[0])
    tiles = math.prod(kernel.grid)
    blocks = _blocks(kernel, machine, tiles) if _persistent(kernel, machine, found, wish) else tiles
    room -= stages * slot
    fewer = -(-(resident - room) // slot)
    if resident and blocks < tiles and not wish.stages and fewer > 0 and stages - fewer >= max(ENOUGH, span):
        stages, room = stages - fewer, room + fewer * slot  # rings hold the next tile's operands when it begins
    slots = 2 if resident and blocks < tiles and room >= resident else 1
    room -= (slots - 1) * resident
    return Plan(
        consumers=n,
        warps=warps,
        registers=registers,
        tiles=tiles,
        blocks=blocks,
        stages=stages,
        resident=slots,
        rings=tuple(map(str, found.rings)),
        outputs=outputs,
        shared=machine.shared - room,
        turns=n > 2 and _chained(kernel, found),
        mixed=blocks < tiles
        and not _even(kernel)
        and uneven(kernel, machine.cache) is None
        and _chained(kernel, found),
        evict=copy_hints(kernel, blocks, machine),
    )


def _too_large(kernel: Kernel, found: Feeds, shares: Split, warps: int) -> NoPlan | None:
    """Why the consumers of a team do not hold the tiles of their shares, if so."""
    n = shares.consumers
    body, _ = shares.body(0)
    try:
        _check_shapes(body)
        _check_registers(kernel, found, n * warps * 32, REGISTERS.get((n, warps), (0, 24))[0])
    except Refusal as e:
        return e.no_plan
    return None


def _check_shapes(share: Block) -> None:
    """Refuse a share with tiles that have sides that are no powers of two: threads hold no others."""
    for op in share.walk():
        for v in op.results:
            if isinstance(v.type, TileType) and any(n & (n - 1) or n == 0 for n in v.shape):
                refuse(f"a consumer would hold {v.type}: sides are powers of two", op)


def _check_registers(kernel: Kernel, found: Feeds, threads: int, registers: int) -> None:
    if (much := _too_much(kernel, found, threads, registers)) is not None:
        words, dot = much
        have = f"{words // threads} of a thread's registers"
        refuse(f"its products take {have} with what else it holds, of which they may take {for_tiles(registers)}", dot)


def _too_much(kernel: Kernel, found: Feeds, threads: int, registers: int) -> tuple[int, Dot] | None:
    """The words that products take where registers do not hold them, and one of the products: those of a block of ops
    are in registers at about the same time, and with each of them whatever is needed behind it."""
    held = _held(kernel.body, found, 0)
    for block in dict.fromkeys(id(found.home[d]) for d in found.dots):
        dots = [d for d in found.dots if id(found.home[d]) == block]
        further = {d.acc for d in dots}  # sums that a product goes on with stay in their registers
        ends = [d for d in dots if d.result not in further]
        words = sum(tile_bytes(d.result) // 4 * (2 if promoted(d) else 1) for d in ends)
        left = [tile_bytes(d.a) // 4 for d in dots if not isinstance(operand(d, False)[0].op, Load)]
        most, room = max(held[d] for d in dots), for_tiles(registers) * threads
        alone = [d for d in ends if d.acc not in found.home[d].params]
        together = words + max(left, default=0) <= deferred(registers) * threads and len(alone) > 1  # see `defer`
        if most > room or (words + sum(left) > room and not together):
            return max(words + sum(left), most), dots[0]
    return None


def _held(b: Block, found: Feeds, around: int, entering: Iterable[Value] = ()) -> dict[Dot, int]:
    """For each product the words of the tiles that are in registers while it runs.

    Args:
      around: words of tiles from outside that stay; `entering`: tiles from outside that nobody needs behind the block.
    """
    last = dict.fromkeys(b.yields, len(b.ops))
    for i, op in reversed(list(enumerate(b.ops))):
        for v in free_values(op):
            last.setdefault(v, i)
    words = {v: _words(v, found) for v in (*entering, *b.params, *(r for op in b.ops for r in op.results))}
    alive = [v for v in (*entering, *b.params) if v in last]
    out: dict[Dot, int] = {}
    for i, op in enumerate(b.ops):
        alive = [v for v in alive if last[v] >= i]
        later = around + sum(words[v] for v in alive if last[v] > i)
        if isinstance(op, Dot):
            left = 0 if last.get(op.a, 0) > i else words.get(op.a, 0)
            out[op] = later + left + tile_bytes(op.result) // 4 * (2 if promoted(op) and op.acc is not None else 1)
        used = set(free_values(op)).difference(op.operands())
        ending = [v for v in alive if last[v] == i and v in used]
        for inner in op.blocks():
            if isinstance(op, If):
                out |= _held(inner, found, later, ending)
            else:  # every round needs them
                out |= _held(inner, found, later + sum(words[v] for v in ending))
        alive += [r for r in op.results if r in last]
    return out


def _words(v: Value, found: Feeds) -> int:
    """Registers of a tile, of all threads; operands wait in shared memory, and some tiles cost nothing."""
    base, _ = untransposed(v)
    if not isinstance(v.type, TileType) or isinstance(base.op, FREE) or base.op in found.loads:
        return 0
    return tile_bytes(v) // 4


def _scratch_bytes(found: Feeds) -> int:
    """Bytes of buffers for computed right operands (see `scratch`), and of spare slots."""
    kinds = {(untransposed(d.b)[0].shape, d.b.dtype, n): tile_bytes(d.b) for d, n in found.computed.items()}
    spare = [s.loads for r in found.rings for s in r.sites[:1]]
    replaced = {(x.ref, x.result.type) for x in found.replaced}
    spares = [tile_bytes(x.result) for loads in spare for x in loads if (x.ref, x.result.type) in replaced]
    return sum(kinds.values()) + sum(spares)


def _outputs(kernel: Kernel, shares: Split) -> dict[int, Output]:
    """The stores behind all loops that a tensor map can say."""
    out: dict[int, Output] = {}
    for op in _stores(kernel.body):
        whole = shares.consumers > 1 and shares.cut.get(op) != 0
        if whole or len(op.value.shape) != 2 or store_obstacle(kernel, op):
            continue
        columns, width = op.value.shape[1], DTYPES[op.value.dtype].bits // 8
        if columns & (columns - 1) or tile_bytes(op.value) < 2048 * shares.consumers:
            continue
        small = columns * width <= 2 * LINE
        out[kernel.params.index(op.ref)] = Output(columns, 1) if small else Output(LINE // width, 2)
    return out


def _stores(b: Block) -> Iterator[Store]:
    """The stores of a block that stand in no loop."""
    for op in b.ops:
        if isinstance(op, Store):
            yield op
        elif isinstance(op, If):
            for inner in op.blocks():
                yield from _stores(inner)


def _output_bytes(kernel: Kernel, outputs: Mapping[int, Output]) -> int:
    """Bytes of the buffers through which all consumers store; stores of one dtype and width share buffers."""
    stores = {op.ref: op for op in _stores(kernel.body)}
    kinds: dict[tuple, int] = {}
    for place, o in outputs.items():
        v = stores[kernel.params[place]].value
        kinds[v.shape[0], v.dtype, o] = o.buffers * v.shape[0] * o.columns * DTYPES[v.dtype].bits // 8
    return sum(kinds.values())


def _blocks(kernel: Kernel, machine: Machine, tiles: int) -> int:
    """The number of blocks that take all tiles by turns. In a matrix product all tiles take equally long, so that there
    are no more blocks than its rounds need: then the last round is full, and more rounds work on whole rectangles."""
    most = min(tiles, machine.processors)
    if not grouped_axes(kernel) or not _even(kernel):
        return most
    rounds = -(-tiles // most)
    return -(-tiles // rounds)


def _even(kernel: Kernel) -> bool:
    """Whether the bounds of all loops follow from the kernel alone."""
    loops = [op for op in kernel.body.walk() if isinstance(op, For)]
    return all(isinstance(v.op, Full) for op in loops for v in (op.lo, op.hi, op.step))


def _persistent(kernel: Kernel, machine: Machine, found: Feeds, wish: Wish) -> bool:
    """Whether blocks take several tiles each, so that the end of one overlaps with the start of the next. Where tiles
    take different times, the hardware gives the next tile to the block that is done first."""
    if wish.persistent is not None:
        return wish.persistent
    if _even(kernel):
        return True
    order = uneven(kernel, machine.cache)
    if order is not None:
        return balances(kernel, order, machine.processors)
    return not _chained(kernel, found)


def _chained(kernel: Kernel, found: Feeds) -> bool:
    """Whether a product in a loop needs the result of another."""
    bodies = {id(op.body) for op in kernel.body.walk() if isinstance(op, For)}
    inside = [d for d in found.dots if id(found.home[d]) in bodies]
    return any(not isinstance(operand(d, False)[0].op, Load) for d in inside)
