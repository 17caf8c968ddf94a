"""Loops and branches of random differentiable kernels."""

from __future__ import annotations

from .gen import Gen, Scalar, V

# how a carry takes a value in: linear in the carry, or not
LINEAR = ("{a} + {v}", "{a} * 0.5 + {v}", "{a} - {v} * 2.0", "{a} * jnp.sin({v}) + {v}", "{v} + {a}")
CURVED = ("jnp.tanh({a} + {v})", "jnp.sin({a} * {v})", "{a} / (1.0 + {a} * {a}) + {v}", "jnp.logaddexp({a}, {v})")


def _bounds(g: Gen) -> tuple[str, Scalar, bool]:
    """`(bounds, counter, whether each program may run another number of rounds)`."""
    k = g.fresh("k")
    match g.number(0, 5):
        case 0 | 1:
            n = g.number(1, 3)
            return str(n), Scalar(k, n - 1), False
        case 2:
            return "1, 5, 2", Scalar(f"({k} // 2)", 1), False
        case 3:
            return f"jnp.minimum({g.new_ints(0, 3)}[...], 3)", Scalar(k, 2), True
        case 4:
            return f"{g.pids[0].text} + 1", Scalar(k, g.pids[0].hi), True
        case _:
            return "2, -1, -1", Scalar(k, 2), False


def _body(g: Gen, shape: tuple[int, ...]) -> V:
    """Steps inside of a region, and a value of this shape."""
    for _ in range(g.number(0, 2)):
        g.choose(g.steps if g.depth < 3 else g.steps[:8])(g)
    inside = g.pick(lambda v: v.shape == shape and v.dtype == "float32")
    return inside if inside is not None and g.chance(3) else g.load(shape)


def loop(g: Gen) -> None:
    """Carries of one shape, linear or not; the body may store, accumulate, and loop again."""
    shape = g.shape()
    bounds, counter, partial = _bounds(g)
    carries = []
    for _ in range(g.number(1, 2)):
        start = g.pick(lambda v: v.shape == shape and v.dtype == "float32") if g.chance() else None
        name = g.fresh("a")
        g.line(f"{name} = {start.name if start else f'jnp.zeros({shape}, jnp.float32)'}")
        carries.append((name, start.bound if start else 0.0))
    hints = g.choose(("", "", ", stages=2"))
    g.line(f"for {counter.text.strip('()').split()[0]} in jt.range({bounds}{hints}):")
    g.counters.append(counter)
    ends = []
    with g.block(partial):
        for name, bound in carries:
            v = _body(g, shape)
            text = g.choose((*LINEAR, *CURVED) if g.chance() else LINEAR)
            other = g.choose(carries)[0] if g.chance(4) else name
            g.line(f"{name} = {text.format(a=other, v=v.name)}")
            ends.append((name, 30.0 if other != name else (bound + 2 * v.bound) * (2 + counter.hi)))
    g.counters.pop()
    for name, bound in ends:
        g.put(name, shape, bound)


def unbounded_sum(g: Gen) -> None:
    """A sum whose number of rounds nobody knows a bound of: no round needs to be saved."""
    v = g.find(low=1)
    x, a, k = g.new_input((3, *v.shape)), g.fresh("a"), g.fresh("k")
    g.line(f"{a} = {v.name}")
    g.line(f"for {k} in jt.range({g.new_ints(0, 3)}[...]):")
    with g.block():
        text = g.choose((f"jnp.sin({x}[{k}])", f"{x}[{k}] * {v.name}"))
        g.line(f"{a} = {a} + {text}")
    g.put(a, v.shape, 7 * v.bound)


def online_softmax(g: Gen) -> None:
    """A running maximum, normaliser and weighted sum: carries that depend on each other."""
    n = g.number(2, 3)
    x, y = g.new_input((n, 4)), g.new_input((n, 4))
    m, l, acc, s = (g.fresh(c) for c in "mlas")
    g.line(f"{m}, {l}, {acc} = jnp.full((), -jnp.inf), jnp.zeros(()), jnp.zeros((4,))")
    k = g.fresh("k")
    g.line(f"for {k} in jt.range({n}):")
    with g.block():
        g.line(f"{s} = {x}[{k}] * jnp.asarray({g.pids[0].text} + 1, jnp.float32)")
        g.line(f"{m}n = jnp.maximum({m}, jnp.max({s}))")
        g.line(f"{l} = {l} * jnp.exp({m} - {m}n) + jnp.sum(jnp.exp({s} - {m}n))")
        g.line(f"{acc} = {acc} * jnp.exp({m} - {m}n) + jnp.exp({s} - {m}n) * {y}[{k}]")
        g.line(f"{m} = {m}n")
    g.put(f"{acc} / {l}", (4,), 2)


def _condition(g: Gen) -> str:
    exact = g.pick(lambda v: v.exact and not v.shape and v.dtype == "float32")
    options = [f"{g.pids[0].text} == 0", f"{g.scalar().text} < 1", f"{g.new_ints(0, 1)}[...] > 0"]
    return f"{exact.name} > 0.1" if exact is not None and g.chance() else g.choose(options)


def branch(g: Gen) -> None:
    """A value that each branch makes its own way; stores stand inside too."""
    v = g.find()
    out = g.fresh("b")
    g.line(f"if {_condition(g)}:")
    with g.block(partial=True):
        w = _body(g, v.shape)
        g.line(f"{out} = jnp.sin({v.name}) * {w.name}")
    g.line("else:")
    with g.block(partial=True):
        g.line(f"{out} = {g.choose((v.name, f'{v.name} * {v.name}', f'jnp.zeros({v.shape}, jnp.float32)'))}")
    g.put(out, v.shape, max(v.bound**2, v.bound, w.bound))


def only_if(g: Gen) -> None:
    """A carry that one branch leaves as it is."""
    v = g.find()
    out = g.fresh("b")
    g.line(f"{out} = {v.name}")
    g.line(f"if {_condition(g)}:")
    with g.block(partial=True):
        w = _body(g, v.shape)
        g.line(f"{out} = {out} * {w.name}")
    g.put(out, v.shape, max(v.bound * w.bound, v.bound))


def scan_values(g: Gen) -> None:
    """`lax.scan` over the rows of a value, with stacked results."""
    v = g.find(lambda v: len(v.shape) == 2, 2)
    ys, rest = g.fresh("y"), v.shape[1:]
    step = "lambda c, r: (jnp.tanh(c + r), c * r)"
    g.line(f"_, {ys} = jax.lax.scan({step}, jnp.ones({rest}, jnp.float32), {v.name}, reverse={g.chance()})")
    g.put(ys, v.shape, max(1, v.bound))


REGIONS = [loop, branch, loop, only_if, loop, online_softmax, scan_values, unbounded_sum]
