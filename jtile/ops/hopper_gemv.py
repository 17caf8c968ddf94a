"""One or two rows of x times a matrix in memory, on Hopper at the block level: yᵀ = W xᵀ, W read once.

Such a product is as fast as W comes from memory. So as many blocks as there are multiprocessors stay, each with a deep
ring of rows of W that tensor maps fill, and four roles of a warp for each quarter of a processor empty it: a lane has
16 bytes of a row, a warp 512, and x lies in registers for all rows. Lanes' sums go through shared memory to a role that
adds them up and writes y.

Where `jt.config(overlap=True)` promises that the kernel in front does not make W, the ring is filled while that kernel
still ends: its role is an early one. What is asked for queues in front of memory, and a row that is loaded behind it
waits for the whole queue: a ring of 190 KB on each multiprocessor is 6 us of memory's time. So of an early ring only as
much is on its way as memory needs (`streamed_forms`): a piece is asked for when an earlier one has come.

An RMS norm may stand in front: of one or two rows every block computes it by itself, while the first rows of W are on
their way, and a kernel less stands between two products. The roles that multiply take the weights of the norm only;
its scale is a factor of their sums, which the role that writes applies.

How the numbers of a lane are multiplied is said in `streamed_numbers`.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

import jtile as jt
from jtile.ops import gpu_tiles, hopper_held
from jtile.ops.dispatch import first_unmet
from jtile.ops.epilogues import ACTIVATIONS
from jtile.ops.operands import NO_EPILOGUE, Epilogue, Norm, Weight
from jtile.ops.quantized_tensor import BLOCK
from jtile.ops.streamed_forms import NARROW, SHARED, choices, form, paced, scale_bytes
from jtile.ops.streamed_numbers import (
    LANES,
    bits_of,
    bytes_of,
    groups_of,
    held,
    integers,
    is_ring,
    lane_sums,
    leaves,
    put,
    room,
    spread,
)
from jtile.ops.streamed_operands import (
    IN_ORDER,
    PIECE,
    Joined,
    Places,
    Rows,
    Walk,
    by_block,
    in_lines,
    of_blocks,
    of_piece,
)

_WRITERS = 2  # warps that add up the lanes
_SHORT = 2 * PIECE  # columns of a matrix whose scales the roles may read themselves
_TALL, _MANY = 32, 256  # rows of a tile, and of W for a multiprocessor, where W is long and its rows are one round
_BESIDE = 80, 40  # registers of a narrow block's roles that multiply, and of its others
_KEY = ("x", "weights", "epilogue", "kind", "activation", "out_dtype")  # what tuning depends on
_NORMED_KEY = ("x", "weights", "norm", "kind", "activation", "out_dtype")


Rings = list[list[jt.Shared]]


@dataclasses.dataclass(frozen=True)
class _Memory:
    """Buffers and barriers of a program.

    Attributes:
      words: for each role and weight, the rings of its 512-byte pieces of `rows` rows, one for each group.
      of_blocks: for each role, weight and array, the rings of the scales (or minima) that belong to the words.
      numbers: for each role and row of x, what `planes_of` or `integers_of` gives, a slot for each round of a row.
      sums: for each role, weight and row of x, the sums of the lanes.
      squares: for each role and row of x, sums of the squares of its part of x + residual; none without a norm.
      full: for each weight and each side, which is as many of the roles, a round of its words has come.
      empty: a round has been read by all roles.
      done, taken: the sums of a tile of rows are there; have been read.
      squared: the squares are there.
    """

    words: list[Rings]
    of_blocks: list[list[Rings]]
    numbers: list[list]
    sums: list[Rings]
    squares: Rings
    full: list[jt.Barrier]
    empty: jt.Barrier
    done: jt.Barrier
    taken: jt.Barrier
    squared: jt.Barrier | None

    def of_role(self, j: int) -> list[jt.Barrier]:
        """Those of `full` that say that the words of role j have come."""
        sides = len(self.full) // len(self.words[j])
        return self.full[j * sides // len(self.words) :: sides]


def _memory(rows_of_x: Rows, weights, kind: str, walk: Walk, slots: int, sides: int) -> _Memory:
    x, normed = rows_of_x.x, rows_of_x.norm is not None
    rows, roles, chunks = walk.rows, walk.roles, walk.chunks
    m, each, groups, inner = range(rows_of_x.count), range(roles), range(groups_of(kind)), x.shape[1] * x.shape[2]
    ring = lambda shape, dtype, n=slots: jt.alloc(shape, dtype, slots=n)
    width = 512 // jnp.dtype(weights[0].codes.dtype).itemsize
    block = lambda a: (rows, of_piece(a, inner, kind))
    of_x = room(kind, bytes_of(x.dtype))
    return _Memory(
        words=[[[ring((rows, width), w.codes.dtype) for _ in groups] for w in weights] for _ in each],
        of_blocks=[
            [[[ring(block(a), a.dtype) for _ in groups] for a in of_blocks(w, kind)] for w in weights] for _ in each
        ],
        numbers=[[jax.tree.map(lambda a: ring(a.shape, a.dtype, chunks), of_x) for _ in m] for _ in each],
        sums=[[[ring((rows, LANES), jnp.float32, 2) for _ in m] for _ in weights] for _ in each],
        squares=[[ring((LANES,), jnp.float32, 1) for _ in m if normed] for _ in each],
        full=[jt.barrier(slots) for _ in range(len(weights) * sides)],
        empty=jt.barrier(slots, arrivals=roles),
        done=jt.barrier(2, arrivals=roles),
        taken=jt.barrier(2),
        squared=jt.barrier(1, arrivals=roles) if normed else None,
    )


def _prepare(x: Rows, mem: _Memory, j: int, kind: str, roles: int, chunks: int, early: bool) -> None:
    """Puts role j's part of x into shared memory as its rounds take it; of a norm only the weights are in it: its scale
    is a factor of what the role that writes has summed. early: the kernels in front make x, and are waited for; they do
    not make the weights of the norm, which are read before."""
    count = bytes_of(x.x.dtype)
    whole = integers(kind)
    weights = [x.weights(chunk * roles + j, whole) for chunk in range(chunks)]
    if early:
        jt.wait_for_kernels()
    for i, rings in enumerate(mem.numbers[j]):
        pieces = [x.parts(i, chunk * roles + j, whole) for chunk in range(chunks)]  # at once
        if x.norm is not None:
            squares = functools.reduce(jnp.add, [part * part for parts in pieces for part in parts])
            mem.squares[j][i].at(0).store(squares.reshape(LANES, -1).sum(1))
        for chunk, (parts, of_norm) in enumerate(zip(pieces, weights)):
            parts = [part if w is None else part * w.astype(jnp.float32) for part, w in zip(parts, of_norm)]
            put(rings, chunk, parts, kind, count)
    jt.role_barrier()
    if mem.squared is not None:
        mem.squared.at(0).arrive()


@jt.function
def _consume(mem, j: int, kind: str, weights, walk: Walk, read):
    """Role j: adds up, in its lanes, the products of each tile of rows. read: what `walk.scales` gave for round 0."""
    words, blocks, numbers, chunks, rows = mem.words[j], mem.of_blocks[j], mem.numbers[j], walk.chunks, walk.rows
    at = lambda k: [jax.tree.map(lambda ring: ring.at(k), row, is_leaf=is_ring) for row in numbers]
    load = lambda k: jax.tree.map(lambda ring: ring.at(k).load(), (words, blocks), is_leaf=is_ring)
    x = held(at(0)) if chunks == 1 else None
    zero = lambda: jnp.zeros((rows, LANES), jnp.float32)
    for n in jt.range(walk.tiles):
        sums = tuple(zero() for _ in words for _ in numbers)
        for chunk in jt.range(chunks):
            k = n * chunks + chunk
            own, read = read, walk.scales(weights, j, kind, k + 1)
            for full in mem.of_role(j):
                full.at(k).wait()
            stored, copied = load(k)
            scales = [[[spread(one, rows) for one in a] for a in of_weight] for of_weight in own or copied]
            mem.empty.at(k).arrive()
            now = held(at(chunk)) if x is None else x
            found = [part for pieces, d in zip(stored, scales) for part in lane_sums(pieces, d, now, kind)]
            sums = tuple(a + b for a, b in zip(sums, found))
        mem.taken.at(n).wait(before=True)
        rings = [ring for of_weight in mem.sums[j] for ring in of_weight]
        for ring, total in zip(rings, sums):
            ring.at(n).store(total)
        mem.done.at(n).arrive()


@jt.function
def _produce(mem, weights, walk: Walk, kind: str, places: Places, ahead: int):
    """Fills the rings, a round of all roles at a time. ahead: how many pieces, of which each has one of the barriers
    `full`, are on their way at a time; 0: as many as there is room for."""
    chunks, first, programs, pieces = walk.chunks, walk.first, walk.programs, len(mem.full)
    sides = pieces // len(weights)
    for k in jt.range(walk.tiles * chunks):
        n, chunk = first + k // chunks * programs, k % chunks
        mem.empty.at(k).wait(before=True)
        for piece, full in enumerate(mem.full):
            if ahead > 0:
                other, back = mem.full[(piece - ahead) % pieces], -((piece - ahead) // pieces)
                if k >= back:
                    other.at(k - back).wait()
            i, side = divmod(piece, sides)
            w, mine = weights[i], range(side * walk.roles // sides, (side + 1) * walk.roles // sides)
            full.at(k).expect(sum(a.nbytes for j in mine for a in leaves((mem.words[j][i], mem.of_blocks[j][i]))))
            for j in mine:
                words, blocks = mem.words[j][i], mem.of_blocks[j][i]
                for array, rings in zip((w.codes, *of_blocks(w, kind)), (words, *blocks)):
                    for group, ring in enumerate(rings):
                        at = places.of_weight(i, n, (chunk * walk.roles + j) * len(rings) + group, walk.rows)
                        tile = array.tiles(*ring.shape).at[at]
                        jt.async_copy(tile, ring.at(k), full.at(k), evict="first")


@jt.function
def _write(mem, x: Rows, weights, epilogue: Epilogue, y, kind: str, activation, walk: Walk, places: Places,
           share):  # fmt: skip
    """Adds up the lanes' sums, and applies the scale of the norm and what follows the product."""
    rows, roles, tiles, first, programs = walk.rows, walk.roles, walk.tiles, walk.first, walk.programs
    m, bias, residual = x.count, epilogue.bias, epilogue.residual
    last = bits_of(kind) < 16 and weights[0].scaled_last(kind)
    whole = jt.cdiv(y.shape[1], rows) - 1

    def of_tile(n):
        """The scales of the rows of tile n, by weight, and their bias."""
        tile = jnp.minimum(first + n * programs, whole)
        scales = [w.scale.tiles(rows, 1)[tile, 0][:, 0] for w in weights] if last else []
        return scales + ([] if bias is None else [bias.tiles(None, rows)[0, tile].astype(jnp.float32)])

    ahead = [of_tile(0), of_tile(1)]  # they come from memory while earlier tiles are summed
    units = [None] * m
    if mem.squared is not None:
        mem.squared.at(0).wait()
        units = [x.scale([mem.squares[j][i].at(0).load() for j in range(roles)]) for i in range(m)]
    for n in jt.range(tiles):
        tile = first + n * programs
        now, ahead = ahead[0], [ahead[1], of_tile(n + 2)]
        scales = now[: len(weights)]
        shift = None if bias is None else now[-1]
        mem.done.at(n).wait()
        found = [[functools.reduce(jnp.add, [mem.sums[j][w][i].at(n).load() for j in range(roles)])
                  for i in range(m)] for w in range(len(weights))]  # fmt: skip
        mem.taken.at(n).arrive()
        for i in range(m):
            sums = [of_weight[i].sum(1) for of_weight in found]
            sums = sums if units[i] is None else [total * units[i] for total in sums]
            sums = [total * scale for total, scale in zip(sums, scales)] if last else sums
            out = ACTIVATIONS[activation](sums[0] if shift is None else sums[0] + shift)
            out = out * sums[1] if len(sums) > 1 else out
            out = out if residual is None else out + residual.tiles(None, rows)[i, tile].astype(jnp.float32)
            row, column = places.of_result(i, tile)
            out = out if share is None else out * share[row]
            y.tiles(None, rows)[row, column] = out.astype(y.dtype)


@jt.function
def _write_sums(x: Rows, total, first, programs):
    """x + residual, to `total`: a program takes every `programs`-th piece."""
    for at in jt.range(first, x.pieces, programs):
        for i in range(total.shape[0]):
            x.view(total)[i, at, 0] = x.before(i, at).astype(total.dtype)


def _outputs(x, weights, *_, out_dtype, **__):
    return jax.ShapeDtypeStruct((x.shape[0], weights[0].codes.shape[0]), jnp.dtype(out_dtype))


def _normed_outputs(x, weights, norm, **options):
    y = _outputs(x, weights, **options)
    return y if norm.residual is None else (y, jt.like(norm.residual))


def _body(x, weights: tuple[Weight, ...], epilogue: Epilogue, y, *, kind: str, activation, out_dtype: str, rows: int,
          roles: int, slots: int, sides: int = 1, ahead: int = 0, early: bool = False,
          beside: bool = False):  # fmt: skip
    """y [m, out] of x [m, in / n, n], n weights to a lane.

    A weight has codes [out, words] or plain numbers [out, in], scale [out, in / group] and, for Q4_1, minimum. With two
    weights y = act(x Gᵀ) * (x Uᵀ). The epilogue may have bias [1, out] and residual [m, out].

    A program takes every `programs`-th tile of `rows` rows, a role 1024 of every `roles` times 1024 weights of a row.
    """
    form = dict(rows=rows, roles=roles, slots=slots, sides=sides, ahead=ahead, early=early, beside=beside)
    program(Rows(x), weights, epilogue, y, None, kind=kind, activation=activation, **form)


def _normed_body(x, weights: tuple[Weight, ...], norm: Norm, y, total=None, *, kind: str, activation,
                 out_dtype: str, eps: float, rows: int, roles: int, slots: int, sides: int = 1, ahead: int = 0,
                 early: bool = False, beside: bool = False):  # fmt: skip
    """The products of `_body` with the RMS norm of x + residual, where norm.residual is [m, in / n, n] and norm.weight
    [in / n, n]; and that sum, `total`, in the dtype of the residual. Without a residual it is the norm of x."""
    form = dict(rows=rows, roles=roles, slots=slots, sides=sides, ahead=ahead, early=early, beside=beside)
    program(Rows(x, norm, eps), weights, NO_EPILOGUE, y, total, kind=kind, activation=activation, **form)


def program(x: Rows, weights, epilogue: Epilogue, y, total, *, kind: str, activation, rows: int, roles: int,
            slots: int, sides: int = 1, ahead: int = 0, early: bool = False, beside: bool = False,
            places: Places = IN_ORDER, count: int | None = None, share=None):  # fmt: skip
    """What a program does. sides: how many barriers a round of a weight has; ahead: see `_produce`; count: tiles of
    rows, if not those of a row of y; share: a factor for each row of y."""
    # y_r = sum_b d_rb (sum_j q_rbj x_bj) + sum_b m_rb (sum_j x_bj)
    first, programs = jt.program_id(0), jt.num_programs(0)
    tiles = ((count or jt.cdiv(y.shape[1], rows)) - first + programs - 1) // programs
    chunks = jt.cdiv(x.x.shape[1] * x.x.shape[2], PIECE * roles)
    walk = Walk(first, programs, tiles, chunks, rows, roles)
    mem = _memory(x, weights, kind, walk, slots, sides)
    mine, aside = _BESIDE if beside else (0, 0)
    for j in range(roles):
        with jt.role(f"consumer{j}", warps=4, registers=mine, early=early):
            scales = walk.scales(weights, j, kind, jnp.int32(0))
            _prepare(x, mem, j, kind, roles, chunks, early)
            _consume(mem, j, kind, weights, walk, scales)
    with jt.role("producer", warps=1, registers=aside or 24, early=early and places.early):
        _produce(mem, weights, walk, kind, places, ahead)
    with jt.role("writer", warps=_WRITERS, registers=aside):
        if total is not None:
            _write_sums(x, total, first, programs)
        _write(mem, x, weights, epilogue, y, kind, activation, walk, places, share)


def _joined_body(o, lse, weight: Weight, epilogue: Epilogue, y, *, kind: str, activation, out_dtype: str, rows: int,
                 roles: int, slots: int, sides: int = 1, ahead: int = 0, early: bool = False,
                 beside: bool = False):  # fmt: skip
    """`_body` for a row whose parts, o [parts, in / n, n], are put together by lse float32 [parts, heads]."""
    form = dict(rows=rows, roles=roles, slots=slots, sides=sides, ahead=ahead, early=early, beside=beside)
    program(Joined(o, lse=lse), (weight,), epilogue, y, None, kind=kind, activation=activation, **form)


@functools.cache
def joined_kernel() -> jt.Kernel:
    """The kernel for a row that attention has left in parts."""
    outputs = lambda o, lse, w, *_, out_dtype, **__: jax.ShapeDtypeStruct((1, w.codes.shape[0]), jnp.dtype(out_dtype))
    grid = lambda o, lse, w, *_, rows, **__: _grid(o, (w,), rows=rows)
    return jt.kernel(out_type=outputs, grid=grid, name="hopper_joined_gemv")(_joined_body)


def joined_product(o, lse, weight: Weight, residual=None, *, kind: str, out_dtype) -> jax.Array:
    """The product [1, out] of a row that attention left in parts: o [parts, in], and lse float32 [parts, heads], the
    logarithms, to the base 2, of their sums of weights; residual: [1, out], which is added, or None."""
    (parts, inner), n = o.shape, 128 // bits_of(kind)
    _, options = _arguments(o[:1], (weight,), kind, None)
    options |= dict(kind=kind, activation=None, out_dtype=jnp.dtype(out_dtype).name)
    return joined_kernel()(o.reshape(parts, inner // n, n), lse, weight, Epilogue(residual=residual), **options)


def kernel(weights: tuple[Weight, ...], epilogue: Epilogue, held: bool = False) -> jt.Kernel:
    """The kernel for operands with these fields; held: that for small matrices."""
    arrays = len(jax.tree.leaves(weights))
    if held:
        return hopper_held.kernel(arrays, epilogue.bias is not None, epilogue.residual is not None)
    return _kernel(arrays, epilogue.bias is not None, epilogue.residual is not None)


def _grid(x, w, *_, rows: int, **__) -> int:
    """A program for each multiprocessor, or fewer where the rows of the matrix are fewer."""
    return min(gpu_tiles.processors(), jt.cdiv(w[0].codes.shape[0], rows))


@functools.cache
def _kernel(arrays: int, has_bias: bool, has_residual: bool) -> jt.Kernel:
    specs = ["m _ _", *["o _"] * arrays, *["_ o"] * has_bias, *["m o"] * has_residual]
    return _tuned(_body, _outputs, f"{', '.join(specs)} -> m o", "hopper_gemv", _KEY)


@functools.cache
def normed_kernel(arrays: int, summed: bool = True) -> jt.Kernel:
    """The kernel with a norm in front, for weights of so many arrays; summed: the norm has a residual."""
    sums = ", m _ _" * summed
    specs = f"m _ _, {', '.join(['o _'] * arrays)}, _ _{sums} -> m o{sums}"
    return _tuned(_normed_body, _normed_outputs, specs, "hopper_norm_gemv", _NORMED_KEY)


def _tuned(body, out_type, sharding: str, name: str, key: tuple[str, ...]) -> jt.Kernel:
    made = jt.kernel(out_type=out_type, grid=_grid, sharding=sharding, name=name)(body)
    return made.autotune(space=_points, key=key, override=True)


def _points(x, weights, *_, kind: str, **__) -> list[dict[str, int]]:
    """The meta-parameters that the tuner tries."""
    inner, lines = x.shape[1] * x.shape[2], scale_bytes(weights[0], x.shape[1] * x.shape[2], kind)
    return choices(x.shape[0], inner, kind, len(weights) > 1, lines, bytes_of(x.dtype))


def _scales_fit(weight: Weight, inner: int, kind: str) -> bool:
    """Whether scales come by copies of 16 bytes or more; or the roles read them, which costs little where rows are
    short, and other kernels would not overlap."""
    if in_lines(weight, kind):
        return all(n >= 16 for n in scale_bytes(weight, inner, kind))
    whole = weight.codes.shape[1] * 4 % 16 == 0 and all(of_piece(a, inner, kind) for a in by_block(weight, kind))
    return whole and inner <= _SHORT and gpu_tiles.overlaps()


def misfit(x, weight: Weight, kind: str, gated: bool = False) -> str | None:
    """Why the kernel does not compute x [m, in] times packed codes, or a matrix [out, in] of x's own dtype; None where
    it does."""
    m, inner = x.shape
    if not all(isinstance(n, int) and n > 0 for n in (m, inner, *weight.codes.shape)):
        return "sizes are 0, or not known"
    if m > 2:
        return f"there are {m} rows, and lanes hold two"
    if bits_of(kind) == 16:
        fits = weight.codes.dtype == x.dtype and x.dtype in (jnp.bfloat16, jnp.float16) and inner % 8 == 0
        why = f"the matrix is {weight.codes.dtype.name}, with {inner} columns: not 16-bit floats as the rows, in eights"
    else:
        fits = weight.codes.dtype == jnp.uint32 and inner % BLOCK == 0 and _scales_fit(weight, inner, kind)
        why = f"codes are {weight.codes.dtype.name} of {inner} columns: not packed words, or not in lines of copies"
    return first_unmet(
        (fits, why),
        (
            bool(choices(m, inner, kind, gated, scale_bytes(weight, inner, kind), bytes_of(x.dtype))),
            f"rows of {inner} leave no room in shared memory",
        ),
    )


def product(
    x, weights: tuple[Weight, ...], epilogue: Epilogue = NO_EPILOGUE, *, kind: str, activation=None,
    out_dtype=jnp.float32,
) -> jax.Array:  # fmt: skip
    """The product [m, out] of x [m, in] and one weight, or the gated one of two; bias [1, out], residual [m, out]."""
    rows = hopper_held.choice(x, weights, kind)
    x, options = _arguments(x, weights, kind, rows)
    options |= dict(kind=kind, activation=activation, out_dtype=jnp.dtype(out_dtype).name)
    return kernel(weights, epilogue, rows is not None)(x, weights, epilogue, **options)


def normed_product(
    x, weights: tuple[Weight, ...], norm: Norm, *, kind: str, eps: float, activation=None, out_dtype=jnp.float32
) -> tuple[jax.Array, jax.Array]:
    """`product` of the RMS norm of x + norm.residual [m, in], and that sum in the residual's dtype; without a residual
    of the norm of x, and x."""
    (m, inner), n = x.shape, 128 // bits_of(kind)
    given, rows, summed = x, hopper_held.choice(x, weights, kind), norm.residual is not None
    x, options = _arguments(x, weights, kind, rows)
    in_lanes = lambda a: None if a is None else a.reshape(*a.shape[:-1], inner // n, n)
    norm = Norm(in_lanes(norm.weight), in_lanes(norm.residual))
    options |= dict(kind=kind, activation=activation, out_dtype=jnp.dtype(out_dtype).name, eps=eps)
    arrays = len(jax.tree.leaves(weights))
    found = normed_kernel(arrays, summed) if rows is None else hopper_held.normed_kernel(arrays, summed)
    if not summed:
        return found(x, weights, norm, **options), given
    y, total = found(x, weights, norm, **options)
    return y, total.reshape(m, inner)


def _arguments(x, weights: tuple[Weight, ...], kind: str, rows: int | None) -> tuple[jax.Array, dict]:
    """x as the kernels take it, and their meta-parameters; rows: those of a program where a small matrix is held."""
    n = 128 // bits_of(kind)
    if rows is not None:
        return x.reshape(x.shape[0], x.shape[1] // n, n), {"rows": rows} | ({"hold": True} if gpu_tiles.holds() else {})
    lines = scale_bytes(weights[0], x.shape[1], kind)
    options = (*x.shape, kind, len(weights) > 1, lines, bytes_of(x.dtype))
    beside = gpu_tiles.overlaps() and _stands_beside(x, weights) and bool(choices(*options, True))
    meta = choices(*options, beside)
    best = meta[0]
    if bits_of(kind) < 16 and x.shape[1] <= PIECE and weights[0].codes.shape[0] >= _MANY * gpu_tiles.processors():
        best = form(*options[:4], _TALL, 1, *options[4:], NARROW if beside else SHARED) or best
    if bits_of(kind) == 16:  # tall tiles are best, unless so few that many multiprocessors have one less than others
        tiles = lambda one: jt.cdiv(weights[0].codes.shape[0], one["rows"])
        busy = lambda one: tiles(one) / (jt.cdiv(tiles(one), gpu_tiles.processors()) * gpu_tiles.processors())
        best = next(one for one in meta if busy(one) > 0.85 * max(map(busy, meta)))
    x = x if x.dtype in (jnp.bfloat16, jnp.float16) else x.astype(jnp.float32)
    early = {"early": True} | paced(best, kind, len(weights), lines) if gpu_tiles.overlaps() else {}
    early |= {"beside": True} if beside else {}
    return x.reshape(x.shape[0], x.shape[1] // n, n), best | early


def lanes_of_sum(x, weight: Weight, kind: str) -> int:
    """How many lanes of a row of W a thread adds up by itself, one after the other, before threads add up theirs."""
    rows = _arguments(x, (weight,), kind, None)[1]["rows"]
    return min(max(rows * LANES // (_WRITERS * 32), 1), 4)


def _stands_beside(x, weights: tuple[Weight, ...]) -> bool:
    """Whether a product may stand in front of attention or behind it, where a decoder has kernels that overlap: gated
    products and those of long rows stand between other products, for which there is no room beside them. Two rows, or
    32-bit ones, take the registers."""
    return len(weights) == 1 and x.shape[0] == 1 and x.shape[1] <= 4 * PIECE and x.dtype.itemsize == 2
