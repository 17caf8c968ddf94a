"""Linear attention and its kin, forward and gradient, against the chunked jnp forms under XLA, and torch.compile."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from benchmarks.backward import pulled
from benchmarks.gpu.case import Case, Torch
from benchmarks.recurrences import KINDS, OTHERS, chunked, make, ours, plain


def cases(tiny: bool = False) -> Iterator[Case]:
    batch, t, heads, d = (1, 128, 2, 16) if tiny else (4, 4096, 16, 128)
    for kind in KINDS:
        made = functools.partial(make, kind=kind, batch=batch, t=t, heads=heads, d=d, dtype="bfloat16")
        n, elements = len(jax.eval_shape(made, 0)), batch * t * heads * d
        given = {
            "config": f"{kind}, {batch}x{heads}x{t}x{d}", "dtype": "bfloat16", "tolerance": 3e-2,
        }  # fmt: skip
        torch = {"torch.compile": Torch(_torch, compiled=True)} if kind == "plain" else {}
        yield Case(
            "linear_attention", make=made, ours=ours(kind), peers={"xla": plain(kind)} | torch, reference=_exact,
            bytes=8 * elements, flops=4 * elements * d, **given,
        )  # fmt: skip
        with_ct = lambda seed, made=made: (made(seed + 1)[2], *made(seed))
        yield Case(
            "linear_attention_gradient", make=with_ct, ours=pulled(ours(kind), n),
            peers={"xla": pulled(plain(kind), n)}, reference=_exact_gradient, bytes=16 * elements,
            flops=12 * elements * d, **given,
        )  # fmt: skip
    for name, (op, peer, given) in OTHERS.items():
        made = functools.partial(given, batch=batch, t=t, heads=heads, d=d, dtype="bfloat16")
        elements = batch * t * heads * d
        exact = lambda *args, peer=peer: peer(*(x.astype(jnp.float32) for x in args))
        given = {"config": f"{batch}x{heads}x{t}x{d}", "dtype": "bfloat16", "tolerance": 3e-2}
        yield Case(
            name, make=made, ours=op, peers={"xla": peer}, reference=exact,
            bytes=(14 if name == "rwkv7" else 6) * elements, **given,
        )  # fmt: skip


def _exact(q, k, v, *more):
    """The plain form in float32, a batch row at a time, since the gradient of a scan keeps much."""
    rows = (*(x.astype(jnp.float32) for x in (q, k, v)), *more)
    one = lambda row: chunked(*(x[None] for x in row))[0]
    return jax.lax.map(one, rows)


def _exact_gradient(ct, *args):
    ct, q, k, v = (x.astype(jnp.float32) for x in (ct, *args[:3]))
    return pulled(_exact, len(args))(ct, q, k, v, *args[3:])


def _torch(torch, q, k, v, c: int = 64):
    """Plain linear attention: the states in front of all chunks are a cumulative sum."""
    q, k, v = (x.unflatten(1, (-1, c)).transpose(2, 3) for x in (q * q.shape[-1] ** -0.5, k, v))
    states = (k.transpose(-1, -2) @ v).float().cumsum(1)
    before = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], 1).to(v.dtype)
    o = q @ before + (q @ k.transpose(-1, -2)).tril() @ v
    return o.transpose(2, 3).flatten(1, 2)
