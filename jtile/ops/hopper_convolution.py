"""Convolutions on Hopper at the block level: products whose rows tensor maps find in the array as it is.

A consumer has 64 points of the result that are a box: of images, rows and columns. What the box reads at a point of the
window is a box of x, moved, whose rows lie one below the other in shared memory, as those of a matrix do; what is
outside of x is zero. So a convolution is a product with as many rounds as points of the window times parts of the
channels, and x is neither padded nor copied out.

A transposed convolution is one for each remainder of the points by its stride, with the points of the window that reach
these; programs of one launch have one remainder each, and their results go to their places in the whole. Where the
points of x are apart (a convolution with a stride), x is seen as the remainders of its points.

Where tiles take unequal times, or those of a remainder, a group or some columns are no multiple of the programs that
have them, all of them stand in one line (`Form.lined`), those with the most points of the window first.

Where `Form.slide`, consumers are neighbours along the first axis, and what the points of the window along it read are
planes that they share: a round is one of the points of the other axes, and each plane is read once in it. With few
channels the copies are what takes the time, and the weight stays in shared memory (`Form.kept`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops.convolution_points import Sides, apart
from jtile.ops.hopper_columns import piece

ROWS = 64  # points of a consumer's box
LEAVING = 64  # columns of the result that leave together
ROOM = 225 << 10  # bytes of shared memory for rings and what leaves


@dataclasses.dataclass(frozen=True)
class Axis:
    """How points of the result find those of x along an axis, by their remainder.

    Point u of remainder r reads, with the k-th of the `counts[r]` points of the window that reach it, number
    `first[r] + every k` of the window, the point `stride u + starts[r] + step k` of x.

    Attributes:
      points: of each remainder. window: points of the window.
    """

    points: int
    window: int
    counts: Sides
    first: Sides
    starts: Sides
    every: int = 1
    step: int = 1
    stride: int = 1

    @property
    def phases(self) -> int:
        """How many remainders the result has."""
        return len(self.counts)

    @property
    def before(self) -> int:
        """A multiple of the stride by which no point that is read lies in front of x."""
        ends = [s + self.step * k for s, n in zip(self.starts, self.counts) for k in (0, max(n - 1, 0))]
        return -(min(0, *ends) // self.stride) * self.stride


@dataclasses.dataclass(frozen=True)
class Form:
    """How a program computes its part of the result.

    Attributes:
      box: sides of a consumer's box of images and points, powers of two, 64 in all.
      columns: outputs of a program. terms: channels of a round.
      consumers: boxes of a tile. tiles: of a program, one after the other.
      slots: of the rings. buffers: of each consumer, for pieces of results that leave.
      share: neighbours that bring the weight together.
      registers: of a consumer's thread. width: columns that leave together.
      slide: whether consumers are neighbours along the first axis of points, and share what they read.
      kept: whether the weight stays.
      lined: how many programs share out the tiles of all columns, groups and remainders, if not 0.
    """

    box: Sides
    columns: int
    terms: int = 64
    consumers: int = 2
    tiles: int = 1
    slots: int = 4
    buffers: int = 2
    share: int = 1
    registers: int = 240
    width: int = LEAVING
    slide: bool = False
    kept: bool = False
    lined: int = 0

    @property
    def options(self) -> dict[str, int]:
        """Options of the compiler that put neighbours into clusters."""
        return {"multicast": self.share} if self.share > 1 else {}

    @property
    def whole(self) -> Sides:
        """The sides of a box of a consumer, or of that of all consumers that slide."""
        image, first, *others = self.box
        return (image, self.consumers * first, *others) if self.slide else self.box

    @property
    def own(self) -> int:
        """Boxes of a tile."""
        return 1 if self.slide else self.consumers

    def boxes(self, sides: Sides) -> Sides:
        """How many boxes cover images and points of these sides."""
        return tuple(map(jt.cdiv, sides, self.whole))

    def tiles_of(self, sides: Sides) -> int:
        """Tiles of the points of one remainder."""
        return jt.cdiv(math.prod(self.boxes(sides)), self.own)

    def programs(self, sides: Sides) -> int:
        """Programs that share out the points of one remainder, if no line does."""
        return jt.cdiv(jt.cdiv(self.tiles_of(sides), self.tiles), self.share) * self.share


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Numbers of a product.

    Attributes:
      sides: how many images, and points of one remainder along each axis.
      outputs: of all groups. of_group: of one. terms: channels of a group.
    """

    sides: Sides
    outputs: int
    of_group: int
    terms: int

    @staticmethod
    def of(x, w, axes: tuple[Axis, ...], groups: int, turned: bool) -> _Sizes:
        outputs = w.shape[1] * groups if turned else w.shape[2]
        terms = w.shape[2] // groups if turned else w.shape[1]
        return _Sizes((x.shape[0], *(a.points for a in axes)), outputs, outputs // groups, terms)


@dataclasses.dataclass(frozen=True)
class _Memory:
    """Buffers and barriers of a program.

    Attributes:
      rows: for each consumer the ring of its points, or those of the planes of consumers that slide. columns: for each
        point of the window in a round the ring of the weight.
      leaving: for each consumer buffers of results on their way.
      full, empty: a round has come; has been read. ready: a weight that stays has come.
    """

    rows: list[jt.Shared]
    columns: list[jt.Shared]
    leaving: list[list[jt.Shared]]
    full: jt.Barrier
    empty: jt.Barrier
    ready: jt.Barrier | None


@dataclasses.dataclass(frozen=True)
class _Place:
    """Which outputs and points a tile has.

    Attributes:
      group: of channels. column: the first output in the group. output: that of all groups.
      phase: the remainder along each axis.
    """

    group: jax.Array | int
    column: jax.Array | int
    output: jax.Array | int
    phase: list

    @staticmethod
    def of(part, phase, axes: tuple[Axis, ...], form: Form, sizes: _Sizes) -> _Place:
        """That of number `part` of the columns of all groups, and number `phase` of all remainders."""
        blocks = jt.cdiv(sizes.of_group, form.columns)
        group, column = apart(part, (blocks,)) if sizes.of_group < sizes.outputs else (0, part)
        _, *remainders = apart(phase, tuple(a.phases for a in axes))
        column = column * form.columns
        return _Place(group, column, group * sizes.of_group + column, remainders)


@dataclasses.dataclass(frozen=True)
class _Share:
    """What a program computes.

    Attributes:
      number: of the program, among those that share out tiles. tiles: how many it has.
      place: that of all of them, if they do not stand in a line.
    """

    number: jax.Array
    tiles: jax.Array | int
    place: _Place | None

    @staticmethod
    def of(axes: tuple[Axis, ...], form: Form, sizes: _Sizes) -> _Share:
        part, phase, number = (jt.program_id(axis) for axis in range(3))
        if not form.lined:
            return _Share(number, form.tiles, _Place.of(part, phase, axes, form, sizes))
        rounds, more = divmod(_tiles(axes, form, sizes), form.lined)
        return _Share(number, rounds + jnp.where(_in_line(rounds, number, form) < more, 1, 0), None)

    def tile(self, t, axes: tuple[Axis, ...], form: Form, sizes: _Sizes) -> tuple[_Place, jax.Array]:
        """The place of the t-th tile, and its number among those of its place."""
        if self.place is not None:
            return self.place, t * form.programs(sizes.sides) + self.number
        columns, tiles = _parts(form, sizes), form.tiles_of(sizes.sides)
        phase, number, part = apart(t * form.lined + _in_line(t, self.number, form), (tiles, columns))
        return _Place.of(part, _pick(phases_of(axes), phase), axes, form, sizes), number


def _in_line(t, number, form: Form):
    """Where program `number` stands in round t of a line: to and fro, so that who had the longest tile has the shortest
    next."""
    back = form.lined - 1 - number
    return (back if t % 2 else number) if isinstance(t, int) else jnp.where(t % 2 == 1, back, number)


def _parts(form: Form, sizes: _Sizes) -> int:
    """Tiles side by side that have all outputs of all groups."""
    return sizes.outputs // sizes.of_group * jt.cdiv(sizes.of_group, form.columns)


def phases_of(axes: tuple[Axis, ...]) -> Sides:
    """The numbers of all remainders, those with the most points of the window first."""
    counts = [math.prod(k) for k in itertools.product(*(a.counts for a in axes))]
    return tuple(sorted(range(len(counts)), key=lambda r: -counts[r]))


def _tiles(axes: tuple[Axis, ...], form: Form, sizes: _Sizes) -> int:
    return _parts(form, sizes) * math.prod(a.phases for a in axes) * form.tiles_of(sizes.sides)


def result_shape(batch: int, axes: tuple[Axis, ...], outputs: int) -> Sides:
    """The shape of the result: behind the points of an axis their remainders; those of the last axis stand in front of
    the outputs, together with which they are one axis."""
    inner = [(a.points, a.phases) if a.phases > 1 else (a.points,) for a in axes[:-1]]
    return batch, *itertools.chain(*inner), axes[-1].points, axes[-1].phases * outputs


def _pick(values: Sides, r):
    """values[r] of a computed r."""
    if len(set(values)) == 1:
        return values[0]
    return sum((jnp.where(r == k, v, 0) for k, v in enumerate(values)), jnp.int32(0))


def _counts(axes: tuple[Axis, ...], phase: list) -> list:
    return [_pick(a.counts, r) for a, r in zip(axes, phase)]


def _rounds(axes: tuple[Axis, ...], phase: list, terms: int, form: Form):
    return math.prod(_counts(axes, phase)[form.slide :], start=jt.cdiv(terms, form.terms))


def planes_of(axes: tuple[Axis, ...], form: Form) -> Sides:
    """The plane that the first consumer reads at each point of the window of a round, counted from the first one that
    any reads."""
    if not form.slide:
        return (0,)
    ahead = [axes[0].step * k for k in range(axes[0].counts[0])]
    return tuple(n - min(ahead) for n in ahead)


def split_up(n, sides: list) -> list:
    """`apart` for sides that may be computed, without the first index."""
    found = []
    for side in reversed(sides):
        side = jnp.asarray(side, jnp.int32)
        found.insert(0, jax.lax.rem(n, side))
        n = jax.lax.div(n, side)
    return found


def corner_of(form, number, sides: Sides) -> list:
    """Where box `number` of a form begins: image and points."""
    first, *others = apart(number, form.boxes(sides)[1:])
    return [at * side for at, side in zip((first, *others), form.whole)]


def box_of_x(x, axes: tuple[Axis, ...], phase: list, taps: list, corner: list, channel, box: Sides, terms: int):
    """What a box of the result reads at a point of the window, in so many channels from `channel` on."""
    image, *points = corner
    index = [jt.ds(image, box[0])]
    for k, (a, r, tap, at) in enumerate(zip(axes, phase, taps, points)):
        from_start = _pick(a.starts, r) + a.step * tap
        if a.stride == 1:
            index.append(jt.ds(at + from_start, box[1 + k]))
            continue
        ahead, stride = from_start + a.before, jnp.int32(a.stride)
        here, remainder = jax.lax.div(ahead, stride) - a.before // a.stride, jax.lax.rem(ahead, stride)
        index.append(jt.ds(at + here, box[1 + k]))
        if k + 1 < len(axes):
            index.append(remainder)
        else:
            channel = remainder * (x.shape[-1] // a.stride) + channel
    return x.at[(*index, jt.ds(channel, terms))]


def _box_of_w(w, axes, place: _Place, taps: list, term, form: Form, sizes: _Sizes, turned: bool):
    """The weight of a round."""
    number = 0
    for a, r, tap in zip(axes, place.phase, taps):
        number = number * a.window + _pick(a.first, r) + a.every * tap
    if turned:
        return w.at[number, jt.ds(place.column, form.columns), jt.ds(place.group * sizes.terms + term, form.terms)]
    return w.at[number, jt.ds(term, form.terms), jt.ds(place.output, form.columns)]


@jt.function
def _fill(x, w, mem: _Memory, share: _Share, axes, form: Form, sizes: _Sizes, turned: bool) -> None:
    """The role that fills the rings: the boxes of all consumers, and their weight."""
    parts, within = jt.cdiv(sizes.terms, form.terms), len(mem.columns)
    front = planes_of(axes, form).index(0)  # the point of the window at which the first plane is read
    nbytes = len(mem.rows) * mem.rows[0].nbytes + (0 if form.kept else within * mem.columns[0].nbytes)
    if mem.ready is not None:
        place, _ = share.tile(0, axes, form, sizes)
        counts, rounds = _counts(axes, place.phase)[form.slide :], _rounds(axes, place.phase, sizes.terms, form)
        mem.ready.at(0).expect(rounds * within * mem.columns[0].nbytes)
        for u in jt.range(rounds):
            *taps, part = split_up(u, [*counts, parts])
            for k, ring in enumerate(mem.columns):
                here = [k, *taps] if form.slide else taps
                weight = _box_of_w(w, axes, place, here, part * form.terms, form, sizes, turned)
                jt.async_copy(weight, ring.at(u), mem.ready.at(0))
    it = jnp.int32(0)
    for t in jt.range(share.tiles):
        place, number = share.tile(t, axes, form, sizes)
        counts, rounds = _counts(axes, place.phase)[form.slide :], _rounds(axes, place.phase, sizes.terms, form)
        corners = [corner_of(form, number * form.own + h, sizes.sides) for h in range(form.own)]
        if form.slide:
            image, first, *others = corners[0]
            corners = [[image, first + k, *others] for k in range(len(mem.rows))]
        for u in jt.range(rounds):
            *taps, part = split_up(u, [*counts, parts])
            term = part * form.terms
            mem.empty.at(it).wait(before=True)
            mem.full.at(it).expect(nbytes)
            for ring, corner in zip(mem.rows, corners, strict=True):
                channel, here = place.group * sizes.terms + term, [front, *taps] if form.slide else taps
                box = box_of_x(x, axes, place.phase, here, corner, channel, form.box, form.terms)
                jt.async_copy(box, ring.at(it), mem.full.at(it))
            if not form.kept:
                for k, ring in enumerate(mem.columns):
                    here = [k, *taps] if form.slide else taps
                    weight = _box_of_w(w, axes, place, here, term, form, sizes, turned)
                    jt.async_copy(weight, ring.at(it), mem.full.at(it))
            it += 1


@jt.function
def _sum(mem: _Memory, rows: list, rounds, it, form: Form, turned: bool):
    """The sums of a consumer's box over rounds `it` to `it + rounds` of the ring, and the next round. `rows`: the rings
    of what it reads at the points of the window of a round."""
    total, last = jt.zeros((ROWS, form.columns), jnp.float32), mem.full.count - 1
    for k in jt.range(rounds):
        mem.full.at(it).wait()
        for j, ring in enumerate(rows):
            right = mem.columns[j].at(k if form.kept else it)
            total = jt.dot_async(ring.at(it), right.T if turned else right, total, keep=(k > 0) if j == 0 else None)
        total = jt.dot_wait(total, pending=len(rows))
        mem.empty.at(it + last).arrive(when=k > 0)
        it += 1
    total = jt.dot_wait(total)
    mem.empty.at(it + last).arrive(when=None if isinstance(rounds, int) else rounds > 0)
    return it, total


@jt.function
def _leave(total, y, leaving: list, place: _Place, corner: list, axes, form: Form, sizes: _Sizes) -> None:
    """Write the sums of a box to their places in the result."""
    image, *points = corner
    index = [jt.ds(image, form.box[0])]
    for k, (a, r, at) in enumerate(zip(axes, place.phase, points)):
        index += [jt.ds(at, form.box[1 + k])] + ([r] if a.phases > 1 and k + 1 < len(axes) else [])
    output = place.output + (place.phase[-1] * sizes.outputs if axes[-1].phases > 1 else 0)
    width, whole = leaving[0].shape[1], sizes.of_group % form.columns == 0
    for p, at in enumerate(range(0, form.columns, width)):
        buffer = leaving[p % len(leaving)]
        jt.store_wait(len(leaving) - 1 if whole else 0)
        buffer.store(piece(total, at, width).astype(y.dtype))
        jt.fence_shared()
        if whole or place.column + at < sizes.of_group:
            jt.async_copy(buffer, y.at[(*index, jt.ds(output + at, width))])


@jt.function
def _consume(y, mem: _Memory, h: int, share: _Share, axes, form: Form, sizes: _Sizes, turned: bool) -> None:
    """The role that multiplies the boxes number h of all tiles."""
    it = jnp.int32(0)
    rows = [mem.rows[h + n] for n in planes_of(axes, form)]
    if mem.ready is not None:
        mem.ready.at(0).wait()
    for t in jt.range(share.tiles):
        place, number = share.tile(t, axes, form, sizes)
        it, total = _sum(mem, rows, _rounds(axes, place.phase, sizes.terms, form), it, form, turned)
        corner = corner_of(form, number if form.slide else number * form.consumers + h, sizes.sides)
        if form.slide:
            corner[1] = corner[1] + h
        _leave(total, y, mem.leaving[h], place, corner, axes, form, sizes)
    jt.store_wait()


def _grid(x, w, *, axes, form: Form, groups: int, turned: bool):
    sizes = _Sizes.of(x, w, axes, groups, turned)
    if form.lined:
        return 1, 1, form.lined
    return _parts(form, sizes), math.prod(a.phases for a in axes), form.programs(sizes.sides)


def _out(x, w, *, axes, groups: int, turned: bool, **_):
    return jt.like(x, shape=result_shape(x.shape[0], axes, _Sizes.of(x, w, axes, groups, turned).outputs))


@jt.kernel(out_type=_out, grid=_grid)
def hopper_convolution(x, w, y, *, axes: tuple[Axis, ...], form: Form, groups: int, turned: bool):
    """x [batch, *points, c], or, with a stride, the remainders of the points as in `result_shape`; w [points of the
    window, c / groups, o] or, `turned`, [points of the window, o / groups, c]; y: see `result_shape`."""
    # y[n, u, r, o] = sum_k sum_c x[n, stride u + starts_r + step k, c] w[first_r + every k, c, o]
    sizes = _Sizes.of(x, w, axes, groups, turned)
    share = _Share.of(axes, form, sizes)
    width = min(form.columns, form.width)
    buffers = min(form.buffers, form.columns // width)
    planes, weight = planes_of(axes, form), (form.columns, form.terms) if turned else (form.terms, form.columns)
    kept = math.prod((max(a.counts) for a in axes[form.slide :]), start=jt.cdiv(sizes.terms, form.terms))
    mem = _Memory(
        rows=[jt.alloc((ROWS, form.terms), x.dtype, slots=form.slots) for _ in range(form.consumers + max(planes))],
        columns=[jt.alloc(weight, x.dtype, slots=kept if form.kept else form.slots) for _ in planes],
        leaving=[[jt.alloc((ROWS, width), y.dtype) for _ in range(buffers)] for _ in range(form.consumers)],
        full=jt.barrier(form.slots),
        empty=jt.barrier(form.slots, arrivals=form.consumers),
        ready=jt.barrier(1) if form.kept else None,
    )  # fmt: skip
    for h in range(form.consumers):
        with jt.role(f"consumer{h}", warps=4, registers=form.registers, early=True):
            jt.wait_for_kernels()
            _consume(y, mem, h, share, axes, form, sizes, turned)
    with jt.role("producer", warps=1, registers=24, early=True):
        jt.wait_for_kernels()
        _fill(x, w, mem, share, axes, form, sizes, turned)
