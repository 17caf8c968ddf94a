"""Vector helpers of the matmul generator: partial loads and stores, interleaves, transposes, horizontal sums."""

from __future__ import annotations

from .gemm_modes import BYTES
from .isa import Isa
from .llvm import Code, Val, const, i64, intrinsic_suffix, lanes_of, scalar_of, shuffle, vec

# LLVM turns copy loops into memcpy calls unless told not to; an image may have no undefined symbol.
ATTRIBUTES = 'nounwind "no-builtins"'


def call(c: Code, name: str, *args: Val) -> None:
    c.do(f"call void @{name}({', '.join(map(str, args))})")


def zeros(ty: str) -> Val:
    return Val(ty, "zeroinitializer") if lanes_of(ty) > 1 else const(ty, "0.0" if ty in ("float", "double") else "0")


def _has_masks(isa: Isa, elem: str) -> bool:
    return isa.has("avx512bw", "avx512vl") or (isa.has("avx") and BYTES[elem] >= 4)


def _mask(lanes: int, count: int) -> Val:
    return Val(vec(lanes, "i1"), "<" + ", ".join(f"i1 {int(i < count)}" for i in range(lanes)) + ">")


def load_part(c: Code, isa: Isa, elem: str, ptr: Val, lanes: int, count: int) -> Val:
    """`lanes` elements of which the first `count` come from memory and the others are zero; reads nothing else."""
    ty = vec(lanes, elem)
    if count <= 0:
        return zeros(ty)
    if count == lanes:
        return c.load(ty, ptr, align=BYTES[elem])
    if _has_masks(isa, elem):
        suffix = f"{intrinsic_suffix(ty)}.p0"
        return c.intrinsic(
            "masked.load", ty, ptr, Val("i32", str(BYTES[elem])), _mask(lanes, count), zeros(ty), suffix=suffix
        )
    part = c.load(vec(count, elem), ptr, align=BYTES[elem])
    if count == 1:
        return c.let(ty, f"insertelement {zeros(ty)}, {part}, i64 0")
    return shuffle(c, part, zeros(part.ty), [min(i, count) for i in range(lanes)])


def store_part(c: Code, isa: Isa, x: Val, ptr: Val, count: int) -> None:
    """Store the first `count` lanes of x; writes nothing else."""
    elem, lanes = scalar_of(x.ty), lanes_of(x.ty)
    if count == lanes:
        c.store(x, ptr, align=BYTES[elem])
    elif _has_masks(isa, elem):
        suffix = f"{intrinsic_suffix(x.ty)}.p0"
        c.intrinsic("masked.store", "void", x, ptr, Val("i32", str(BYTES[elem])), _mask(lanes, count), suffix=suffix)
    elif count == 1:
        c.store(extract(c, x, 0), ptr, align=BYTES[elem])
    else:
        c.store(shuffle(c, x, x, list(range(count))), ptr, align=BYTES[elem])


def extract(c: Code, x: Val, lane: int) -> Val:
    return c.let(scalar_of(x.ty), f"extractelement {x}, i64 {lane}") if lanes_of(x.ty) > 1 else x


def slice_lanes(c: Code, x: Val, first: int, count: int) -> Val:
    """Lanes first .. first + count of x; one lane is a scalar."""
    if count == lanes_of(x.ty):
        return x
    return extract(c, x, first) if count == 1 else shuffle(c, x, x, list(range(first, first + count)))


def interleave(c: Code, rows: list[Val]) -> Val:
    """Rows [group][lanes] as one vector [lanes][group]; the number of rows is a power of two."""
    while len(rows) > 1:
        half = len(rows) // 2
        n = lanes_of(rows[0].ty)
        order = [i // 2 + (i % 2) * n for i in range(2 * n)]
        rows = [shuffle(c, rows[i], rows[i + half], order) for i in range(half)]
    return rows[0]


def transpose(c: Code, rows: list[Val]) -> list[Val]:
    """A square block of `n` vectors of `n` lanes, n a power of two, with rows and columns exchanged."""
    n, width = len(rows), 1
    while width < n:
        low = [i if not i & width else i - width + n for i in range(n)]
        high = [i + width if not i & width else i + n for i in range(n)]
        out = list(rows)
        for i in range(n):
            if not i & width:
                out[i] = shuffle(c, rows[i], rows[i + width], low)
                out[i + width] = shuffle(c, rows[i], rows[i + width], high)
        rows, width = out, 2 * width
    return rows


def sums(c: Code, vectors: list[Val]) -> Val:
    """Lane i of the result sums the lanes of `vectors[i]`; their number is a power of two, at most the lanes.

    The halves of a vector are added, then the halves of that, and so on, however many vectors there are: a sum has the
    same bits in any company."""
    op = "fadd" if scalar_of(vectors[0].ty) in ("float", "double") else "add"
    each = lanes_of(vectors[0].ty)
    while each > 1:  # `each` lanes side by side are what is left of a vector
        each //= 2
        pairs = list(zip(vectors[0::2], vectors[1::2])) or [(vectors[0], vectors[0])]
        low = [i for i in range(lanes_of(vectors[0].ty) * min(len(vectors), 2)) if not i & each]
        high = [i + each for i in low]
        vectors = [c.binary(op, _lanes(c, x, y, low), _lanes(c, x, y, high)) for x, y in pairs]
    return vectors[0]


def _lanes(c: Code, x: Val, y: Val, lanes: list[int]) -> Val:
    """`shuffle`, whose result is a scalar where it has one lane."""
    return extract(c, x, lanes[0]) if len(lanes) == 1 else shuffle(c, x, y, lanes)


def prefetch(c: Code, ptr: Val, level: int) -> None:
    """Ask the cache of a level, 1 to 3, for the line of an address, which need not exist."""
    hints = (Val("i32", str(n)) for n in (0, 4 - level, 1))  # it will be read; the closest cache is 3; data
    c.intrinsic("prefetch", "void", ptr, *hints, suffix="p0")


def fetch_rows(c: Code, ptr: Val, ld: Val, size: tuple[int, int]) -> Val:
    """Ask the second-level cache for so many rows of so many bytes, `ld` bytes apart; the address of the row behind."""
    rows, width = size
    for _ in range(rows):
        for at in sorted({*range(0, width, 64), width - 1}):  # rows may begin anywhere in a line
            prefetch(c, c.gep("i8", ptr, i64(at)), 2)
        ptr = c.gep("i8", ptr, ld)
    return ptr


def offset(c: Code, ptr: Val, count: Val | int, size: Val | int) -> Val:
    """`ptr` plus `count * size` bytes."""
    return c.gep("i8", ptr, c.mul(count if isinstance(count, Val) else i64(count), size))
