"""Which loads of a tile-level kernel bring operands of matrix products, and which of them share a ring of buffers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence

from jtile.ir import (
    Bitcast,
    Block,
    Broadcast,
    Cast,
    Dot,
    DotScaled,
    For,
    If,
    Kernel,
    Load,
    Map,
    Op,
    Reshape,
    Select,
    Transpose,
    Value,
    copy_block,
    dim_value,
)
from jtile.ir.types import DTYPES
from jtile.passes.cse import index_form
from jtile.passes.products import BYTE, operand, untransposed
from jtile.passes.rewrite import free_values, reads_only

from .maps import load_obstacle
from .plan import refuse

_PATH = (Cast, Bitcast, Reshape, Map, Select)  # elementwise ops that may stand between a load and the product it feeds
_SMALLEST = 2048  # bytes of a tile that is worth a copy of its own
_ROOM = 220 << 10  # bytes of shared memory of a block of Hopper for tiles
_LINE = 128  # a line of one number a column has a multiple of these bytes
HALF = ("float16", "bfloat16")


@dataclasses.dataclass(eq=False)
class Site:
    """Loads of one block that arrive together; `resident`: loops inside the block use them."""

    block: Block
    loads: tuple[Load, ...]
    depth: int
    resident: bool


@dataclasses.dataclass(eq=False)
class Ring:
    """Buffers for sites that load the same arrays in tiles of the same shapes.

    `eager`: one site stands in a block with another, or around it, so that every site goes on to the next slot by
    itself; others go on at the end of their block, all rings of the block together. `span`: the slots that sites of one
    block take before the first of them is given back; slots are filled in turn, so a ring has as many at least.
    """

    sites: list[Site]
    eager: bool = False
    span: int = 1

    @property
    def resident(self) -> bool:
        return self.sites[0].resident

    @property
    def blocks(self) -> tuple[int, ...]:
        """The blocks that fill the ring: rings that the same blocks fill go around together."""
        return tuple(id(s.block) for s in self.sites)

    @property
    def bytes(self) -> int:
        """Bytes of one slot, for all consumers."""
        return sum(tile_bytes(x.result) for x in self.sites[0].loads)

    def __str__(self) -> str:
        tiles = " + ".join(f"{x.ref.name} {x.result.type}" for x in self.sites[0].loads)
        return f"{tiles}{', resident' if self.resident else ''}"


@dataclasses.dataclass(eq=False)
class Feeds:
    """Rings of a kernel, its products, those of them whose right operand is computed with the number of its buffer (see
    `scratch`), and loads that are replaced in some rounds (see `choices`)."""

    rings: list[Ring]
    dots: list[Dot]
    computed: dict[Dot, int]
    replaced: set[Load]
    home: dict[Op, Block]

    @property
    def loads(self) -> set[Load]:
        return {x for r in self.rings for s in r.sites for x in s.loads}


def tile_bytes(v: Value) -> int:
    """Bytes of a tile."""
    return v.type.size * DTYPES[v.dtype].bits // 8  # type: ignore[union-attr]


def feeds(kernel: Kernel) -> Feeds:
    """The rings of a kernel.

    Raises:
      Refusal: no products, products that warpgroups do not do, operands that tensor maps do not bring.
    """
    home, depth = _homes(kernel.body)
    dots = [op for op in home if isinstance(op, Dot)]
    scaled = [op for op in home if isinstance(op, DotScaled)]
    if scaled:
        refuse("products with block scales are not planned", scaled[0])
    if not dots:
        refuse("it has no matrix product to feed")
    for dot in dots:
        _check_product(dot)
    found = [(dot, tuple(_operands(kernel, dot, home))) for dot in dots]
    far = {x for dot, loads in found for x in loads if home[x] is not home[dot]}
    groups: list[list[Load]] = []
    for _, loads in found:
        _join(groups, loads, lambda x: (id(home[x]), x in far))
    for x in _lines(kernel, dots, home):
        _attach(x, groups, found, home)
    behind = _behind(kernel, dots, groups, home)
    far.update(behind)
    groups += [[x] for x in behind]
    sites = [_site(g, home, depth, g[0] in far) for g in groups]
    brought = {x for _, loads in found for x in loads}
    either = {op: c for op, c in choices(kernel.body).items() if c[0] in brought}
    computed = {d: n for b in dict.fromkeys(home[d] for d in dots) for d, n in scratch(b, either).items()}
    rings = _shared(_rings(kernel, sites, either), dots, home)
    if not any(not s.resident and s.depth for r in rings for s in r.sites):
        refuse("no loop loads the operands of its matrix products", dots[0])
    return Feeds(rings, dots, computed, {x for x, _ in either.values()}, home)


def _homes(body: Block) -> tuple[dict[Op, Block], dict[int, int]]:
    """The block of every op in program order, and how many regions are around each block."""
    home: dict[Op, Block] = {}
    depth: dict[int, int] = {}

    def block(b: Block, around: int) -> None:
        depth[id(b)] = around
        for op in b.ops:
            home[op] = b
            for inner in op.blocks():
                block(inner, around + 1)

    block(body, 0)
    return home, depth


def _operands(kernel: Kernel, dot: Dot, home: dict[Op, Block]) -> Iterator[Load]:
    """The loads that a product takes from shared memory, in order of its operands."""
    for right in (False, True):
        v, _ = operand(dot, right)
        if isinstance(v.op, Load):
            why = load_obstacle(kernel, v.op)
            if why:
                refuse(f"an operand of a matrix product has no tensor map: {why}", v.op)
            yield v.op
        else:
            yield from (x for x in _computed_from(v) if home[x] is home[dot] and _worth(kernel, x))


def _chained(dots: list[Dot], home: Mapping[Op, Block]) -> set[int]:
    """The blocks in which one product needs the result of another."""
    return {id(home[d]) for d in dots if not isinstance(operand(d, False)[0].op, Load)}


def _behind(kernel: Kernel, dots: list[Dot], groups: list[list[Load]], home: Mapping[Op, Block]) -> list[Load]:
    """The tiles that a kernel loads behind a loop with a chain of products, if shared memory holds them beside two
    rounds of operands: such a loop leaves no registers for their addresses."""
    chained = _chained(dots, home)
    loops = [op for op in home if isinstance(op, For) and id(op.body) in chained]
    if len(loops) != 1:
        return []
    (loop,) = loops
    ops, brought = home[loop].ops, {x for g in groups for x in g}
    later = [op for op in ops[ops.index(loop) + 1 :] if isinstance(op, Load)]
    found = [op for op in later if op not in brought and _worth(kernel, op)]
    rounds = [tile_bytes(x.result) * (2 if home[x] is loop.body else 1) for x in brought]
    return found if sum(rounds) + sum(tile_bytes(x.result) for x in found) <= _ROOM else []


def _lines(kernel: Kernel, dots: list[Dot], home: Mapping[Op, Block]) -> Iterator[Load]:
    """Loads of one number a column, in loops in which one product needs the result of another: such loops have few
    registers left to carry loads from round to round."""
    chained = _chained(dots, home)
    loops = {id(op.body) for op in kernel.body.walk() if isinstance(op, For)}
    for b in dict.fromkeys(home[d] for d in dots if id(home[d]) in chained & loops):
        inside = {*b.params, *(r for op in b.ops for r in op.results)}
        for op in b.ops:
            if not isinstance(op, Load) or len(op.result.shape) != 1 or op.result.dtype != "float32":
                continue
            moves = any(dim_value(d) in inside for d in op.index)
            wide = tile_bytes(op.result) >= _LINE and tile_bytes(op.result) % _LINE == 0
            across = all(
                isinstance(u, Broadcast) and len(u.shape) == 2 and u.dims == (1,)
                for u in b.walk() if op.result in free_values(u)
            )  # fmt: skip
            if moves and wide and across and op.result not in b.yields and load_obstacle(kernel, op) is None:
                yield op


def _attach(
    line: Load, groups: list[list[Load]], found: Sequence[tuple[Dot, Sequence[Load]]], home: Mapping[Op, Block]
) -> None:
    """Add a line to the operands of the last product before its first use that brings some in the same block."""
    b = home[line]
    first = users(b, [line.result])[0]
    own = [(b.ops.index(d), [x for x in loads if home[x] is b]) for d, loads in found if home[d] is b]
    own = [(at, loads) for at, loads in own if loads]
    before = [x for x in own if x[0] <= first] or own[:1]
    for _, loads in before[-1:]:
        next(g for g in groups if loads[0] in g).append(line)


def _computed_from(v: Value) -> Iterator[Load]:
    """Loads of tiles that a computed operand is made of, element by element."""
    size, todo, seen = v.type.size, [v], set()  # type: ignore[union-attr]
    while todo:
        x = todo.pop()
        if x in seen or not x.shape or x.type.size != size:  # type: ignore[union-attr]
            continue
        seen.add(x)
        if isinstance(x.op, Load):
            yield x.op
        elif isinstance(x.op, If):
            i = x.op.results.index(x)
            todo += [x.op.then.yields[i], x.op.orelse.yields[i]]
        elif isinstance(x.op, (*_PATH, Transpose)):
            todo += x.op.operands()


def choices(body: Block) -> dict[Op, tuple[Load, int]]:
    """Branches that give products a loaded tile as it is, or a computed one: with the load, and the number of the
    region that yields it. Products take the loaded tile from its slot, and the other from a spare slot of the ring."""
    users: dict[Value, list[Op]] = {}
    for op in body.walk():
        for v in op.operands():
            users.setdefault(v, []).append(op)
        for b in op.blocks():
            for v in b.yields:
                users.setdefault(v, []).append(op)
    found: dict[Op, tuple[Load, int]] = {}
    for op in body.walk():
        if isinstance(op, If) and len(op.results) == 1 and _rights(op.result, users):
            plain = [k for k, b in enumerate(op.blocks()) if isinstance(b.yields[0].op, Load)]
            outside = [k for k in plain if op.blocks()[k].yields[0].op not in op.blocks()[k].ops]
            if len(plain) == 1 and outside:
                load = op.blocks()[plain[0]].yields[0].op
                found[op] = load, plain[0]  # type: ignore[assignment]
    return found


def scratch(b: Block, either: Container[Op]) -> dict[Dot, int]:
    """The products of a block whose right operand is computed, and which of the buffers of its shape each one has.

    All have the same buffer, but where a product needs the result of another: a loop of these starts the later product
    beside the first one of the next round, so that each operand has a buffer of its own.

    Args:
      either: the `choices` of the kernel, whose products find both operands in a ring.
    """
    dots = [op for op in b.ops if isinstance(op, Dot)]
    computed = [
        d for d in dots if not isinstance(operand(d, True)[0].op, Load) and operand(d, True)[0].op not in either
    ]
    if not _dependent(b, dots):
        return dict.fromkeys(computed, 0)
    numbers: dict[Hashable, dict[Value, int]] = {}
    out: dict[Dot, int] = {}
    for d in computed:
        v, _ = untransposed(d.b)
        of_shape = numbers.setdefault((v.shape, v.dtype), {})
        out[d] = of_shape.setdefault(v, len(of_shape))
    return out


def _dependent(b: Block, dots: Sequence[Dot]) -> bool:
    """Whether an operand of one of the products is made from the result of another; sums do not count."""
    made, inside = {op.result for op in dots}, set(b.ops)
    for d in dots:
        todo, seen = [d.a, d.b], set()
        while todo:
            v = todo.pop()
            if v in made:
                return True
            if v.op is not None and v not in seen and v.op in inside:
                seen.add(v)
                todo += free_values(v.op)
    return False


def _rights(v: Value, users: dict[Value, list[Op]]) -> bool:
    """Whether all users of a value are products that take it, or its transpose, as their right operand."""
    for op in users.get(v, []):
        turned = isinstance(op, Transpose) and _rights(op.result, users)
        right = isinstance(op, Dot) and v is op.b and v not in (op.a, op.acc)
        if not turned and not right:
            return False
    return v in users


def _worth(kernel: Kernel, op: Load) -> bool:
    return len(op.result.shape) == 2 and tile_bytes(op.result) >= _SMALLEST and load_obstacle(kernel, op) is None


def _check_product(dot: Dot) -> None:
    """Refuse a product that warpgroups do not compute. They take 16-bit floats, 8-bit floats, int8, and float32 as tf32
    where that is precise enough for the user, in tiles of 64 rows and 8 columns."""
    a, b = dot.a.dtype, dot.b.dtype
    batch, m, n, k = dot.sizes()
    if batch:
        refuse("a batched matrix product stands in it", dot)
    byte = (a in BYTE and b in BYTE and dot.precision in ("default", "fast")) or a == b == "int8"
    tf32 = a == b == "float32" and dot.precision == "fast"
    if not (a == b and a in HALF) and not byte and not tf32:
        refuse(f"its matrix product of {a} and {b} is none of warpgroups", dot)
    least = 32 if byte else 8 if tf32 else 16
    if m % 64 or n % 8 or k % least:
        refuse(f"its matrix product is {m}x{n}x{k}, of warpgroups a multiple of 64x8x{least}", dot)
    (x, across), (y, along) = operand(dot, False), operand(dot, True)
    if a not in HALF and (not isinstance(y.op, Load) or not along or (isinstance(x.op, Load) and across)):
        refuse(f"products of {a} take operands that lie along k in memory", dot)


def _join(groups: list[list[Load]], loads: Sequence[Load], kind: Callable[[Load], Hashable]) -> None:
    """Add the loads of a product to groups: loads of one kind are in one group."""
    for wanted in dict.fromkeys(map(kind, loads)):
        own = [x for x in loads if kind(x) == wanted]
        met = [g for g in groups if not set(own).isdisjoint(g)]
        groups[:] = [g for g in groups if g not in met]
        groups.append([x for g in met for x in g] + own)


def _site(group: list[Load], home: dict[Op, Block], depth: dict[int, int], resident: bool) -> Site:
    block = home[group[0]]
    loads = set(group)
    ordered = tuple(op for op in block.ops if isinstance(op, Load) and op in loads)
    return Site(block, ordered, depth[id(block)], resident)


def _rings(kernel: Kernel, sites: list[Site], either: Mapping[Op, tuple[Load, int]]) -> list[Ring]:
    """The rings: sites that load the same share one. A site has a ring of its own where its tiles stay for a loop,
    several at a time, or where one is needed before and after regions that go around the ring."""
    place = {p: k for k, p in enumerate(kernel.params)}
    rings: dict[Hashable, Ring] = {}
    for s in sites:
        form = lambda x: (place[x.ref], str(index_form(x.index)), str(x.pad))
        s.loads = tuple(sorted(s.loads, key=form))
        rings.setdefault((s.resident, *map(form, s.loads)), Ring([])).sites.append(s)
    for ring in rings.values():
        inside = [{id(b) for op in s.block.ops for b in _blocks(op)} | {id(s.block)} for s in ring.sites]
        ring.eager = any(id(t.block) in inside[k] for k, s in enumerate(ring.sites) for t in ring.sites if t is not s)
    apart = lambda ring: ring.eager and (ring.resident or not _spanned(ring, either))
    return [part for ring in rings.values() for part in (map(_alone, ring.sites) if apart(ring) else [ring])]


def _shared(rings: list[Ring], dots: list[Dot], home: Mapping[Op, Block]) -> list[Ring]:
    """The rings, of which loops one behind the other share one, whatever they load, where each has one product, and
    operands of the same types."""
    found: dict[Hashable, Ring] = {}
    for ring in rings:
        products = [_only_product(s, dots, home) for s in ring.sites]
        forms = {_operand_forms(d) if d else None for d in products}
        key: Hashable = ring
        if len(forms) == 1 and None not in forms and not (ring.eager or ring.resident):
            key = (ring.sites[0].depth, *forms)
        if key in found:
            both = [*found[key].sites, *ring.sites]
            for s in both:
                product = _only_product(s, dots, home)
                assert product is not None
                s.loads = tuple(x for right in (False, True) if isinstance(x := operand(product, right)[0].op, Load))
            found[key].sites = both
        else:
            found[key] = ring
    return list(found.values())


def _only_product(site: Site, dots: list[Dot], home: Mapping[Op, Block]) -> Dot | None:
    """The product of a site's block, where it is the only one, and takes both of its operands from the site."""
    here = [d for d in dots if home[d] is site.block]
    if len(here) != 1 or len(site.loads) != 2:
        return None
    loads = {operand(here[0], right)[0].op for right in (False, True)}
    alone = not any(op.blocks() for op in site.block.ops)
    return here[0] if loads == set(site.loads) and alone else None


def _operand_forms(dot: Dot) -> Hashable:
    """What buffers of a product's operands depend on."""
    sides = [operand(dot, right) for right in (False, True)]
    return tuple((str(v.type), turned, str(getattr(v.op, "pad", None))) for v, turned in sides), str(dot.result.type)


def _alone(site: Site) -> Ring:
    return Ring([site])


def _spanned(ring: Ring, either: Mapping[Op, tuple[Load, int]]) -> bool:
    """Note the span of a ring; returns whether no site keeps its slot while others inside its block go around."""
    first: dict[Site, int] = {}
    last: dict[Site, int] = {}
    for s in ring.sites:
        values = {x.result for x in s.loads}
        values |= {op.results[0] for op, (load, _) in either.items() if load in s.loads}
        found = users(s.block, values) or [len(s.block.ops) - 1]
        first[s], last[s] = min(found), max(found)
    for s in ring.sites:
        during = s.block.ops[first[s] : last[s] + 1]
        inside = {id(b) for op in during for b in _blocks(op)}
        if any(id(t.block) in inside for t in ring.sites):
            return False
        taken = [t for t in ring.sites if t.block is s.block and first[s] <= first[t] <= last[s]]
        ring.span = max(ring.span, len(taken))
    return True


def users(b: Block, tiles: Iterable[Value]) -> list[int]:
    """The numbers of the ops of a block that use tiles of operands. Transposes of the tiles are views, and the block's
    yields count as uses of its last op."""
    values, views = set(tiles), set()
    for i, op in enumerate(b.ops):
        if isinstance(op, Transpose) and untransposed(op.result)[0] in values:
            values.add(op.result)
            views.add(i)
    found = [i for i, op in enumerate(b.ops) if i not in views and not values.isdisjoint(free_values(op))]
    return found if values.isdisjoint(b.yields) else [*found, len(b.ops) - 1]


def _blocks(op: Op) -> Iterator[Block]:
    """All blocks inside an op."""
    for b in op.blocks():
        yield b
        for x in b.ops:
            yield from _blocks(x)


def sink(kernel: Kernel) -> Kernel:
    """The kernel with the loads of operands right in front of their first use, so that all roles meet them in one
    order. Nobody writes what they read."""
    kernel = kernel.with_body(copy_block(kernel.body, lambda v: v))
    for ring in feeds(kernel).rings:
        for site in ring.sites:
            _sink(site)
    return kernel


def _sink(site: Site) -> None:
    moved: list[Op] = list(site.loads)
    values = {op.result for op in site.loads}
    ops = site.block.ops
    for op in ops:
        if isinstance(op, Transpose) and op.x in values:
            moved.append(op)
            values.add(op.result)
    rest = [op for op in ops if op not in moved]
    users = (k for k, op in enumerate(rest) if not values.isdisjoint(free_values(op)))
    at = next(users, len(rest))
    places = _places(site, rest[at:], values)
    ops[:] = [*rest[:at], *places, *(op for op in ops if op in moved), *(op for op in rest[at:] if op not in places)]


def _places(site: Site, later: list[Op], values: set[Value]) -> list[Op]:
    """The ops behind the first use of a site's loads that compute the places of the site's other loads."""
    wanted = {dim_value(d) for op in site.loads for d in op.index}
    found: list[Op] = []
    for op in reversed(later):
        if not wanted.isdisjoint(op.results):
            free = free_values(op)
            if not reads_only(op) or isinstance(op, Dot | DotScaled) or not values.isdisjoint(free):
                refuse("where its operands lie depends on its products", op)
            wanted |= set(free)
            found.insert(0, op)
    return found
