"""Sine, cosine, tangent and their inverses, for float and double vectors over the whole range."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from . import math_tables as tables
from .llvm import Code, Val, i64, like, scalar_of, vec
from .math_expr import X, estrin, fast_two_sum, horner, magic_int, magic_round, two_product, two_sum

PI_2, PI_2_LO = float.fromhex("0x1.921fb54442d18p+0"), float.fromhex("0x1.1a62633145c07p-54")
PI = 2 * PI_2
# pi/2 rounded to the width, and what that leaves out.
PI_2_PAIR = {32: (float.fromhex("0x1.921fb6p+0"), float.fromhex("-0x1.777a5cp-25")), 64: (PI_2, PI_2_LO)}
# pi/2 as a sum; the first three have 33 bits, so that products with a quadrant count below 2^20 are exact.
PI_2_PARTS = tuple(
    map(float.fromhex, ("0x1.921fb544p+0", "0x1.0b4611a6p-34", "0x1.3198a2ep-69", "0x1.b839a252049c1p-104"))
)
TWO_PI_INVERSE = 0.63661977236758134
REDUCTION_LIMIT = 2.0**20
# pi as a sum: 33 bits, and 53 more.
PI_PARTS = 2 * PI_2_PARTS[0], float.fromhex("0x1.0b4611a626331p-33")
PI_INVERSE = 0.31830988618379067
NEAR = 2.0**-32  # how near to a multiple of pi an angle may lie, relative to itself, so that 86 bits of pi are enough


def _reduce_medium(x: X) -> tuple[X, X, X]:
    """Reduce |x| <= 2^20 to (r, r_lo, q) with x = q pi/2 + r + r_lo, |r| <= pi/4; q is an i64."""
    n, t = magic_round(x * TWO_PI_INVERSE)
    r = x - n * PI_2_PARTS[0]
    r, e1 = two_sum(r, -n * PI_2_PARTS[1])
    r, e2 = two_sum(r, -n * PI_2_PARTS[2])
    r, lo = fast_two_sum(r, e1 + e2 - n * PI_2_PARTS[3])
    return r, lo, magic_int(t)


def _words_of_two_over_pi(x: X, k: X, count: int) -> list[X]:
    """Words k, k+1, ... of the bits of 2/pi, each lane its own k; zero-extended to i64."""
    words = tables.TWO_OVER_PI
    name = "@jtile_two_over_pi"
    body = ", ".join(f"i32 {w}" for w in words)
    x.code.module.globals.setdefault(name, f"{name} = internal constant [{len(words)} x i32] [{body}], align 64")
    out = []
    for i in range(count):
        index = (k + i).v
        pointers = x.code.let(like(x.ty, "ptr"), f"getelementptr i32, ptr {name}, {index}")
        if x.lanes == 1:
            word = x.code.load("i32", pointers)
        else:
            ty, mask = vec(x.lanes, "i32"), Val(vec(x.lanes, "i1"), "splat (i1 true)")
            suffix = f"v{x.lanes}i32.v{x.lanes}p0"
            x.code.module.declare(f"llvm.masked.gather.{suffix}", f"{ty} @{{}}({pointers.ty}, i32, {mask.ty}, {ty})")
            call = f"call {ty} @llvm.masked.gather.{suffix}({pointers}, i32 4, {mask}, {ty} zeroinitializer)"
            word = x.code.let(ty, call)
        out.append(x.new(word).cast("zext", "i64"))
    return out


def _reduce_huge(x: X) -> tuple[X, X, X]:
    """Reduce any finite x by a fixed-point product of its mantissa and the needed bits of 2/pi (Payne and Hanek)."""
    low32 = (1 << 32) - 1
    bits = x.bits()
    mantissa = (bits & ((1 << 52) - 1)) | (1 << 52)
    shift = (bits.lshr(52) & 0x7FF) - (1075 - 64)  # |x| = mantissa 2^(shift - 64); the words begin with 64 zero bits
    shift = shift.at_least(32)  # a lane of small x, whose result is not used, gets an index that exists
    k = shift.lshr(5)
    s = shift & 31
    w = _words_of_two_over_pi(x, k - 1, 8)
    t = [((a << s) & low32) | (b << s).lshr(32) for a, b in itertools.pairwise(w)]
    m0, m1 = mantissa & low32, mantissa.lshr(32)
    # Digit i (weight 2^-32i) of mantissa * t, schoolbook, with the carries gathered from the lowest digit up.
    lo = [m0 * t[i] for i in range(7)]
    hi = [m1 * t[i] for i in range(7)]
    carry, digits = lo[6].lshr(32), []
    for i in range(5, -1, -1):
        total = (lo[i] & low32) + (hi[i + 1] & low32) + carry
        digits.insert(0, total & low32)
        carry = total.lshr(32) + lo[i].lshr(32) + hi[i + 1].lshr(32)
    quadrant, fraction = digits[0], digits[1:]
    up = fraction[0].lshr(31)  # fraction >= 1/2: take it from the next quadrant, as a negative number
    first = (fraction[0] << 32) >> 32
    parts = [_i64_to_double(first)] + [_i64_to_double(d) for d in fraction[1:]]
    r, lo_word = fast_two_sum(parts[0] * 2.0**-32, parts[1] * 2.0**-64)
    r, e = two_sum(r, parts[2] * 2.0**-96)
    r, lo_word = fast_two_sum(r, lo_word + e + parts[3] * 2.0**-128)
    p, q = two_product(r, r.const(PI_2))
    p, q = fast_two_sum(p, q + (r * PI_2_LO + lo_word * PI_2))
    quadrant = quadrant + up
    negative = bits < 0
    return negative.where(-p, p), negative.where(-q, q), negative.where(0 - quadrant, quadrant)


def _i64_to_double(d: X) -> X:
    """An integer of at most 33 bits and a sign, exactly: its bits under the exponent of 1.5 * 2^52."""
    return (d + 0x4338000000000000).as_float() - 1.5 * 2.0**52


WORD = 8  # bytes of a double, and of an i64
FAR = "double", "double", "i64"  # what a reduction gives


def _apart(x: X, name: str, function: Callable[[X], Sequence[X]], kinds: Sequence[str]) -> list[X]:
    """The results, of these kinds, of a function that lies apart. It is as long as the rest of a sine together and
    hardly ever runs, so that LLVM compiles it once for a kernel, in vectors of one register, and not wherever an angle
    is reduced."""
    code, lanes = x.code, min(x.lanes, x.isa.lanes(64))
    name = f"jtile_{name}_{lanes}"
    if name not in code.module.functions:
        _define(x, name, lanes, function, len(kinds))
    given, *results = [code.var(like(x.ty, kind), align=WORD) for kind in ("double", *kinds)]
    code.store(x.v, given, align=WORD)
    pointers = ", ".join(map(str, (given, *results)))
    code.do(f"call void @{name}({pointers}, {i64(x.lanes)})")
    return [x.new(code.load(like(x.ty, k), slot, align=WORD)) for k, slot in zip(kinds, results, strict=True)]


def _define(x: X, name: str, lanes: int, function: Callable[[X], Sequence[X]], count: int) -> None:
    """Adds a function of n doubles in memory, with `count` results behind them, to the module."""
    params = [*(Val("ptr noalias", f"%p{k}") for k in range(1 + count)), Val("i64", "%n")]
    code = Code(x.code.module, name, params, attributes="noinline")
    given, *results = (Val("ptr", p.name) for p in params[:-1])
    with code.loop(0, params[-1], lanes) as i:
        part = X(code, x.isa, code.load(vec(lanes, "double"), code.gep("double", given, i), align=WORD))
        for out, value in zip(results, function(part), strict=True):
            code.store(value.v, code.gep(scalar_of(value.ty), out, i), align=WORD)
    code.finish()


def _reduced(x: X) -> tuple[X, X, X]:
    """`_reduce_medium`, and a branch to `_reduce_huge` when one finite lane is beyond its range (rare)."""
    code = x.code
    r, lo, q = _reduce_medium(x)
    slots = [code.var(v.ty, v.v) for v in (r, lo, q)]
    huge = (x.abs() > REDUCTION_LIMIT) & (x.abs() < float("inf"))
    with code.when(huge.any()):
        for slot, near, far in zip(slots, (r, lo, q), _apart(x, "reduce_huge", _reduce_huge, FAR), strict=True):
            code.store(huge.where(far, near).v, slot)
    r, lo, q = (x.new(code.load(v.ty, slot)) for v, slot in zip((r, lo, q), slots, strict=True))
    return (x.abs() < float("inf")).where(r, float("nan")), lo, q


def sin_cos_kernel(r: X, lo: X | None) -> tuple[X, X]:
    """sin and cos of r + lo, |r| <= pi/4."""
    z = r * r
    sine = (z * r) * horner(z, tables.SIN[r.fmt.bits])
    cosine = (z * z) * horner(z, tables.COS[r.fmt.bits])
    half = z * 0.5
    one = 1.0 - half
    if lo is None:
        return r + sine, one + (((1.0 - one) - half) + cosine)
    return r + (sine + lo * one), one + (((1.0 - one) - half) + (cosine - r * lo))


def _sin_cos(x: X) -> tuple[X, X, X]:
    """sin and cos of the reduced argument in x's own width, and the quadrant (an integer of x's width)."""
    if x.scalar == "float":
        # x is reduced in double, where 33 + 53 bits of pi/2 leave 24 good bits at the worst float, and sin in float.
        r, _, q = _reduced(x.to("double"))
        s, c = sin_cos_kernel(r.to("float"), None)
        return s, c, q.cast("trunc", "i32")
    r, lo, q = _reduced(x)
    s, c = sin_cos_kernel(r, lo)
    return s, c, q


def _quadrant(s: X, c: X, q: X) -> X:
    """sin of the full argument from s and c of the reduced one: swapped for odd q, negated for q = 2, 3 modulo 4."""
    bits = s.fmt.bits
    value = (q & 1).ne(0).where(c, s)
    return (value.bits() ^ ((q & 2) << (bits - 2))).as_float()


def sin(x: X) -> X:
    if x.scalar == "double":
        return _double_sin(x)
    s, c, q = _sin_cos(x)
    return x.eq(0.0).where(x, _quadrant(s, c, q))


def cos(x: X) -> X:
    if x.scalar == "double":
        return _double_cos(x)
    s, c, q = _sin_cos(x)
    return _quadrant(s, c, q + 1)


def _double_sin(x: X) -> X:
    n, t = magic_round(x * PI_INVERSE)
    y, r = _sin_beside(x, n)
    sign = r.bits() ^ (t.bits() << 63)  # of r, so that a zero keeps its own, and the other one for odd n
    return _or_far(x, y.copysign(sign.as_float()), r, "sin")


def _double_cos(x: X) -> X:
    n, t = magic_round(x * PI_INVERSE - 0.5)
    h = n + 0.5
    y, r = _sin_beside(x, h)
    sign = (t.bits() << 63) ^ -(1 << 63)  # cos(n pi + pi/2 + r) = -sin(r) for even n
    return _or_far(x, (y.bits() ^ sign).as_float(), r, "cos")


def _sin_beside(x: X, n: X) -> tuple[X, X]:
    """sin(r) and r, for x = n pi + r + lo, |r| <= pi/2. Half of pi/2 would need a cosine besides, and a choice."""
    first = (-n).fma(PI_PARTS[0], x)
    r = (-n).fma(PI_PARTS[1], first)
    lo = (-n).fma(PI_PARTS[1], first - r)
    z, z_lo = two_product(r, r)  # the last bits of r^3 / 6 are those of the result
    first, *rest = tables.SIN_PI[64]
    tail = z.fma(first, z_lo.fma(first, (z * z) * estrin(z, rest)))
    return r + r.fma(tail, lo), r


def _or_far(x: X, y: X, r: X, name: str) -> X:
    """A sine or cosine y, where r and the parts of pi are good enough for it; the exact one elsewhere (rare)."""
    code, size = x.code, x.abs()
    bad = ((size > REDUCTION_LIMIT) & (size < float("inf"))) | (r.abs() < size * NEAR)
    slot = code.var(y.ty, y.v)
    with code.when(bad.any()):
        (far,) = _apart(x, f"far_{name}", _FAR[name], ("double",))
        code.store(bad.where(far, y).v, slot)
    return x.new(code.load(y.ty, slot))


def _far_sin(x: X) -> list[X]:
    s, c, q = _sin_cos(x)
    return [_quadrant(s, c, q)]


def _far_cos(x: X) -> list[X]:
    s, c, q = _sin_cos(x)
    return [_quadrant(s, c, q + 1)]


_FAR = {"sin": _far_sin, "cos": _far_cos}


def tan(x: X) -> X:
    s, c, q = _sin_cos(x)
    odd = (q & 1).ne(0)
    t = odd.where(-c, s) / odd.where(s, c)
    return x.eq(0.0).where(x, t)


# -- inverses ---------------------------------------------------------------------------------------------------------
def _atan_positive(num: X, den: X) -> X:
    """atan(num / den) for 0 <= num <= den, den > 0."""
    # Where num / den is beyond tan(pi/8), take pi/4 + atan((num - den) / (num + den)).
    upper = num > den * 0.41421356237309503
    t = upper.where(num - den, num) / upper.where(num + den, den)
    z = t * t
    y = t + t * z * horner(z, tables.ATAN[num.fmt.bits])
    return upper.where(y + PI_2 / 2, y)


def _from_pi_2(y: X) -> X:
    """pi/2 - y."""
    hi, lo = PI_2_PAIR[y.fmt.bits]
    return hi - (y - lo)


def atan(x: X) -> X:
    a = x.abs()
    steep = a > 1.0
    one = a.const(1.0)
    y = _atan_positive(steep.where(one, a), steep.where(a.at_most(1e300 if x.fmt.bits == 64 else 1e37), one))
    return x.is_nan().where(x, steep.where(_from_pi_2(y), y).copysign(x))


def atan2(y: X, x: X) -> X:
    if y.scalar == "float":
        return atan2(y.to("double"), x.to("double")).to("float").copysign(y)  # the sign of a float: see odd_in_double
    inf = float("inf")
    a, b = y.abs(), x.abs()
    steep = a > b
    num, den = steep.where(b, a), steep.where(a, b)
    both_inf, both_zero = num.eq(inf), den.eq(0.0)
    # The operands are scaled so that num + den does not overflow and num * 0.41 keeps its bits.
    large, small = den > 1e300, den < 1e-290
    factor = large.where(den.const(2.0**-60), small.where(den.const(2.0**110), 1.0))
    den_scaled = both_zero.where(1.0, den * factor)
    den_scaled, num_scaled = den_scaled.at_most(1e300), den.eq(inf).where(0.0, num * factor)
    num_scaled, den_scaled = both_inf.where(1.0, num_scaled), both_inf.where(1.0, den_scaled)
    t = _atan_positive(num_scaled, den_scaled)
    t = steep.where(PI_2 - t, t)
    t = (x.bits() < 0).where(PI - t, t)
    return (x.is_nan() | y.is_nan()).where(float("nan"), t.copysign(y))


def _asin_tail(z: X) -> X:
    return z * horner(z, tables.ASIN[z.fmt.bits])


def asin(x: X) -> X:
    a = x.abs()
    outer = a > 0.5
    z = outer.where((1.0 - a) * 0.5, a * a)
    root = outer.where(z.sqrt(), a)
    y = root + root * _asin_tail(z)
    return outer.where(_from_pi_2(y + y), y).copysign(x)


def acos(x: X) -> X:
    a = x.abs()
    outer = a > 0.5
    z = outer.where((1.0 - a) * 0.5, a * a)
    root = outer.where(z.sqrt(), a)
    y = root + root * _asin_tail(z)
    near_one = y + y
    two_less = _from_pi_2(near_one * 0.5)
    return outer.where((x < 0.0).where(two_less + two_less, near_one), _from_pi_2(y.copysign(x)))
