"""Steps on values that a random differentiable kernel is made of."""

from __future__ import annotations

from .gen import SIDES, Gen, V, size
from .memory import MEMORY, mask

# text of x -> (expression, bound of the result; None: that of x)
UNARY = {
    "jnp.tanh({})": 1, "jnp.sin({})": 1, "jnp.cos({})": 1, "jnp.exp(-{0} * {0})": 1, "jax.nn.sigmoid({})": 1,
    "jnp.sqrt({0} * {0} + 1.0)": 8.1, "jnp.log({0} * {0} + 1.0)": 4.2, "jax.lax.rsqrt({0} * {0} + 1.0)": 1,
    "jax.nn.silu({})": None, "jax.nn.softplus({})": 8.1, "jax.lax.erf({})": 1, "{} * 0.5 + 1.0": None, "-{}": None,
    "jnp.exp2(jnp.sin({}))": 2, "jax.nn.gelu({})": None, "jnp.arctan({})": 1.6, "jnp.expm1(jnp.tanh({}))": 1.8,
    "jnp.power({0} * {0} + 0.5, 0.75)": 23, "jnp.square({})": 64, "1.0 / ({0} * {0} + 1.0)": 1,
    "jnp.logaddexp({}, 0.5)": 8.6,
    "jax.lax.stop_gradient({})": None, "{} ** 3 * 0.1": 51, "jnp.sinc({} * 0.3)": 1, "jax.checkpoint(jnp.sin)({})": 1,
}  # fmt: skip
BINARY = {
    "{} + {}": lambda a, b: a + b, "{} * {}": lambda a, b: a * b, "{} - {}": lambda a, b: a + b,
    "{0} / (2.5 + jnp.sin({1}))": lambda a, b: a, "jnp.arctan2({0}, 2.5 + jnp.cos({1}))": lambda a, b: 1.6,
    "{0} * jax.nn.sigmoid({1})": lambda a, b: a, "jnp.logaddexp({}, {})": lambda a, b: max(a, b) + 1,
    "jnp.hypot({}, jnp.exp(0.1 * {}))": lambda a, b: a + 2.3,
}  # fmt: skip


def unary(g: Gen) -> None:
    v = g.find()
    text = g.choose(list(UNARY))
    g.put(text.format(v.name), v.shape, UNARY[text] or v.bound + 1)


def binary(g: Gen) -> None:
    v = g.find()
    w, text = g.like(v), g.choose(list(BINARY))
    g.put(text.format(v.name, w.name), v.shape, BINARY[text](v.bound, w.bound))


def decide(g: Gen) -> None:
    """Functions with kinks, of numbers as they were loaded (equal ones among them: pads and repeated rows)."""
    v = g.find(lambda v: v.exact)
    if not v.exact:
        return
    w = g.like(v, exact=True)
    match g.number(0, 4):
        case 0:
            text = f"jnp.maximum({v.name}, {w.name})"
        case 1:
            text = f"jnp.minimum({v.name}, {w.name})"
        case 2:
            text = f"jnp.clip({v.name}, -1.0, 1.0)"
        case 3:
            text = f"jax.nn.relu({v.name})"
        case _:
            text = f"jnp.abs({v.name})"
    if w.exact:
        g.put(text, v.shape, max(v.bound, w.bound), exact=True)


def where(g: Gen) -> None:
    v = g.find(low=1)
    w = g.like(v)
    g.put(f"jnp.where({mask(g, v.shape)}, {v.name}, {w.name})", v.shape, max(v.bound, w.bound))


def reduction(g: Gen) -> None:
    v = g.find(low=1)
    axis = g.number(0, len(v.shape) - 1)
    n = v.shape[axis]
    rest = (*v.shape[:axis], *v.shape[axis + 1 :])
    kind = g.number(0, 7)
    if kind == 4 and not v.exact:
        kind = 0
    match kind:
        case 0:
            g.put(f"jnp.sum({v.name}, {axis})", rest, v.bound * n)
        case 1:
            kept = (*v.shape[:axis], 1, *v.shape[axis + 1 :])
            m = g.put(f"jnp.mean({v.name}, {axis}, keepdims=True)", kept, v.bound)
            g.put(f"{v.name} - {m.name}", v.shape, 2 * v.bound) if g.chance() else None
        case 2:
            g.put(f"jax.nn.logsumexp({v.name}, {axis})", rest, v.bound + 2)
        case 3:
            g.put(f"jnp.prod(jnp.sin({v.name}), {axis})", rest, 1)
        case 4:
            g.put(f"jnp.{g.choose(('max', 'min'))}({v.name}, {axis})", rest, v.bound, exact=True)
        case 5:
            g.put(f"jt.reduce({v.name}, {axis}, lambda a, b: a + b, 0.5)", rest, v.bound * n + 1)
        case 6:
            g.put(f"jt.reduce(jnp.cos({v.name}), {axis}, lambda a, b: a * b, 1.0)", rest, 1)
        case _:
            g.put(f"jax.nn.softmax({v.name}, {axis})", v.shape, 1)


def scan(g: Gen) -> None:
    v = g.find(low=1)
    axis = g.number(0, len(v.shape) - 1)
    n = v.shape[axis]
    match g.number(0, 4):
        case 0:
            g.put(f"jnp.cumsum({v.name}, {axis})", v.shape, v.bound * n)
        case 1:
            g.put(f"jax.lax.cumlogsumexp({v.name}, {axis}, reverse={g.chance()})", v.shape, v.bound + 2)
        case 2:
            g.put(f"jnp.cumprod(jnp.sin({v.name}), {axis})", v.shape, 1)
        case 3:
            fn = f"lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (jnp.sin({v.name}), {v.name})"
            g.put(f"jt.associative_scan({fn}, {axis}, reverse={g.chance()})[1]", v.shape, v.bound * n)
        case _:
            g.put(f"jt.associative_scan(lambda a, b: a + b, {v.name}, {axis})", v.shape, v.bound * n)


def product(g: Gen) -> None:
    a = g.find(lambda v: len(v.shape) == 2, 2)
    n = g.choose(SIDES)
    b = g.pick(lambda w: len(w.shape) == 2 and w.shape[0] == a.shape[1] and w.dtype == "float32")
    b = b if b is not None and g.chance() else g.load((a.shape[1], n))
    out, bound = (a.shape[0], b.shape[1]), a.bound * b.bound * a.shape[1]
    match g.number(0, 3):
        case 0:
            g.put(f"jt.dot({a.name}, {b.name})", out, bound)
        case 1:
            c = g.pick(lambda w: w.shape == out and w.dtype == "float32") or g.load(out)
            g.put(f"jt.dot({a.name}, {b.name}, {c.name})", out, bound + c.bound)
        case 2:
            g.narrow = True
            g.put(f"jt.dot({a.name}.astype(jnp.bfloat16), {b.name}.astype(jnp.bfloat16))", out, bound)
        case _:
            g.put(f"jnp.einsum('mk,kn->nm', {a.name}, {b.name})", out[::-1], bound)


def cast(g: Gen) -> None:
    v = g.find()
    g.narrow = True
    g.put(f"{v.name}.astype(jnp.{g.choose(('bfloat16', 'float16'))}).astype(jnp.float32)", v.shape, v.bound)


def narrow_load(g: Gen) -> None:
    v = g.load(g.shape(), g.choose(("bfloat16", "float16")))
    g.put(f"{v.name}.astype(jnp.float32)", v.shape, v.bound, exact=True)


def integers(g: Gen) -> None:
    """Integer operands beside floats."""
    v = g.find()
    s = g.scalar()
    match g.number(0, 2):
        case 0:
            g.put(f"{v.name} * jnp.asarray({s.text} + 1, jnp.float32)", v.shape, v.bound * (s.hi + 1))
        case 1:
            n = g.new_ints(-2, 2, v.shape)
            g.put(f"{v.name} * {n}[...].astype(jnp.float32)", v.shape, 2 * v.bound)
        case _:
            n = g.new_ints(0, 2)
            g.put(f"jnp.where({n}[...] > 0, {v.name}, {v.name} * {v.name})", v.shape, v.bound**2 + v.bound)


def move(g: Gen) -> None:
    """Another shape or order of the same elements."""
    v = g.find(low=1)
    rank, n = len(v.shape), v.shape[0]
    options: list[tuple[str, tuple[int, ...]]] = [
        (f"{v.name}.reshape(-1)", (size(v.shape),)),
        (f"jnp.flip({v.name}, 0)", v.shape),
        (f"{v.name}[{n // 2}:]", (n - n // 2, *v.shape[1:])),
        (f"jnp.concatenate([{v.name}, {v.name} * 2.0], 0)", (2 * n, *v.shape[1:])),
        (f"jnp.broadcast_to({v.name}, (2, {', '.join(map(str, v.shape))}))", (2, *v.shape)),
        (f"jnp.roll({v.name}, 1, 0)", v.shape),
        (f"jax.lax.dynamic_slice_in_dim({v.name}, {g.scalar().text}, {(n + 1) // 2}, 0)", ((n + 1) // 2, *v.shape[1:])),
        (f"{v.name}[jnp.arange({n}) // 2]", v.shape),
        (f"jnp.take_along_axis({v.name}, jnp.zeros({v.shape}, jnp.int32), 0)", v.shape),
    ]
    if rank == 2:
        options.append((f"{v.name}.T", v.shape[::-1]))
    text, shape = g.choose(options)
    if size(shape) <= 60 and len(shape) <= 3:
        g.put(text, shape, v.bound * (2 if "*" in text else 1), exact=v.exact and "*" not in text)


def sort(g: Gen) -> None:
    v = g.find(lambda v: v.exact, 1)
    g.put(f"jnp.sort({v.name}, -1)", v.shape, v.bound) if v.exact else None


def spread(g: Gen) -> None:
    """A row along the columns of another tile."""
    v = g.find(lambda v: len(v.shape) == 2, 2)
    row = g.pick(lambda w: w.shape == v.shape[1:] and w.dtype == "float32") or g.load(v.shape[1:])
    g.put(f"{v.name} * {row.name}[None, :]", v.shape, v.bound * row.bound)


ACTIONS = [
    unary, binary, product, reduction, unary, binary, decide, where, scan, cast, narrow_load, integers, move, spread,
    *MEMORY, sort,
]  # fmt: skip

__all__ = ["ACTIONS", "V"]
