"""Array programs as people write them in jnp, by `jt.fuse` and by XLA; attention in jnp beside cuDNN's, too."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp

import jtile as jt
from benchmarks import fuse
from benchmarks.data import normal, size
from benchmarks.gpu.case import Case

TIMES = 4  # the sides of the programs for CPUs
AHEAD = True  # all of the programs are compiled before the first is measured
BUDGET_S = 0.8  # seconds of samples of a program, since there are many
CALLS = 32  # calls in one program, since XLA takes seconds to compile some of these


def cases(tiny: bool = False) -> Iterator[Case]:
    sides = {"least": 16} if tiny else {"times": TIMES}
    functions = {}

    def made(seed):
        programs = fuse.programs(seed=seed, **sides)
        functions.update({name: fun for name, (fun, _) in programs.items()})
        return {name: args for name, (_, args) in programs.items()}

    shapes = jax.eval_shape(made, 0)
    for name, fun in functions.items():
        make = jax.jit(lambda seed, name=name: made(seed)[name])  # the arguments of the others are left out
        yield Case(
            "fuse", name, "float32", make=make, ours=jt.fuse(fun), peers={"xla": fun}, reference=_exact(fun),
            bytes=size(shapes[name], jax.eval_shape(fun, *shapes[name])), calls=CALLS, budget_s=BUDGET_S,
            tolerance=3e-3,
        )  # fmt: skip
    yield from _attentions(tiny)
    yield from _products(tiny)
    yield from _rows(tiny)


def _attentions(tiny: bool) -> Iterator[Case]:
    """Attention of many tokens in bfloat16: of all keys, causal, with a bias of every head, and of some keys only."""
    tokens, heads, d = (64, 2, 16) if tiny else (8192, 16, 128)
    draw = lambda seed, *shape: normal(seed, *shape, dtype="bfloat16")
    kinds = {
        "": (fuse.plain_attention, lambda seed: (), _cudnn),
        ", causal": (fuse.causal_attention, lambda seed: (), functools.partial(_cudnn, is_causal=True)),
        ", bias": (
            fuse.attention_with_bias,
            lambda seed: (draw(seed, heads, tokens, tokens),),
            lambda q, k, v, bias: _cudnn(q, k, v, bias=bias[None]),
        ),
        ", mask": (
            fuse.masked_attention,
            lambda seed: (jnp.arange(tokens) % 3 > 0,),
            lambda q, k, v, mask: _cudnn(q, k, v, mask=jnp.broadcast_to(mask, (1, 1, tokens, tokens))),
        ),
    }
    for kind, (fun, more, cudnn) in kinds.items():
        make = lambda seed, more=more: (
            *(draw(4 * seed + i, 1, tokens, heads, d) for i in range(3)),
            *more(4 * seed + 3),
        )
        yield Case(
            "fuse", f"attention of {tokens} tokens{kind}", "bfloat16", make=make, ours=jt.fuse(fun),
            peers={"xla": fun} | ({} if tiny else {"cudnn": cudnn}), reference=_exact(fun),
            bytes=8 * tokens * heads * d + (2 * tokens**2 * heads if kind == ", bias" else 0),
            flops=(2 if kind == ", causal" else 4) * tokens**2 * heads * d, tolerance=3e-2, calls=CALLS,
            budget_s=BUDGET_S,
        )  # fmt: skip


def _products(tiny: bool) -> Iterator[Case]:
    """Products in bfloat16, and what is behind them."""
    draw = lambda seed, *shape: normal(seed, *shape, dtype="bfloat16")
    kinds = {
        "product, bias, gelu": (fuse.linear_gelu, 1, 1, 0),
        "product, bias, silu, residual": (fuse.linear_residual, 1, 1, 1),
        "two products, gelu": (fuse.gated_mlp, 2, 0, 0),
    }
    for m, k, n in ((32, 16, 64),) if tiny else ((4096, 4096, 4096), (1024, 4096, 14336), (8192, 1024, 4096)):
        for kind, (fun, weights, biases, residuals) in kinds.items():
            shapes = [(m, k), *[(k, n)] * weights, *[(n,)] * biases, *[(m, n)] * residuals]
            make = lambda seed, shapes=shapes: tuple(draw(8 * seed + i, *shape) for i, shape in enumerate(shapes))
            yield Case(
                "fuse", f"{kind}, {m}x{k}x{n}", "bfloat16", make=make, ours=jt.fuse(fun), peers={"xla": fun},
                reference=_exact(fun), bytes=2 * sum(map(math.prod, shapes)) + 2 * m * n,
                flops=2 * m * n * k * weights, tolerance=3e-2, calls=CALLS, budget_s=BUDGET_S,
            )  # fmt: skip


def _rows(tiny: bool) -> Iterator[Case]:
    """Rows that are added to those of a table, and a norm in front of a product."""
    table, row, tokens = (64, 128, 32) if tiny else (32000, 1024, 8192)
    draw = lambda seed, *shape: normal(seed, *shape, dtype="bfloat16")
    picked = lambda seed: jax.random.randint(jax.random.key(seed), (tokens,), 0, table)
    yield Case(
        "fuse", f"embedding gradient, {tokens} of {table}x{row}", "bfloat16",
        make=lambda seed: (picked(seed), draw(seed, tokens, row), draw(seed + 1, table, row)),
        ours=jt.fuse(fuse.embedding_gradient), peers={"xla": fuse.embedding_gradient},
        reference=_exact(fuse.embedding_gradient), bytes=2 * (table + 2 * tokens) * row, tolerance=3e-2,
        calls=CALLS, budget_s=BUDGET_S,
    )  # fmt: skip
    for m, k, n in ((16, 16, 32),) if tiny else ((4096, 4096, 4096), (16, 4096, 14336)):
        yield Case(
            "fuse", f"rms norm and product, {m}x{k}x{n}", "bfloat16",
            make=lambda seed, m=m, k=k, n=n: (draw(seed, m, k), draw(seed + 1, k), draw(seed + 2, k, n)),
            ours=jt.fuse(fuse.norm_and_product), peers={"xla": fuse.norm_and_product},
            reference=_exact(fuse.norm_and_product), bytes=2 * (m * k + k * n + m * n), flops=2 * m * n * k,
            tolerance=3e-2, calls=CALLS, budget_s=BUDGET_S,
        )  # fmt: skip


_cudnn = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")


def _exact(fun):
    """The program in float32, with products in float32, too."""

    def reference(*args):
        wide = [x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in args]
        with jax.default_matmul_precision("highest"):
            return fun(*wide)

    return reference
