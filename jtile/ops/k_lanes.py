"""Products with K-quants on GPUs; the arrays are in super_blocks.py, the public functions in quantized.py.

One or two rows of x: the planes of codes are read as 32-bit words, four codes of each part are put together in a word
at a time, and its bytes become float32 as in quantized_lanes.py, without a conversion. More rows: parts of W are
dequantised between memory and the matrix units, beside a 16-bit x as the sum of two bfloat16.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jtile as jt
from jtile.ops import dispatch
from jtile.ops._shapes import fit, known, tuned
from jtile.ops.epilogues import ACTIVATIONS, finished
from jtile.ops.operands import NO_EPILOGUE, Epilogue
from jtile.ops.quantized_lanes import DOWN, LARGE, SMALL, plain_fields, plain_planes, scaled_fields, scaled_planes, side
from jtile.ops.super_blocks import LAYOUTS, RUN, SUPER, Layout, SuperBlocks, as_bytes, integers

ONES = 0x01010101  # a bit of every byte of a word


def _sides(layout: Layout) -> tuple[int, int]:
    """(sub-blocks of a part, weights of a part)."""
    return layout.runs * layout.wide, layout.runs * RUN


class _Chunk:
    """Some super blocks of some rows of W, of which nothing is read from memory twice.

    Its arrays are those that `split` gives. `words`: codes are taken as words of four, else as bytes."""

    def __init__(self, weight: SuperBlocks, layout: Layout, r, chunk, rows: int, blocks: int, words: bool):
        self.weight, self.layout, self.words = weight, layout, words
        self.at, self.rows, self.blocks = (r, chunk), rows, blocks
        self._run = functools.cache(self._read_run)
        self.of_block = functools.cache(
            lambda name: getattr(weight, name).tiles(rows, blocks)[self.at].astype(jnp.float32)[:, :, None]
        )

    def _read_run(self, name: str, run: int):
        """A part's runs of a plane: [rows, blocks, subs of a part, bytes or words of a sub-block]."""
        plane, subs = getattr(self.weight, name), _sides(self.layout)[0]
        tiles = plane.tiles(self.rows, self.blocks, self.layout.runs, None, plane.shape[4])
        stored = tiles[*self.at, 0, run, 0]
        if not self.words or plane.dtype == jnp.uint32:
            return stored.reshape(self.rows, self.blocks, subs, -1)
        bytes_ = stored.reshape(self.rows, self.blocks, subs, self.layout.sub // 4, 4).astype(jnp.uint32)
        return functools.reduce(jnp.bitwise_or, [bytes_[..., k] << np.uint32(8 * k) for k in range(4)])

    def codes(self, part: int):
        """The codes of a part: uint32 words of four [rows, blocks, subs, words], or uint8 [.., subs, weights]."""
        value, shift, kind = None, 0, np.uint32 if self.words else np.uint8
        for name, bits in zip(("codes", "high"), self.layout.bits):
            run, field = self.layout.place(part, bits)
            mask = kind(((1 << bits) - 1) * (ONES if self.words else 1))
            found = (self._run(name, run) >> kind(bits * field)) & mask
            value = found if value is None else value | (found << kind(shift))
            shift += bits
        return value

    def scales(self, part: int):
        """The scales of a part's sub-blocks, and what is taken from their weights or None: [rows, blocks, subs]."""
        of_part = lambda a: a if a is None else a.tiles(self.rows, self.blocks, None, a.shape[3])[*self.at, part, 0]
        steps, lows = integers(of_part(self.weight.steps), of_part(self.weight.lows), self.layout)
        scale = self.of_block("scale") * steps
        if lows is not None:
            return scale, self.of_block("minimum") * lows
        return scale, scale * np.float32(self.layout.zero) if self.layout.zero else None


@jt.function
def lane_products(x, of, weights, r, kind: str, rows: int, blocks: int):
    """For each weight, and for each row `of` x, the products with `rows` rows of W: float32 [rows]. Operands as those
    of `k_gemv_lanes`."""
    m, layout = len(of), LAYOUTS[kind]
    subs, width = _sides(layout)

    def summed(blocks, scaled, fields_of):
        """For each weight and row of x its products with the rows of W, and the largest |x| in lanes."""
        shape = (blocks, subs, width // subs // 4)
        sums = tuple(jnp.zeros((rows, *shape), jnp.float32) for _ in range(m * len(weights)))
        top = jnp.zeros(shape, jnp.float32)
        for chunk in jt.range(jt.cdiv(x.shape[1], blocks)):
            parts = [_Chunk(w, layout, r, chunk, rows, blocks, words=True) for w in weights]
            for p in range(layout.parts):
                numbers = [x.tiles(None, blocks, layout.runs, None, RUN)[i, chunk, 0, p, 0] for i in of]
                numbers = [part.astype(jnp.float32).reshape(*shape, 4) for part in numbers]
                planes = [[of_row[..., byte] for byte in range(4)] for of_row in numbers]
                top = functools.reduce(jnp.maximum, [abs(plane) for of_row in planes for plane in of_row], top)
                xs = [scaled(of_row) for of_row in planes]
                terms = [term for part in parts for term in _terms(part, p, xs, fields_of)]
                sums = tuple(total + term for total, term in zip(sums, terms))
        return tuple(total.sum(axis=(1, 2, 3)) for total in sums), top

    sums, top = summed(blocks, scaled_planes, scaled_fields)
    sums = tuple(total * jnp.float32(DOWN) for total in sums)
    peak = top.max()
    if (peak >= LARGE) | ((peak > 0) & (peak < SMALL)):  # x is out of the scaled numbers' range: sum once more
        sums, _ = summed(max(blocks // 4, 1), plain_planes, plain_fields)
    return sums


@jt.kernel(
    out_type=lambda x, weights, *_, **__: jax.ShapeDtypeStruct((x.shape[0], weights[0].scale.shape[0]), jnp.float32),
    grid=lambda x, weights, *_, rows, **__: jt.cdiv(weights[0].scale.shape[0], rows),
)
def k_gemv_lanes(
    x, weights: tuple[SuperBlocks, ...], epilogue: Epilogue, y, *, kind: str, activation, rows: int, blocks: int
):
    """`rows` rows of W in a program, `blocks` super blocks at a time, for one or two rows of x.

    x [m, super blocks, runs of a part, parts, 32]; arrays of W as `split` gives them; with a second weight
    y = act(x Gᵀ) * (x Uᵀ).
    """
    m, r = x.shape[0], jt.program_id(0)
    sums = lane_products(x, range(m), weights, r, kind, rows, blocks)
    for i in range(m):
        found = [sums[n * m + i] for n in range(len(weights))]
        first = found[0] if epilogue.bias is None else found[0] + epilogue.bias.tiles(1, rows)[0, r][0]
        out = ACTIVATIONS[activation](first) * (found[1] if len(found) > 1 else 1.0)
        out = out if epilogue.residual is None else out + epilogue.residual.tiles(1, rows)[i, r][0]
        y.tiles(1, rows)[i, r] = out[None, :]


def _terms(chunk: _Chunk, part: int, xs, fields_of) -> list:
    """The terms that a part adds to the products with the rows of x; `xs`: the planes of each row, and their sums."""
    fields, (scale, low) = fields_of(chunk.codes(part)), chunk.scales(part)
    out = []
    for planes, total in xs:
        term = functools.reduce(jnp.add, [field * plane[None] for field, plane in zip(fields, planes)])
        term = scale[..., None] * term
        out.append(term if low is None else term - low[..., None] * total[None])
    return out


def dequantized_parts(weight: SuperBlocks, layout: Layout, r, chunk, rows: int) -> list:
    """The parts of a super block of W in float32: [rows, weights of a part]."""
    tile, found = _Chunk(weight, layout, r, chunk, rows, 1, words=False), []
    for part in range(layout.parts):
        scale, low = tile.scales(part)
        W = scale[..., None] * tile.codes(part).astype(jnp.float32)
        found.append((W if low is None else W - low[..., None]).reshape(rows, -1))
    return found


@jt.kernel(
    out_type=lambda x, weights, *_, **__: jax.ShapeDtypeStruct((x.shape[0], weights[0].scale.shape[0]), jnp.float32),
    grid=lambda x, weights, *_, rows, bm, **__: (jt.cdiv(weights[0].scale.shape[0], rows), jt.cdiv(x.shape[0], bm)),
)
def k_gemm_lanes(
    x, weights: tuple[SuperBlocks, ...], epilogue: Epilogue, y, *, kind: str, activation, rows: int, bm: int
):
    """The products of `bm` rows of x with `rows` rows of W in a program; operands as those of `k_gemv_lanes`."""
    # Y = X Wᵀ, a sum over super blocks, their parts, and the terms that W is split into
    r, i, layout = jt.program_id(0), jt.program_id(1), LAYOUTS[kind]
    X = x.tiles(bm, None, layout.runs, None, RUN)
    sums = tuple(jnp.zeros((bm, rows), jnp.float32) for _ in weights)
    for chunk in jt.range(x.shape[1]):
        found = []
        for weight, total in zip(weights, sums):
            for part, W in enumerate(dequantized_parts(weight, layout, r, chunk, rows)):
                top = W.astype(x.dtype)
                rest = [] if x.dtype == jnp.float32 else [(W - top.astype(jnp.float32)).astype(x.dtype)]
                for term in (top, *rest):
                    total = jt.dot(X[i, chunk, 0, part, 0].reshape(bm, -1), term.T, total)
            found.append(total)
        sums = tuple(found)
    y.tiles(bm, rows)[i, r] = finished(sums, epilogue, activation, i, r, bm, rows)


@jt.kernel(
    out_type=lambda g, weight, *, kind, **_: jax.ShapeDtypeStruct(
        (g.shape[0], weight.scale.shape[1], LAYOUTS[kind].runs, LAYOUTS[kind].parts, RUN), jnp.float32
    ),
    grid=lambda g, weight, *, bm, **_: (jt.cdiv(g.shape[0], bm), weight.scale.shape[1]),
)
def k_dx_lanes(g, weight: SuperBlocks, dx, *, kind: str, rows: int, bm: int):
    """dx [m, super blocks, runs of a part, parts, 32] for the cotangents g [m, out] of x Wᵀ."""
    # dX = G W
    i, chunk, layout = jt.program_id(0), jt.program_id(1), LAYOUTS[kind]
    G, width = g.tiles(bm, rows), _sides(layout)[1]
    sums = tuple(jnp.zeros((bm, width), jnp.float32) for _ in range(layout.parts))
    for r in jt.range(G.shape[1]):
        parts = dequantized_parts(weight, layout, r, chunk, rows)
        sums = tuple(jt.dot(G[i, r], W, total) for W, total in zip(parts, sums))
    for part, total in enumerate(sums):
        dx.tiles(bm, None, layout.runs, None, RUN)[i, chunk, 0, part, 0] = total.reshape(bm, layout.runs, RUN)


def split(weight: SuperBlocks, layout: Layout) -> SuperBlocks:
    """The arrays of W [.., out, …] with an axis of super blocks, planes also with axes of the runs of a part and of
    those between them."""
    lead = weight.scale.shape
    sides = lambda bits: (*lead, layout.runs, bits // layout.runs, -1)
    runs = lambda plane, bits: None if plane is None else plane.reshape(sides(bits))
    groups = lambda plane: None if plane is None else plane.reshape(*lead, -1, _sides(layout)[0])
    codes, high = (runs(plane, bits) for plane, bits in zip((weight.codes, weight.high), (*layout.bits, 0)))
    return weight._replace(codes=codes, high=high, steps=groups(weight.steps), lows=groups(weight.lows))


def flat(weight: SuperBlocks) -> SuperBlocks:
    """The inverse of the split that the kernels take."""
    return SuperBlocks(*(None if a is None else a.reshape(a.shape[0], -1) for a in weight))


def gemv_choice(products: int, out: int, blocks: int, kind: str) -> tuple[dict[str, int], int]:
    """Meta-parameters and warps of the kernel for few rows of x, of which each program makes so many `products`."""
    most = 4 // products
    tiles = {"rows": next(n for n in (4, 2, 1) if n <= max(most, 1) and out % n == 0)}
    tiles["blocks"] = min(16, jt.next_power_of_2(blocks))
    return tiles, min(4, max(1, tiles["blocks"] * SUPER // LAYOUTS[kind].parts // 512))


def product(
    x, weights: tuple[SuperBlocks, ...], epilogue: Epilogue = NO_EPILOGUE, *, kind: str, activation=None
) -> jax.Array:
    """The product, float32 [m, out], of x [m, in] and one weight, or the gated one of two; bias [1, out], residual
    [m, out]."""
    layout, (out, blocks) = LAYOUTS[kind], weights[0].scale.shape
    options = {"kind": kind, "activation": activation}
    few = known(x.shape[0]) <= 2 and not dispatch.vector_cores()
    if not few:
        weights = tuple(w._replace(codes=as_bytes(w.codes), high=as_bytes(w.high)) for w in weights)
    weights = tuple(split(w, layout) for w in weights)
    if x.dtype != jnp.bfloat16:
        x = x.astype(jnp.float32)
    x = x.reshape(x.shape[0], blocks, layout.runs, layout.parts, RUN)
    if few:
        tiles, warps = gemv_choice(x.shape[0] * len(weights), out, blocks, kind)
        return tuned(k_gemv_lanes, num_warps=warps)(x, weights, epilogue, **options, **tiles)
    most = 64 if x.dtype == jnp.float32 or len(weights) > 1 else 128
    sides = {"rows": side(out, 64), "bm": side(known(x.shape[0]), most)}
    return k_gemm_lanes(x, weights, epilogue, **options, **sides)


def dx(g, weight: SuperBlocks, kind: str) -> jax.Array:
    """The cotangent of x, float32 [m, in], for the cotangents g [m, out] of a product with W, whose codes are bytes."""
    found = k_dx_lanes(g, split(weight, LAYOUTS[kind]), kind=kind, rows=32, bm=fit(g.shape[0], 64))
    return found.reshape(g.shape[0], weight.scale.shape[1] * SUPER)
