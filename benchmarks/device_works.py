"""The collectives that `python -m benchmarks devices` measures: their arrays on each of n devices, and one call of
jtile or of its peer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks import device_peers
from jtile import ops
from jtile.ops import collectives

EXPERTS, CHOSEN = 256, 8  # of DeepSeek-V3: all of them, and those of a token
SAME = {"all_reduce_rms_norm": (1, 2), "mla_decode": (0,), "decode_attention": (0,)}  # operands that devices share
JTILE, XLA = "", "_reference"  # what stands behind the name of a function of `collectives`
MOSAIC = "mosaic"  # with the number of tiles behind it, Pallas's kernel
ONE = "one"  # one device with the work of all
RATE, LINK = 400e6, 200e3  # operations and bytes a microsecond, to guess how long a call takes
SLOW = 50.0  # microseconds a token of XLA's exchange with experts, which waits for the host


class Work(NamedTuple):
    """One line of the table: the function `name` of `jtile.ops.collectives`, and its arrays on each of n devices."""

    name: str
    label: str
    shapes: Callable[[int], list[tuple[int, ...]]]
    dtype: str = "bfloat16"
    backward: bool = False

    @property
    def key(self) -> str:
        """The name of this line in records."""
        return f"{self.name}, backward" if self.backward else self.name


def _sum(label: str, rows: int) -> Work:
    return Work("all_reduce", label, lambda n: [(rows, 1024)])


def _gathered(m: int, k: int, f: int) -> Work:
    return Work("all_gather_matmul", f"{m}x{k}x{f}", lambda n: [(m // n, k), (k, f // n)])


def _summed(name: str, m: int, k: int, f: int) -> Work:
    return Work(name, f"{m}x{k}x{f}", lambda n: [(m, k // n), (k // n, f)])


def _tokens(name: str, count: int) -> Work:
    """Tokens of a device, parts of which go to each device."""
    return Work(name, f"{count}x7168", lambda n: [(max(1, count // n) * n, 7168)])


def _ring(tokens: int | None, backward: bool = False) -> Work:
    """Causal attention of 32 heads over 8 of keys: to so many tokens in all, or to 32768 on each device."""
    each = lambda n: 32768 if tokens is None else tokens // n
    label = "32768 tokens a device" if tokens is None else f"{tokens} tokens"
    return Work("ring_attention", label, lambda n: [(1, each(n), 32, 128), *[(1, each(n), 8, 128)] * 2],
                backward=backward)  # fmt: skip


WORKS = (
    _sum("8 KiB", 4),
    Work("all_reduce_rms_norm", "32 KiB", lambda n: [(4, 4096), (4096,), (4, 4096)]),
    _sum("32 KiB", 16),
    _sum("512 KiB", 256),
    _sum("2 MiB", 1024),
    _sum("8 MiB", 4096),
    _sum("64 MiB", 32768),
    _gathered(8192, 4096, 14336),
    _gathered(4096, 7168, 4096),
    _gathered(512, 7168, 4096),
    _gathered(64, 7168, 4096),
    _summed("matmul_reduce_scatter", 8192, 14336, 4096),
    _summed("matmul_reduce_scatter", 4096, 7168, 4096),
    _summed("matmul_reduce_scatter", 512, 7168, 4096),
    _summed("matmul_reduce_scatter", 64, 7168, 4096),
    _summed("matmul_all_reduce", 8192, 14336, 4096),
    _summed("matmul_all_reduce", 512, 14336, 4096),
    _summed("matmul_all_reduce", 64, 14336, 4096),
    _tokens("all_to_all", 128),
    _tokens("all_to_all", 4096),
    _tokens("all_to_all", 32768),
    Work("experts", "128 tokens a device", lambda n: [(128, 7168)]),
    Work("experts", "4096 tokens a device", lambda n: [(4096, 7168)]),
    Work("experts", "32768 tokens", lambda n: [(32768 // n, 7168)]),
    Work("mla_decode", "64 rows of 16384 tokens", lambda n: [(64, 128, 576), (64, 16384 // n, 576)]),
    Work("decode_attention", "64 rows of 16384 tokens", lambda n: [(64, 32, 128), *[(64, 16384 // n, 8, 128)] * 2]),
    _ring(None),
    _ring(None, backward=True),
    _ring(131072),
    _ring(131072, backward=True),
)


def guess(work: Work, side: str, n: int) -> float:
    """Microseconds of a call, about: by what it computes, and by the bytes of its arrays."""
    shapes = work.shapes(n)
    if work.name == "experts" and side == XLA:
        return SLOW * shapes[0][0]
    us = 5.0 + sum(2 * math.prod(s) for s in shapes) / LINK
    if work.name == "ring_attention":
        _, tokens, heads, d = shapes[0]
        us = 2 * tokens * n * tokens * heads * d * (4 if work.backward else 1) / RATE
        us *= n if side == ONE else 1
    elif "matmul" in work.name:
        (m, k), (_, columns) = shapes
        us += 2 * m * (n if work.name == "all_gather_matmul" else 1) * k * columns / RATE
    return us


def small(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Dimensions small enough for a CPU, which devices can still share equally."""
    return tuple(size if size <= 128 else max(8, size // 64) for size in shape)


def drawn(work: Work, n: int, tiny: bool, scale: float | None = None, device: Any = 0) -> list[jax.Array]:
    """The arrays of a device, normal with this scale: 0.1, or zero where they are summed again and again, and stay
    so."""
    shapes = [small(shape) if tiny else shape for shape in work.shapes(n)]
    if tiny and work.name == "mla_decode":
        shapes = [(2, 4, 576), (2, 16, 576)]  # the widths are those of the kernel
    if scale is None:
        scale = 0.0 if work.name == "all_reduce" else 0.1
    seeds = [k if k in SAME.get(work.name, ()) else k + 8 * device for k in range(len(shapes))]
    dtype = jnp.dtype(work.dtype)
    return [scale * jax.random.normal(jax.random.key(k), s, dtype) for k, s in zip(seeds, shapes, strict=True)]


def uneven(tokens: int) -> jax.Array:
    """int32 [tokens, CHOSEN]: experts of each token, all different, of which the first are chosen more often than
    others: expert e with a weight of 1 / (e + 32), on every device in another order."""
    taste = -jnp.log(jnp.arange(EXPERTS) + 32.0)
    noise = jax.random.gumbel(jax.random.key(7), (tokens, EXPERTS))
    return jax.lax.top_k(taste + noise, CHOSEN)[1].astype(jnp.int32)


def call(work: Work, side: str, arrays: list[jax.Array]) -> Any:
    """The result of one call on a device, by `JTILE`, `XLA` or `MOSAIC`."""
    if side.startswith(MOSAIC):
        tiles = device_peers.MOSAIC[int(side.removeprefix(MOSAIC))]
        return device_peers.mosaic_all_gather_matmul(arrays[0], arrays[1], "x", tiles)
    if work.name == "experts":
        return _to_experts(side, arrays[0])
    if side == XLA and work.name in ("mla_decode", "decode_attention"):
        run: Callable = getattr(device_peers, work.name)
    else:
        run = getattr(collectives, work.name + side)
    if work.name == "all_reduce_rms_norm":
        y, total = run(*arrays[:2], "x", residual=arrays[2])
        return y, arrays[1], total
    if work.name == "ring_attention":
        return attend(lambda q, k, v: run(q, k, v, "x", causal=True, zigzag=True), work, arrays)
    if work.name in ("mla_decode", "decode_attention"):
        return run(*arrays, jnp.full(arrays[0].shape[0], arrays[1].shape[1], jnp.int32), "x")
    return run(*arrays, "x")


def _to_experts(side: str, x: jax.Array) -> jax.Array:
    """Tokens sent to their experts and back: their mean."""
    experts = uneven(len(x))
    if side == XLA and jax.default_backend() != "cpu":  # CPUs have no ragged exchange
        return device_peers.to_experts(x, experts, EXPERTS, "x")
    go, back = (getattr(collectives, name + side) for name in ("dispatch", "combine"))
    rows, _, routes = go(x, experts, "x", count=EXPERTS)
    return back(rows, routes, "x", weights=jnp.full(experts.shape, 1 / CHOSEN, jnp.float32))


def on_one_device(work: Work, arrays: list[jax.Array]) -> Any:
    """Attention to the tokens of all devices, on one."""
    return attend(lambda q, k, v: ops.attention(q, k, v, causal=True), work, arrays)


def attend(run: Callable, work: Work, arrays: list[jax.Array]) -> Any:
    """Attention, or its gradients from the output as a cotangent, whose forward pass counts too."""
    if not work.backward:
        return run(*arrays)
    out, pull = jax.vjp(run, *arrays)
    return pull(out)
