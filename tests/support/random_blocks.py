"""Random kernels with products in loops: what the pipeline of the block level may meet, beyond the library.

All numbers are small and whole, so that every order of sums gives the same bits.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from machines import machine

import jtile as jt
from jtile.lowering.triton.block.passes import Machine

N = 64  # columns of all tiles, and terms of all products
BF16 = jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The operands of one program: tiles of `rows` x N of `a` in row `i`, and of N x N of `b` and `c` in column `j`."""

    refs: tuple[Any, Any, Any]
    numbers: Any
    rows: int
    rounds: int
    i: Any
    j: Any

    def a(self, k):
        return self.refs[0].tiles(self.rows, N)[self.i, k]

    def b(self, k):
        return self.refs[1].tiles(N, N)[k, self.j]

    def c(self, k):
        return self.refs[2].tiles(N, N)[k, self.j]

    def after(self, k):
        return jnp.minimum(k + 1, self.rounds - 1)


def few(x):
    return jnp.clip(x, -2, 2).astype(BF16)


# -- what a round does to two sums ------------------------------------------------------------------------------------


def one(t, k, x, y):
    return jt.dot(t.a(k), t.b(k), x), y


def one_left_operand(t, k, x, y):
    left = t.a(k)
    return jt.dot(left, t.b(k), x), jt.dot(left, t.c(k), y)


def one_right_operand(t, k, x, y):
    left, right = t.a(k), t.b(k)
    return jt.dot(left, right, x), jt.dot(few(left.astype(jnp.float32) + 1), right, y)


def two_places(t, k, x, y):
    return jt.dot(t.a(t.after(k)), t.b(t.after(k)), jt.dot(t.a(k), t.b(k), x)), y


def two_places_two_sums(t, k, x, y):
    return jt.dot(t.a(k), t.b(k), x), jt.dot(t.a(t.after(k)), t.b(t.after(k)), y)


def folded(t, k, x, y):
    return x + 2 * jt.dot(t.a(k), t.b(k)), y - jt.dot(t.a(t.after(k)), t.b(t.after(k)))


def chain(t, k, x, y):
    s = jt.dot(t.a(0), t.b(k))
    top = s.max(1, keepdims=True)
    return jt.dot(few(s - top + 3), t.c(k), jnp.where(top > 4, jnp.clip(x, -9, 9), x)), y + top


def two_chains(t, k, x, y):
    for at in (k, t.after(k)):
        x = jt.dot(few(jt.dot(t.a(0), t.b(at))), t.c(at), x)
    return x, y


def masked(t, k, x, y):
    x = jt.dot(t.a(k), t.b(k), x)
    row, column = t.i * t.rows + jnp.arange(t.rows), k * N + jnp.arange(N)
    return jnp.where(row[:, None] >= column[None, :], x, x - 1), y


@jt.function
def some_rounds(t, k, x, y):
    if k != t.i:
        x = jt.dot(t.a(k), t.b(k), x)
    return x, y


@jt.function
def inner_loop(t, k, x, y):
    left = t.a(k)
    x = jt.dot(left, t.b(k), x)
    for q in jt.range(t.numbers[3]):
        x = jt.dot(t.a(q), t.b(q), x)
    return x, y + left.astype(jnp.float32)


ROUNDS = (
    one, one_left_operand, one_right_operand, two_places, two_places_two_sums, folded, chain, two_chains, masked,
    some_rounds, inner_loop,
)  # fmt: skip
BOUNDS = {
    "all": lambda t: (0, t.rounds, 1),
    "by the program": lambda t: (0, jnp.minimum(t.i + 1, t.rounds), 1),
    "loaded": lambda t: (t.numbers[0], t.numbers[1], 1),
    "none": lambda t: (0, t.numbers[2], 1),
    "by twos": lambda t: (0, t.rounds, 2),
    "backwards": lambda t: (t.rounds - 1, -1, -1),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel, its arguments, and what its plan may use."""

    kernel: jt.Kernel
    inputs: tuple[np.ndarray, ...]
    machine: Machine
    options: dict[str, Any]


def case(seed: int) -> Case:
    """The kernel of a seed: one to three loops, one after the other or in a loop of their own; rows and terms hang
    over."""
    r = random.Random(seed)
    rows, grid, rounds = r.choice([64, 128, 192, 256]), (r.randint(1, 3), r.randint(1, 3)), r.randint(2, 6)
    loops = [(r.choice(ROUNDS), BOUNDS[r.choice(list(BOUNDS))]) for _ in range(r.choice([1, 1, 2, 3]))]
    around, stages, guarded = r.choice([1, 1, 1, 2]), r.choice([1, 2, 4]), r.random() < 0.2
    m, k = rows * grid[0] - r.choice([0, 0, 8, 37]), N * rounds - r.choice([0, 0, 8])

    @jt.function
    def rounds_of(t, step, bounds, x, y):
        lo, hi, by = bounds(t)
        for n in jt.range(lo, hi, by, stages=stages):
            x, y = step(t, n, x, y)
        return jnp.clip(x, -50, 50), jnp.clip(y, -50, 50)

    def body(a, b, c, n, o):
        i, j = jt.program_id(0), jt.program_id(1)
        t, x = Tiles((a, b, c), n, rows, rounds, i, j), jt.zeros((rows, N), jnp.float32)
        y = x
        for _ in jt.range(around):
            for step, bounds in loops:
                x, y = rounds_of(t, step, bounds, x, y)
        if guarded:
            if (i + j) % 2 == 0:
                o.tiles(rows, N)[i, j] = x + y
        else:
            o.tiles(rows, N)[i, j] = x + y

    out = jax.ShapeDtypeStruct((m, N * grid[1]), jnp.float32)
    draw = np.random.default_rng(seed)
    arrays = [draw.integers(-2, 3, s).astype(BF16) for s in ((m, k), (k, N * grid[1]), (k, N * grid[1]))]
    numbers = np.array([draw.integers(0, rounds + 1), rounds, 0, draw.integers(0, rounds + 1)], np.int32)
    teams = [n for n in (1, 2, 3, 4) if rows % (64 * n) == 0]
    wishes = {"consumers": teams, "num_stages": [2, 3, 5], "persistent": [True, False]}
    options = {name: r.choice(values) for name, values in wishes.items() if r.random() < 0.4}
    kernel = jt.kernel(out_type=out, grid=grid, init=0, name=f"random{seed}")(body)
    return Case(kernel, (*arrays, numbers), machine(processors=r.choice([1, 2, 3, 132])), options)
