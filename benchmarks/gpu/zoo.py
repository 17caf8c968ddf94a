"""Kernels of the library that stand alone, against jnp under XLA and torch."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import zoo
from benchmarks.backward import pulled
from benchmarks.data import normal
from benchmarks.gpu.case import Case, Torch
from jtile import ops
from jtile.ops import optimizers
from jtile.ops.optimizers import adamw_reference, newton_schulz_reference


def cases(tiny: bool = False) -> Iterator[Case]:
    yield from _linear_cross_entropy(tiny)
    yield from _segments(tiny)
    yield from _optimizers(tiny)
    yield from _filters(tiny)
    yield from _convolutions(tiny)
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
        "linear_cross_entropy", make=make, ours=ops.linear_cross_entropy, reference=_exact(zoo.linear_cross_entropy),
        peers={"xla": zoo.linear_cross_entropy, "torch.compile": Torch(torch, compiled=True)},
        flops=2 * rows * k * vocab, **given,
    )  # fmt: skip
    yield Case(
        "linear_cross_entropy_gradient", make=lambda seed: (normal(seed + 7, rows), *make(seed)),
        ours=pulled(ops.linear_cross_entropy, 2), peers={"xla": pulled(zoo.linear_cross_entropy, 2)},
        reference=lambda ct, *args: pulled(_exact(zoo.linear_cross_entropy), 2)(ct, *args),
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
        make=lambda seed: (normal(seed, m, n, dtype="bfloat16"),), reference=_exact(newton_schulz_reference),
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


def _convolutions(tiny: bool) -> Iterator[Case]:
    """Convolutions against cuDNN, which XLA calls, and torch."""
    batch = 1 if tiny else 64
    for name in list(zoo.CONVOLUTIONS)[2:3] if tiny else zoo.CONVOLUTIONS:
        make = lambda seed, name=name: zoo.convolution_case(name, batch, "bfloat16", seed)[2]
        ours, xla, args, flops = zoo.convolution_case(name, 1, "bfloat16")
        given: dict[str, Any] = {"config": f"{batch} x {name}", "dtype": "bfloat16", "make": make}
        moved = batch * args[0].size + args[1].size
        torch = {"torch": Torch(functools.partial(_torch_convolution, name))}
        torch_gradient = {"torch": Torch(functools.partial(_torch_gradient, name))}
        yield Case(
            "convolution", ours=ours, peers={"xla": xla, **torch}, reference=_exact(xla), bytes=2 * moved,
            flops=batch * flops, prepare={"torch": lambda x, w: (x, jnp.moveaxis(w, -1, 0))}, **given,
        )  # fmt: skip
        given["make"] = lambda seed, make=make, ours=ours: (jax.vjp(ours, *make(seed))[0], *make(seed))
        yield Case(
            "convolution_gradient", ours=pulled(ours, 2), peers={"xla": pulled(xla, 2), **torch_gradient},
            bytes=6 * moved, reference=_exact(pulled(xla, 2)), flops=2 * batch * flops,
            prepare={"torch": lambda g, x, w: (g, x, jnp.moveaxis(w, -1, 0))}, **given,
        )  # fmt: skip


def _torch_convolution(name: str, torch, x, w):
    """A convolution of the suite by torch, channels last in memory: w [outputs, *window, channels], or, transposed,
    [channels, *window, outputs]. A window along one axis is one along two, of which one side is 1: that is quicker."""
    window, options = zoo.CONVOLUTIONS[name][1], dict(zoo.CONVOLUTIONS[name][2])
    torch.backends.cudnn.benchmark = True
    stride, rank = options.get("stride", 1), max(2, x.dim() - 2)
    if x.dim() == 3:
        x, w, window = x[:, None], w[:, None], (1, *window)
    x, w = (z.movedim(-1, 1) for z in (x, w))
    if options.get("transposed"):
        pad = [(k - stride) // 2 for k in window[:rank]]
        return torch.nn.functional.conv_transpose2d(x, w, stride=stride, padding=pad).movedim(1, -1)
    over = [max(k - (stride if n % stride == 0 else n % stride), 0) for n, k in zip(x.shape[2:], window)]
    if any(n % 2 for n in over):
        x = torch.nn.functional.pad(x, [side for n in reversed(over) for side in (n // 2, n - n // 2)])
        over = [0] * rank
    run = torch.nn.functional.conv2d if rank == 2 else torch.nn.functional.conv3d
    y = run(x, w, stride=stride, padding=[n // 2 for n in over], groups=options.get("groups", 1)).movedim(1, -1)
    return y[:, 0] if len(zoo.CONVOLUTIONS[name][0]) == 2 else y


def _torch_gradient(name: str, torch, g, x, w):
    """The gradients of x and w of `_torch_convolution`, for the cotangents g."""
    window, options = zoo.CONVOLUTIONS[name][1], dict(zoo.CONVOLUTIONS[name][2])
    torch.backends.cudnn.benchmark = True
    stride, rank, transposed = options.get("stride", 1), max(2, x.dim() - 2), options.get("transposed", False)
    if one := x.dim() == 3:
        g, x, w, window = g[:, None], x[:, None], w[:, None], (1, *window)
    g, x, w = (z.movedim(-1, 1) for z in (g, x, w))
    sides = x.shape[2:]
    over = [max(k - (stride if n % stride == 0 else n % stride), 0) for n, k in zip(sides, window)]
    pad, front = [n // 2 for n in over], [0] * rank
    if any(n % 2 for n in over) and not transposed:
        x = torch.nn.functional.pad(x, [side for n in reversed(over) for side in (n // 2, n - n // 2)])
        pad, front = front, pad
    dx, dw, _ = torch.ops.aten.convolution_backward(
        g, x, w, None, [stride] * rank, pad, [1] * rank, transposed, [0] * rank, options.get("groups", 1),
        [True, True, False],
    )  # fmt: skip
    for k, (at, n) in enumerate(zip(front, sides)):
        dx = dx.narrow(2 + k, at, n)
    dx, dw = dx.movedim(1, -1), dw.movedim(1, -1).movedim(0, -1)
    return (dx[:, 0], dw[0]) if one else (dx, dw)


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


def _exact(f):
    """`f` in float32."""
    wide = lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
    return lambda *args: f(*map(wide, args))
