"""Kernels of the library that stand alone, against jnp under XLA and torch."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from benchmarks import zoo
from benchmarks.backward import pulled
from benchmarks.data import normal
from benchmarks.gpu import convolutions
from benchmarks.gpu.case import Case, Torch, exact
from jtile import ops
from jtile.ops import optimizers
from jtile.ops.optimizers import adamw_reference, newton_schulz_reference


def cases(tiny: bool = False) -> Iterator[Case]:
    yield from _linear_cross_entropy(tiny)
    yield from _segments(tiny)
    yield from _optimizers(tiny)
    yield from _filters(tiny)
    yield from convolutions.cases(tiny)
    for make, of in zoo.array_cases(True, tiny):
        # Calls that XLA is known to merge; the others it is asked for: see `merged.py`.
        once: dict[str, Any] = {"calls": 1} if of["workload"] in ("n_body", "sample_top_p") else {}
        reference = of["peers"]["xla"]
        if of["workload"] == "bsr_matmul":  # XLA does not compile sums of segments of so many numbers in minutes
            once = {"prepare": {"xla": _in_padded_rows}}
            of = {**of, "peers": {"xla": _by_padded_rows, "torch": Torch(_torch_bsr)}}
            reference = lambda *args: jnp.matmul(*_dense(*args), precision="highest")
        yield Case(**of, **once, make=make, reference=reference)


def _dense(data, columns, starts, b):
    """A matrix of blocks as a dense one, and b."""
    (entries, r, c), m = data.shape, starts.shape[0] - 1
    rows = jnp.searchsorted(starts, jnp.arange(entries), side="right") - 1
    blocks = jnp.zeros((m, b.shape[0] // c, r, c), data.dtype).at[rows, columns].add(data)
    return blocks.swapaxes(1, 2).reshape(m * r, b.shape[0]), b


def _in_padded_rows(data, columns, starts, b):
    """The blocks of each row of blocks and their columns, with blocks of zeros behind them: as many in every row, which
    is six roots more than the mean, and so enough for random ones. And b."""
    rows = starts.shape[0] - 1
    mean = data.shape[0] // rows
    at = starts[:-1, None] + jnp.arange(mean + 6 * math.isqrt(mean))[None, :]
    inside = at < starts[1:, None]
    at = jnp.where(inside, at, 0)
    return jnp.where(inside[:, :, None, None], data[at], 0), jnp.where(inside, columns[at], 0), b


def _by_padded_rows(data, columns, b):
    """A product of what `_in_padded_rows` gives: a gather, and one product for each row of blocks."""
    blocks = b.reshape(-1, data.shape[-1], b.shape[1])[columns]
    return jnp.einsum("mprc,mpcn->mrn", data, blocks).reshape(-1, b.shape[1])


def _torch_bsr(torch, data, columns, starts, b):
    """A product by cuSPARSE, in float32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    size = (starts.shape[0] - 1) * data.shape[1], b.shape[0]
    with torch.sparse.check_sparse_tensor_invariants(False):
        return torch.sparse_bsr_tensor(starts, columns, data, size=size, device=b.device) @ b


def _linear_cross_entropy(tiny: bool) -> Iterator[Case]:
    rows, k, vocab = (16, 64, 1000) if tiny else (4096, 4096, 128256)
    make = functools.partial(zoo.linear_cross_entropy_operands, rows=rows, k=k, vocab=vocab, dtype="bfloat16")
    given = {"config": f"{rows}x{k}x{vocab}", "dtype": "bfloat16", "bytes": 2 * k * (rows + vocab)}
    torch = lambda torch, x, w, labels: torch.nn.functional.cross_entropy(
        (x @ w.T).float(), labels.long(), reduction="none"
    )
    yield Case(
        "linear_cross_entropy", make=make, ours=ops.linear_cross_entropy, reference=exact(zoo.linear_cross_entropy),
        peers={"xla": zoo.linear_cross_entropy, "torch.compile": Torch(torch, compiled=True)},
        flops=2 * rows * k * vocab, **given,
    )  # fmt: skip
    yield Case(
        "linear_cross_entropy_gradient", make=lambda seed: (normal(seed + 7, rows), *make(seed)),
        ours=pulled(ops.linear_cross_entropy, 2), peers={"xla": pulled(zoo.linear_cross_entropy, 2)},
        reference=lambda ct, *args: pulled(exact(zoo.linear_cross_entropy), 2)(ct, *args),
        flops=6 * rows * k * vocab, **given,
    )  # fmt: skip


def _segments(tiny: bool) -> Iterator[Case]:
    n, f, segments = (64, 8, 7) if tiny else (1 << 20, 128, 65536)
    for in_order in (False, True):
        ours, xla = zoo.summed(segments, in_order)
        yield Case(
            "segment_sum", f"{n}x{f} of {segments}" + ", sorted" * in_order, "float32", ours=ours, peers={"xla": xla},
            make=functools.partial(zoo.segment_operands, n=n, f=f, segments=segments, in_order=in_order),
            reference=xla, bytes=4 * f * (n + segments), tolerance=1e-5,
        )  # fmt: skip


def _optimizers(tiny: bool) -> Iterator[Case]:
    n = 32 if tiny else 8192
    xla = zoo.adam_step(adamw_reference)
    yield Case(
        "adamw", f"{n}x{n}, {zoo.STEPS} steps", "float32", ours=zoo.adam_step(ops.adamw), peers={"xla": xla},
        make=lambda seed: tuple(normal(4 * seed + s, n, n) for s in range(4)), reference=xla,
        bytes=28 * zoo.STEPS * n * n, tolerance=1e-5,
    )  # fmt: skip
    m, n = (32, 48) if tiny else (4096, 14336)
    yield Case(
        "newton_schulz", f"{m}x{n}", "bfloat16", ours=ops.newton_schulz,
        make=lambda seed: (normal(seed, m, n, dtype="bfloat16"),), reference=exact(newton_schulz_reference),
        peers={"xla": _muon, "torch.compile": Torch(_torch_muon, compiled=True)}, bytes=4 * m * n,
        flops=5 * (3 * m * m * n + m**3), tolerance=5e-2,
    )  # fmt: skip


def _filters(tiny: bool) -> Iterator[Case]:
    sides = (40, 12) if tiny else (8192, 512)
    for k, (name, config, ours, peer, args) in enumerate(zoo.filter_cases(1, 1)):
        # the arguments are those of any size: made when they are asked for
        make = lambda seed, k=k: list(zoo.filter_cases(*sides, seed))[k][4]
        config = config.replace("1x1,", f"{sides[0]}x{sides[0]},").replace("1^3", f"{sides[1]}^3")
        number = args[0].ndim
        yield Case(
            name, config, "float32", make=make, ours=ours, peers={"xla": peer}, reference=peer,
            bytes=8 * sides[number - 2] ** number, tolerance=1e-5,
        )  # fmt: skip


def _muon(x):
    """The update of Muon as it is written for training, in bfloat16."""
    a, b, c = optimizers.QUINTIC
    X = x / (jnp.linalg.norm(x.astype(jnp.float32)) + 1e-7).astype(x.dtype)
    for _ in range(5):
        A = X @ X.T
        X = jnp.asarray(a, x.dtype) * X + (jnp.asarray(b, x.dtype) * A + jnp.asarray(c, x.dtype) * (A @ A)) @ X
    return X


def _torch_muon(torch, x):
    a, b, c = optimizers.QUINTIC
    X = x / (x.norm() + 1e-7)
    for _ in range(5):
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return X
