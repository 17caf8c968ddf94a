"""Loads, stores, accumulation and scratch memory of random differentiable kernels."""

from __future__ import annotations

from .gen import Gen, Scalar, V, size


def load(g: Gen, shape: tuple[int, ...], dtype: str = "float32") -> V:
    """A tile of a new input: by tiles, by element spans, or gathered; perhaps masked, perhaps over the edge."""
    style = g.number(0, 3) if shape else 1
    if style == 2 and len(shape) <= 2:
        return _gathered(g, shape, dtype)
    lead = [s for s in g.pids if g.chance()] if g.depth == 0 else [s for s in g.counters if g.chance()]
    dims = [_tile(g, n) if style == 3 else _span(g, n) for n in shape]
    total = [*[s.hi + 1 for s in lead], *[d[0] for d in dims]]
    name = g.new_input(total, dtype)
    parts = [*[s.text for s in lead], *[d[1] for d in dims]]
    if style == 3:
        sizes = ", ".join([*["None"] * len(lead), *map(str, shape)])
        pad = g.choose(("", "", ", pad=1.5"))
        text = f"{name}.tiles({sizes}{pad})[{', '.join(parts)}]"
        return g.put(text, shape, 2, dtype, exact=True)
    index = ", ".join(parts) or "..."
    if shape and g.chance(4):
        other = g.choose((0.0, -1.5))
        return g.put(
            f"jt.load({name}, {spelled(index)}, mask={mask(g, shape)}, other={other})", shape, 2, dtype, exact=True
        )
    return g.put(f"{name}[{index}]", shape, 2, dtype, exact=True)


def spelled(index: str) -> str:
    """An index as an argument of a function, where `:` has no meaning."""
    return f"({index.replace(':', 'slice(None)')},)"


def _tile(g: Gen, n: int) -> tuple[int, str]:
    """`(length of the axis, tile index)`; the last tile may hang over the end."""
    s = g.scalar()
    return s.hi * n + n - g.number(0, n - 1), s.text


def _span(g: Gen, n: int) -> tuple[int, str]:
    if not g.chance():
        return n, ":"
    s, stride = g.scalar(), g.choose((1, 1, 2))
    over = g.number(0, n - 1) * stride
    return max(s.hi, s.hi + (n - 1) * stride + 1 - over), f"jt.ds({s.text}, {n}{'' if stride == 1 else ', 2'})"


def _gathered(g: Gen, shape: tuple[int, ...], dtype: str) -> V:
    """Rows or elements named by an integer input; indices outside read the pad, equal ones read the same."""
    rows = g.number(2, 4)
    index = g.new_ints(-1, rows, (*g.grid[:1], shape[0]))
    lead = f"{index}[{g.pids[0].text}]"
    name = g.new_input((rows, *shape[1:]), dtype)
    if len(shape) == 2 and g.chance():
        return g.put(f"{name}[{lead}[:, None], jnp.arange({shape[1]})[None, :]]", shape, 2, dtype, exact=True)
    return g.put(f"{name}[{', '.join([lead, *[':'] * (len(shape) - 1)])}]", shape, 2, dtype, exact=True)


def mask(g: Gen, shape: tuple[int, ...]) -> str:
    """A bool tile: by position, by loaded numbers, or by integers."""
    if g.chance(3):
        name = g.new_ints(0, 1, shape)
        return f"({name}[{', '.join([':'] * len(shape))}] > 0)"
    found = g.pick(lambda v: v.shape == shape and v.exact and v.dtype == "float32")
    if found is not None and g.chance():
        return f"({found.name} < {g.choose((0.0, 0.5))})"
    last = f"jnp.arange({shape[-1]}) < {g.scalar().text} + 1"
    return f"jnp.broadcast_to({last}, {shape})" if len(shape) == 1 else f"jnp.broadcast_to(({last})[None], {shape})"


# -- stores ----------------------------------------------------------------------------------------------------------


def store(g: Gen, v: V) -> None:
    """An output that each program (and round) writes its own part of."""
    around = [*g.pids, *g.counters]
    dtype = g.choose((v.dtype, v.dtype, "bfloat16", "float32"))
    g.narrow = g.narrow or dtype != "float32"
    value = v.name if dtype == v.dtype else f"{v.name}.astype(jnp.{dtype})"
    init = g.choose((0.0, 1.0)) if g.partial or g.chance(4) else None
    if not g.counters and len(v.shape) >= len(g.pids) and g.chance():
        _store_tile(g, v, value, dtype, init)
        return
    masked = v.shape and g.chance(4)
    name = g.new_output([*[s.hi + 1 for s in around], *v.shape], dtype, 0.5 if masked else init)
    index = ", ".join([*[s.text for s in around], *[":"] * len(v.shape)])
    if masked:
        g.line(f"jt.store({name}, {spelled(index)}, {value}, mask={mask(g, v.shape)})")
    else:
        g.line(f"{name}[{index}] = {value}")
    if not masked and g.chance(3):
        g.put(f"{name}[{index}].astype(jnp.float32)", v.shape, v.bound)
        if v.shape and g.chance():  # overwrite a part: the first value's cotangent ends there
            first = ", ".join([*[s.text for s in around], "0", *[":"] * (len(v.shape) - 1)])
            g.line(f"{name}[{first}] = {name}[{first}] * {name}[{first}]")


def _store_tile(g: Gen, v: V, value: str, dtype: str, init: float | None) -> None:
    """Tiles side by side, the last ones over the edge."""
    ids = [*g.pids, *[Scalar("0", 0)] * (len(v.shape) - len(g.pids))]
    total = [s.hi * n + n - g.number(0, n - 1) for s, n in zip(ids, v.shape)]
    name = g.new_output(total, dtype, init)
    g.line(f"{name}.tiles({', '.join(map(str, v.shape))})[{', '.join(s.text for s in ids)}] = {value}")


def accumulate(g: Gen) -> None:
    """Every program (and round) adds into the same elements of an output."""
    v = g.find(lambda v: len(v.shape) in (1, 2), 1)
    rest = v.shape[1:]
    count = g.number(max(1, v.shape[0] - 1), v.shape[0] + 2)
    name = g.new_output((count, *rest), "float32", g.choose((0.0, 1.0)))
    tail = ", slice(None)" if rest else ","
    match g.number(0, 2):
        case 0:
            text = f"{name}, (jt.ds({g.choose((0, 1)) if count > 1 else 0}, {v.shape[0]}){tail})"
        case 1:
            index = g.new_ints(-1, count, (*g.grid[:1], v.shape[0]))
            text = f"{name}, ({index}[{g.pids[0].text}]{tail})"
        case _:
            text = f"{name}, (jnp.arange({v.shape[0]}) // 2{tail})"
    g.line(f"jt.atomic_add({text}, {v.name})")


def scratch(g: Gen) -> None:
    """Memory of the program: written, changed in part, read back."""
    v = g.find(low=1)
    s, whole = g.fresh("s"), ", ".join([":"] * len(v.shape))
    g.line(f"{s} = jt.alloc({v.shape}, jnp.float32)")
    g.line(f"{s}[{whole}] = {v.name}")
    rest = ", :" * (len(v.shape) - 1)
    match g.number(0, 3):
        case 0:
            g.line(f"{s}[0{rest}] = {s}[{v.shape[0] - 1}{rest}] * {s}[0{rest}]")
        case 1:
            g.line(f"for r in jt.range({v.shape[0]}):")
            g.line(f"    {s}[r{rest}] = jnp.sin({s}[r{rest}]) + 0.5 * {s}[{v.shape[0]} - 1 - r{rest}]")
        case 2:
            g.line(f"jt.atomic_add({s}, {spelled(f'jt.ds({g.choose((0, 1))}, {v.shape[0]}){rest}')}, {v.name})")
        case _:
            g.line(f"for r in jt.range({g.number(1, 3)}):")
            w = g.choose([u.name for u in g.pool if u.shape == v.shape and u.dtype == "float32"])
            g.line(f"    {s}[{whole}] = jnp.tanh({s}[{whole}] + {w})")
    g.put(f"{s}[{whole}]", v.shape, max(v.bound**2, v.bound * 1.5 + 1, 1))


def update_in_place(g: Gen) -> None:
    """An output that shares the buffer of an input: read, changed, written back, read again."""
    if g.depth or len(g.alias) > 1:
        return
    v = g.find()
    shape = [*g.grid, *v.shape]
    x, o = g.new_input(shape), g.new_output(shape, "float32", None)
    g.alias[x] = o
    index = ", ".join([*[s.text for s in g.pids], *[":"] * len(v.shape)])
    w = g.put(f"{x}[{index}]", v.shape, 2, exact=True)
    g.line(f"{g.choose((x, o))}[{index}] = jnp.sin({w.name}) * {v.name}")
    if g.chance():
        g.put(f"{g.choose((x, o))}[{index}]", v.shape, v.bound)


def reload(g: Gen) -> None:
    """Another part of an input that was loaded before."""
    arrays = [a for a in g.inputs if a.name[0] == "x" and a.array.ndim and a.name not in g.alias]
    if not arrays:
        return
    a = g.choose(arrays)
    parts, shape = [], []
    for n in a.array.shape:
        what = g.number(0, 2)
        if what == 0:
            parts.append(":")
            shape.append(n)
        elif what == 1:
            parts.append(str(g.number(0, n - 1)))
        else:
            length, start = g.choose((2, 3)), g.number(0, n - 1)
            parts.append(f"jt.ds({start}, {length})")
            shape.append(length)
    if size(shape) <= 60:
        v = f"{a.name}[{', '.join(parts)}]"
        g.put(v if a.array.dtype == "float32" else f"{v}.astype(jnp.float32)", shape, 2, exact=True)


def unused(g: Gen) -> None:
    """An input that nothing reads, or whose value goes nowhere."""
    name = g.new_input((g.number(1, 3),))
    if g.chance():
        g.line(f"{g.fresh()} = jnp.exp({name}[:])")


def store_now(g: Gen) -> None:
    store(g, g.find())


MEMORY = [accumulate, scratch, update_in_place, reload, unused, store_now]
