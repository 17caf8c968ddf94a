"""One small kernel for each kind of thing that a kernel body may do, with its `jnp` form."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from library_cases import LibraryCase, case, f, ints, n

import jtile as jt

ATOMIC = "what this atomic leaves depends on the order of the programs"
WHOLE = "a kernel that prints or asserts runs as a whole on every device: its operands are gathered"
SCHEDULE = "a schedule has no forward mode; its reverse mode is the one it is given"
UNCUT = "a schedule is not cut: it runs as a whole on every device, and its operands are gathered"
FOR_HOPPER = "exported for sm_90 only: elsewhere it runs in the interpreter, a callback"
REVERSE = ("vjp", "numeric", "checkpoint", "grad of vmap", "vmap of grad", "second order")


def rows(x, *_, **__):
    return x.shape[0]


def same(x, *_, **__):
    return jt.like(x)


@jt.kernel(out_type=same, grid=lambda x, y: (jt.cdiv(x.shape[0], 4), jt.cdiv(x.shape[1], 4)))
def tiles(x, y, o):
    i, j = jt.program_id(0), jt.program_id(1)
    X, Y, O = (r.tiles(4, 4) for r in (x, y, o))
    O[i, j] = jnp.sin(X[i, j]) * Y[i, j]


@jt.kernel(out_type=same, grid=lambda x: jt.cdiv(x.shape[0], 4))
def spans(x, o):
    i = 4 * jt.program_id(0)
    mask = jnp.arange(4) % 2 == 0
    jt.store(o, (jt.ds(i, 4),), jt.load(x, (jt.ds(i, 4),), mask=mask, other=0.5) ** 2)


@jt.kernel(out_type=lambda x, at: jt.like(x, shape=(*at.shape, x.shape[1])), grid=lambda x, at: at.shape[0])
def gather(x, at, o):
    i = jt.program_id(0)
    o[i, :, :] = x[at[i, :], :] ** 2


@jt.kernel(out_type=lambda x, at: jt.like(x, shape=(6, x.shape[1])), grid=rows, init=0)
def scatter_add(x, at, o):
    i = jt.program_id(0)
    jt.atomic_add(o, (at[i], slice(None)), jnp.sin(x[i, :]))


@jt.kernel(out_type=lambda x: jt.like(x, shape=x.shape[1:]), grid=rows, init=0)
def accumulated(x, o):
    jt.atomic_add(o, (slice(None),), x[jt.program_id(0), :] ** 2)


@jt.kernel(out_type=lambda x: jt.like(x, shape=x.shape[1:]), grid=rows, init=-4)
def largest(x, o):
    jt.atomic_max(o, (slice(None),), x[jt.program_id(0), :])


@jt.kernel(out_type=lambda a, b: jt.like(a, shape=(a.shape[0], b.shape[1])), grid=lambda a, b: jt.cdiv(a.shape[0], 4))
def summed(a, b, o):
    i = jt.program_id(0)
    A, B = a.tiles(4, 2), b.tiles(2, b.shape[1])
    acc = jt.zeros((4, b.shape[1]))
    for k in jt.range(A.shape[1]):
        acc = jt.dot(A[i, k], B[k, 0], acc)
    o.tiles(4, b.shape[1])[i, 0] = acc


@jt.kernel(out_type=lambda x, w: jt.like(x, shape=(x.shape[0], x.shape[2])), grid=rows)
def recurrence(x, w, o):
    i = jt.program_id(0)
    h = jt.zeros((x.shape[2],))
    for t in jt.range(x.shape[1]):
        h = jnp.tanh(h * w[:] + x[i, t, :])
    o[i, :] = h


def recurrence_reference(x, w):
    h = jnp.zeros((x.shape[0], x.shape[2]))
    for t in range(x.shape[1]):
        h = jnp.tanh(h * w[None, :] + x[:, t])
    return h


@jt.kernel(out_type=lambda x, length: jt.like(x, shape=(x.shape[0],)), grid=rows)
def ragged(x, length, o):
    i = jt.program_id(0)
    h = jt.zeros(())
    for t in jt.range(jnp.minimum(length[i], x.shape[1])):
        h = jnp.tanh(h + x[i, t])
    o[i] = h


def ragged_reference(x, length):
    h = jnp.zeros(x.shape[:1])
    for t in range(x.shape[1]):
        h = jnp.where(t < length, jnp.tanh(h + x[:, t]), h)
    return h


@jt.kernel(out_type=same, grid=rows)
def newton(x, o):
    i = jt.program_id(0)
    a, y, rounds = x[i, :] + 2, x[i, :] * 0 + 1.5, 0
    while jnp.max(jnp.abs(y * y - a)) > 1e-3 and rounds < 20:
        y, rounds = 0.5 * (y + a / y), rounds + 1
    o[i, :] = y


@jt.kernel(out_type=same, grid=rows)
def doubled(x, o):
    i = jt.program_id(0)
    y = x[i, :] + 1
    while jnp.max(y) < 10:
        o[i, :] = y
        y = y * 2


@jt.kernel(out_type=same, grid=rows)
def branches(x, flag, o):
    i = jt.program_id(0)
    if flag[i] > 0:
        y = jnp.sin(x[i, :])
    else:
        y = x[i, :] ** 2
    o[i, :] = y


@jt.kernel(out_type=same, grid=rows, scratch=lambda x, *_: jax.ShapeDtypeStruct((x.shape[1],), jnp.float32))
def scratch(x, o, s):
    i = jt.program_id(0)
    s[:] = jnp.sin(x[i, :])
    for k in jt.range(1, x.shape[1]):
        s[k] = s[k] + 0.5 * s[k - 1] ** 2
    o[i, :] = s[:]


def scratch_reference(x):
    s = jnp.sin(x)
    for k in range(1, x.shape[1]):
        s = s.at[:, k].set(s[:, k] + 0.5 * s[:, k - 1] ** 2)
    return s


@jt.kernel(out_type=same, grid=rows, alias={"x": "o"})
def in_place(x, w, o):
    i = jt.program_id(0)
    o[i, :] = jnp.sin(x[i, :]) * w[:]


@jt.kernel(out_type=same, grid=rows)
def read_back(x, o):
    i = jt.program_id(0)
    o[i, :] = jnp.sin(x[i, :])
    o[i, :] = o[i, :] ** 2


@jt.kernel(out_type=lambda x: (jt.like(x, shape=x.shape[:1]), jt.like(x)), grid=rows)
def folds(x, total, part):
    i = jt.program_id(0)
    total[i] = jt.reduce(x[i, :], 0, lambda a, b: a + b + a * b, 0.0)
    part[i, :] = jt.associative_scan(lambda a, b: a + b + a * b, x[i, :])


def folds_reference(x):
    part = jnp.cumprod(1 + x, 1) - 1
    return part[:, -1], part


@jt.kernel(out_type=same, grid=rows)
def ties(x, o):
    i = jt.program_id(0)
    o[i, :] = jnp.maximum(x[i, :], jnp.round(x[i, :])) + jnp.max(jnp.abs(jnp.round(x[i, :]))) * x[i, :]


def ties_reference(x):
    return jnp.maximum(x, jnp.round(x)) + jnp.max(jnp.abs(jnp.round(x)), 1, keepdims=True) * x


@jt.kernel(out_type=same, grid=rows)
def watched(x, o):
    i = jt.program_id(0)
    jt.assert_(x[i, :] > -9, "x is small")
    o[i, :] = jnp.sin(x[i, :])


@jt.kernel(out_type=lambda x: jt.like(x, dtype=jnp.float32), grid=rows)
def narrow(x, o):
    i = jt.program_id(0)
    o[i, :] = jnp.sin(x[i, :].astype(jnp.bfloat16).astype(jnp.float32))


@jt.kernel(out_type=same, grid=rows)
def own_rule(x, o):
    i = jt.program_id(0)
    o[i, :] = jnp.exp(x[i, :])


own_rule.defvjp(lambda x: (own_rule(x),) * 2, lambda y, g: (y * g,))


@jt.kernel(out_type=same, grid=1, fallback="interpret")
def in_roles(x, o):
    X, full = jt.alloc(x.shape, x.dtype), jt.barrier()
    with jt.role("consumer"):
        full[0].wait(0)
        o[...] = jnp.exp(X.load())
    with jt.role("producer", warps=1):
        full[0].expect(X.nbytes)
        jt.async_copy(x.tiles(*x.shape).at[0, 0], X, full[0])


in_roles.defvjp(lambda x: (in_roles(x),) * 2, lambda y, g: (y * g,))


def matmul_reference(a, b):
    return jnp.matmul(a, b, precision="highest")


def stop(x):
    return jnp.sin(x.astype(jnp.bfloat16).astype(jnp.float32))


CASES: dict[str, LibraryCase] = {
    "tiles over the edge": case(tiles, lambda x, y: jnp.sin(x) * y, f(5, 7), f(5, 7, seed=1)),
    "spans, masks": case(spans, lambda x: jnp.where(jnp.arange(10) % 4 % 2 == 0, x, 0.5) ** 2, f(10)),
    "gathers": case(gather, lambda x, at: x[at] ** 2, f(5, 3), n(5, 2, 4)),
    "scatters that add": case(
        scatter_add, lambda x, at: jnp.zeros((6, 3)).at[at].add(jnp.sin(x)), f(5, 3), n(6, 5)
    ),
    "outputs that programs add to": case(accumulated, lambda x: jnp.sum(x * x, 0), f(5, 3)),
    "other atomics (max)": case(
        largest, lambda x: jnp.max(x, 0), f(5, 3), skip=dict.fromkeys(("jvp", *REVERSE), ATOMIC),
    ),
    "dots in a loop": case(summed, matmul_reference, f(5, 7), f(7, 3)),
    "carries that are not linear": case(recurrence, recurrence_reference, f(2, 4, 3), f(3)),
    "bounds that are traced": case(ragged, ragged_reference, f(3, 4), lambda: ints(5, 3, seed=3)),
    "while": case(newton, lambda x: jnp.sqrt(x + 2), f(2, 3), tolerance=1e-3, derivative_tolerance=1e-2),
    "branches": case(
        branches, lambda x, flag: jnp.where(flag[:, None] > 0, jnp.sin(x), x**2), f(4, 3), n(2, 4)
    ),
    "scratch": case(scratch, scratch_reference, f(2, 4)),
    "aliases": case(in_place, lambda x, w: jnp.sin(x) * w[None, :], f(4, 3), f(3)),
    "outputs that are read": case(read_back, lambda x: jnp.sin(x) ** 2, f(4, 3)),
    "user reductions and scans": case(folds, folds_reference, f(3, 4)),
    "ties of max": case(ties, ties_reference, lambda: jnp.asarray([[1.0, -1.0, 2.0], [0.0, 2.0, 2.0]]),
                        skip={"numeric": "there is no derivative at a tie"}),
    "asserts": case(watched, jnp.sin, f(4, 3), skip={"partitioned jit": WHOLE}),
    "casts to bfloat16": case(narrow, stop, f(4, 3), derivative_tolerance=1e-2,
                              skip={"numeric": "the kernel is a step function"}),
    "a rule of its own (defvjp)": case(own_rule, jnp.exp, f(4, 3)),
    "roles (block level), defvjp": case(in_roles, jnp.exp, f(4, 8), skip={
        **dict.fromkeys(("jvp", "second order"), SCHEDULE), "export": FOR_HOPPER, "partitioned jit": UNCUT,
    }),
}  # fmt: skip
