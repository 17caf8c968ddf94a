"""Array programs as people write them in jnp, by `jt.fuse` and by XLA; attention in jnp beside cuDNN's, too."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

import jtile as jt
from benchmarks import fuse
from benchmarks.data import normal, size
from benchmarks.gpu.case import Case

TIMES = 4  # the sides of the programs for CPUs
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
            bytes=size(shapes[name], jax.eval_shape(fun, *shapes[name])), calls=CALLS, tolerance=3e-3,
        )  # fmt: skip
    tokens, heads, d = (64, 2, 16) if tiny else (8192, 16, 128)
    for causal in (False, True):
        fun = fuse.causal_attention if causal else fuse.plain_attention
        cudnn = functools.partial(jax.nn.dot_product_attention, is_causal=causal, implementation="cudnn")
        yield Case(
            "fuse", f"attention of {tokens} tokens" + ", causal" * causal, "bfloat16",
            make=lambda seed: tuple(normal(3 * seed + i, 1, tokens, heads, d, dtype="bfloat16") for i in range(3)),
            ours=jt.fuse(fun), peers={"xla": fun} | ({} if tiny else {"cudnn": cudnn}), reference=_exact(fun),
            bytes=8 * tokens * heads * d, flops=(2 if causal else 4) * tokens**2 * heads * d, tolerance=3e-2,
        )  # fmt: skip


def _exact(fun):
    """The program in float32, with products in float32, too."""

    def reference(*args):
        wide = [x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in args]
        with jax.default_matmul_precision("highest"):
            return fun(*wide)

    return reference
