"""A kernel as a function of values, without Refs: the reference of every transform of a kernel.

`functional(kernel, *args, **meta)` walks the kernel's jaxpr once for every program of the grid, in order, with Refs as
plain arrays in cells: a load is a gather, a store a scatter. All of it is ordinary JAX, so `jax.grad`, `jax.jvp` and
`jax.vmap` of it follow JAX's own rules and share no code with jtile's transforms. Grids and arrays are small: the
programs are unrolled.

What the program ids and concrete (integer) arguments decide is evaluated at once; where a loop's bounds or a branch
depend on traced values, `lax` control flow carries the cells' arrays.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from functional_rules import RULES, Cell, concrete
from jax import lax

from jtile.calls.kernel import Kernel
from jtile.interpret import poison


def functional(kernel: Any, *args: Any, **meta: Any) -> Any:
    """The results of a kernel (or of a `Program`: a list) on arrays or tracers."""
    if not isinstance(kernel, Kernel):
        return run_program(kernel, jax.tree.leaves(args))
    outs = run_program(kernel.lower(*args, **meta).program, [as_array(x) for x in jax.tree.leaves(args)])
    tree = jax.tree.structure(jax.eval_shape(lambda *a: kernel(*a, **meta), *args))
    return jax.tree.unflatten(tree, outs)


def as_array(x: Any) -> Any:
    return x if hasattr(x, "dtype") else jnp.asarray(x)


def run_program(program: Any, operands: Sequence[Any]) -> list[Any]:
    kernel = program.kernel
    inputs = [Cell(x) for x in operands]
    shared = {o: inputs[i] for i, o in kernel.aliases}
    inits = kernel.inits or (None,) * len(kernel.outputs)
    outputs = [shared.get(k) or Cell(_start(v, n)) for k, (v, n) in enumerate(zip(kernel.outputs, inits, strict=True))]
    for ids in itertools.product(*map(range, kernel.grid)):
        scratch = [Cell(poison(v.shape, v.dtype)) for v in kernel.params[len(inputs) + len(outputs) :]]
        Evaluator(ids, kernel.grid).closed(program.jaxpr, [*inputs, *outputs, *scratch])
    return [jnp.asarray(c.value) for c in outputs]


def _start(v: Any, init: float | None) -> np.ndarray:
    nowhere = poison(v.shape, v.dtype)
    return nowhere if init is None else np.full(v.shape, init, nowhere.dtype)


class Evaluator:
    """Evaluates jaxprs for one program of the grid."""

    def __init__(self, ids: Sequence[int], grid: Sequence[int]):
        self.ids, self.grid = ids, grid

    def closed(self, closed: Any, args: Sequence[Any]) -> list[Any]:
        jaxpr = getattr(closed, "jaxpr", closed)
        env = dict(zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        read = lambda v: np.asarray(v.val, v.aval.dtype) if hasattr(v, "val") else env[v]
        for eqn in jaxpr.eqns:
            env.update(zip(eqn.outvars, self.equation(eqn, [read(v) for v in eqn.invars]), strict=True))
        return [read(v) for v in jaxpr.outvars]

    def equation(self, eqn: Any, values: list[Any]) -> Sequence[Any]:
        name = eqn.primitive.name
        with _at_once(all(map(concrete, values))):
            if name in CONTROL:
                return CONTROL[name](self, eqn, *values)
            if name in RULES:
                out = RULES[name](self, eqn, *values)
                return out if isinstance(out, list | tuple) else [out]
            out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
        return out if eqn.primitive.multiple_results else [out]

    def function(self, closed: Any) -> Callable[..., list[Any]]:
        return lambda *args: self.closed(closed, args)

    def carrying(self, cells: list[Cell], fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn` as a function of the cells' arrays too: `(state, *args) -> (new state, result)`."""

        def run(state, *args):
            before = [c.value for c in cells]
            for c, x in zip(cells, state, strict=True):
                c.value = x
            out = fn(*args)
            after = [jnp.asarray(c.value) for c in cells]
            for c, x in zip(cells, before, strict=True):
                c.value = x
            return after, out

        return run


@contextlib.contextmanager
def _at_once(yes: bool):
    """Inside of `jax.jit`, compute with concrete values now, so that loop bounds stay concrete."""
    with jax.ensure_compile_time_eval() if yes else contextlib.nullcontext():
        yield


# -- control flow ----------------------------------------------------------------------------------------------------


def split(values: Sequence[Any]) -> tuple[list[Cell], list[Any], Callable[[Sequence[Any]], list[Any]]]:
    """The Refs among operands (each once), the other operands, and how to put both together again."""
    cells = list({id(v): v for v in values if isinstance(v, Cell)}.values())
    plain = [v for v in values if not isinstance(v, Cell)]

    def join(others):
        it = iter(others)
        return [v if isinstance(v, Cell) else next(it) for v in values]

    return cells, plain, join


def state_of(cells: list[Cell]) -> list[Any]:
    return [jnp.asarray(c.value) for c in cells]


def put_state(cells: list[Cell], state: Sequence[Any]) -> None:
    for c, x in zip(cells, state, strict=True):
        c.value = x


def _scan(e: Evaluator, eqn: Any, *args: Any) -> list[Any]:
    p = eqn.params
    if "ft_in" in p:
        n_consts, n_carry = (len(list(part)) for part in p["ft_in"].unpack()[:2])
    else:
        n_consts, n_carry = p["num_consts"], p["num_carry"]
    consts, carry, xs = args[:n_consts], list(args[n_consts : n_consts + n_carry]), args[n_consts + n_carry :]
    rounds = range(p["length"])
    ys = []
    for k in reversed(rounds) if p["reverse"] else rounds:
        with _at_once(all(map(concrete, xs))):
            rows = [x[k] for x in xs]
        out = e.closed(p["jaxpr"], [*consts, *carry, *rows])
        carry, y = out[:n_carry], out[n_carry:]
        ys.append(y)
    ys = ys[::-1] if p["reverse"] else ys
    avals = [v.aval for v in eqn.outvars[n_carry:]]
    stacked = [jnp.stack([y[k] for y in ys]) if ys else jnp.zeros(a.shape, a.dtype) for k, a in enumerate(avals)]
    return [*carry, *stacked]


def _while(e: Evaluator, eqn: Any, *args: Any) -> list[Any]:
    p = eqn.params
    n, m = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    cond_consts, body_consts, carry = args[:n], args[n:m], list(args[m:])
    while True:
        go = e.closed(p["cond_jaxpr"], [*cond_consts, *carry])[0]
        if not concrete(go):
            break
        if not bool(go):
            return carry
        carry = e.closed(p["body_jaxpr"], [*body_consts, *carry])
    cells, _, _ = split([*cond_consts, *body_consts])
    test = e.carrying(cells, lambda c: e.closed(p["cond_jaxpr"], [*cond_consts, *c])[0])
    body = e.carrying(cells, lambda c: e.closed(p["body_jaxpr"], [*body_consts, *c]))
    start = (state_of(cells), [jnp.asarray(x) for x in carry])
    state, carry = lax.while_loop(lambda sc: test(*sc)[1], lambda sc: body(*sc), start)
    put_state(cells, state)
    return carry


def _cond(e: Evaluator, eqn: Any, index: Any, *args: Any) -> list[Any]:
    branches = eqn.params["branches"]
    if concrete(index):
        return e.closed(branches[min(max(int(index), 0), len(branches) - 1)], args)
    cells, plain, join = split(args)
    runs = [e.carrying(cells, lambda *xs, b=b: e.closed(b, join(xs))) for b in branches]
    state, out = lax.switch(index, runs, state_of(cells), *map(jnp.asarray, plain))
    put_state(cells, state)
    return out


def _call(e: Evaluator, eqn: Any, *args: Any) -> list[Any]:
    return e.closed(next(eqn.params[k] for k in ("jaxpr", "call_jaxpr", "call") if k in eqn.params), args)


def _custom_jvp(e: Evaluator, eqn: Any, *args: Any) -> list[Any]:
    """The function with its own derivative, which may use primitives of the language too."""
    rule, n_consts = eqn.params["jvp_jaxpr_fun"], eqn.params["num_consts"]
    fn = jax.custom_jvp(e.function(eqn.params["call_jaxpr"]))

    @fn.defjvp
    def _(primals, tangents):
        primals, tangents = primals[n_consts:], tangents[n_consts:]
        jaxpr, consts, zeros = rule.call_wrapped(*[False] * len(tangents))
        out = e.closed(jax.extend.core.ClosedJaxpr(jaxpr, consts), [*primals, *tangents])
        nonzero = iter(out[len(zeros) :])
        values = out[: len(zeros)]
        return values, [jnp.zeros_like(v) if z else next(nonzero) for v, z in zip(values, zeros, strict=True)]

    return fn(*args)


CONTROL = {"scan": _scan, "while": _while, "cond": _cond, "custom_jvp_call": _custom_jvp} | dict.fromkeys(
    ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2", "call"), _call
)
