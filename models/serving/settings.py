"""The sizes of an engine: shapes of its programs, pages of its cache, limits of its requests."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jtile as jt
from jtile._errors import ModelError
from jtile.ops import QuantizedTensor, gpu_tiles
from jtile.ops.float8_rows import MANY

from ..decoder import Attention
from ..experts import Mixture
from ..generate import LanguageModel
from ..host import on_host
from ..prompt import is_int
from ..sampling import Sampling
from . import programs
from .scheduler import tiled

PAGE = 64
QUERIES = 64  # the queries of a tile
E4M3 = "float8_e4m3fn"
# tokens of prompts that the largest step has at least, rows of a tile of products
CHUNK, TILE_ROWS = 4096, 128
MOST_STEPS, GPU_STEPS = 8, (2, 4)  # steps of a launch: the most, and those on a GPU
CPU_BYTES, GPU_SHARE = 1 << 30, 0.8  # size of the cache: bytes on CPUs, on GPUs a share of the free memory


@dataclasses.dataclass(frozen=True)
class Settings:
    """rows: sequences at a time. shapes: ascending numbers of tokens that a step may have; the largest is its budget.
    pages, page: pages of the cache, and slots of a page. length: the most tokens of prompt and answer together.
    waiting: requests that may wait; prefixes: whether pages are shared; mixed: see `Scheduler`. splits: into how many
    parts the keys of a row are split, None for the quickest number. adapters: the names of low-rank adapters that
    requests may ask for. tile: so many tokens of a chunk of a prompt attend together; see `layout`. shown: whether
    pages of 8 bits may be converted once for all tiles of a step, see `seen`. launch_steps: how many steps a launch may
    have while all sequences decode, if it has several, ascending; if_late: only where the host is late, and longer
    launches save time."""

    rows: int
    shapes: tuple[int, ...]
    pages: int
    page: int
    length: int
    waiting: int
    prefixes: bool
    splits: int | None
    mixed: bool
    adapters: tuple[str, ...] = ()
    tile: int = 1
    shown: bool = False
    launch_steps: tuple[int, ...] = ()
    if_late: bool = False

    @property
    def width(self) -> int:
        """The number of pages of the longest sequence."""
        return -(-self.length // self.page)

    @property
    def options(self) -> dict[str, np.ndarray]:
        """The default options of sampling, for one row."""
        return Sampling().rows(1)

    def shape(self, tokens: int) -> int:
        """The smallest shape for so many tokens."""
        return next(n for n in self.shapes if n >= tokens)

    @property
    def singles(self) -> int:
        """How many tokens of a step stand alone where others come in tiles; 0 where there are no tiles."""
        return self.shape(self.rows) if self.tile > 1 else 0

    def seen(self, shape: int) -> int | None:
        """How many pages the tiles of a step of a shape may see, each row's counted for itself, for its pages to be
        converted at once: one a tile, so that many tiles see each page of a long prompt, and none is converted for
        nothing. None where they are not: in shapes but the largest, for which no other program is compiled."""
        most = (shape - self.singles) // self.tile
        return most if self.shown and shape == self.shapes[-1] and most > 0 else None

    def layout(self, counts: Sequence[int]) -> tuple[int, int]:
        """(the shape of a step with so many tokens of each of its sequences, how many of them stand alone). Sequences
        of one token have the first places. The others have whole tiles behind them, unless all fit there."""
        total = sum(counts)
        if self.tile == 1 or total <= self.singles:
            return self.shape(total), self.shape(total)
        return self.shape(self.singles + sum(tiled(n, self.tile) for n in counts if n > 1)), self.singles

    def samples(self, shape: int) -> int:
        """How many tokens get logits in a step of a shape: one of each sequence that may have tokens in it."""
        return min(shape, self.shape(self.rows))


def settings_of(
    lm: LanguageModel,
    rows: int | None = None,
    shapes: Sequence[int] | None = None,
    cache_tokens: int | None = None,
    max_length: int | None = None,
    max_waiting: int = 1024,
    prefix_cache: bool = True,
    invariant: bool = True,
    chunked_prefill: bool = True,
    adapters: Sequence[str] = (),
    launch_steps: int | None = None,
) -> Settings:
    """The settings of an engine from its arguments; see `Engine`.

    Raises:
      ModelError: an argument is not the number that it should be, or numbers do not fit each other.
    """
    if not isinstance(lm, LanguageModel):
        raise ModelError(f"an engine is of a LanguageModel, as jtile.models.load gives one; got {type(lm).__name__}")
    for name, value in (("rows", rows), ("cache_tokens", cache_tokens), ("max_length", max_length)):
        if value is not None and (not is_int(value) or value < 1):
            raise ModelError(f"{name} of an engine is an int of at least 1, or None; got {value!r}")
    if launch_steps is not None and (not is_int(launch_steps) or not 1 <= launch_steps <= MOST_STEPS):
        raise ModelError(f"launch_steps of an engine is an int from 1 to {MOST_STEPS}, or None; got {launch_steps!r}")
    if not is_int(max_waiting) or max_waiting < 0:
        raise ModelError(f"max_waiting of an engine is an int of at least 0, got {max_waiting!r}")
    cpu = on_host()
    rows = rows or (16 if cpu else 128)
    given = default_shapes(lm, rows, cpu, invariant, bool(adapters)) if shapes is None else shapes
    shapes = tuple(given) if np.iterable(given) else ()
    if not shapes or not all(is_int(n) and n > 0 for n in shapes) or list(shapes) != sorted(set(shapes)):
        raise ModelError(f"shapes of an engine are ascending numbers of tokens, got {given!r}")
    if shapes[-1] <= rows:
        raise ModelError(
            f"the largest shape of an engine, {shapes[-1]} tokens, has no room for a prompt beside {rows} rows; "
            "give a larger one, or fewer rows"
        )
    if lm.recurrent:
        raise ModelError(
            f"layers of {lm.source or 'the model'} keep a state and no tokens, and the pages of an engine hold tokens; "
            "use lm.generate, which takes batches"
        )
    page = lm.page_size or PAGE
    _check_devices(lm)
    longest = min(lm.config.max_length, lm.chunk or lm.config.max_length)
    if lm.chunk is not None and (max_length or 0) > longest:
        raise ModelError(
            f"layers of {lm.source or 'the model'} attend in chunks of {lm.chunk} tokens, and an engine serves "
            f"one chunk; give max_length of at most {longest}, or use lm.generate for longer texts"
        )
    length = min(max_length or longest, longest)
    if cache_tokens is None:
        cache_tokens = min(rows * length, _room(lm, cpu) // token_bytes(lm))
    pages = -(-cache_tokens // page)
    length = min(length, pages * page)
    splits = 1 if invariant else None
    switches = bool(prefix_cache), splits, bool(chunked_prefill)
    several = (() if cpu else GPU_STEPS) if launch_steps is None else () if launch_steps == 1 else (launch_steps,)
    steps = {"launch_steps": several, "if_late": launch_steps is None and not cpu}
    found = Settings(rows, shapes, pages, page, length, max_waiting, *switches, tuple(adapters), **steps)
    tile = tile_of(lm, cpu)
    if shapes[-1] - found.shape(rows) < tile:
        return found
    shown = lm.cache_dtype == E4M3 and not cpu and _all_twice(lm)  # see `mixed_attention`
    return dataclasses.replace(found, tile=tile, shapes=_in_tiles(shapes, found.shape(rows), tile), shown=shown)


def _in_tiles(shapes: tuple[int, ...], alone: int, tile: int) -> tuple[int, ...]:
    """The shapes, of which those that have more than the tokens that stand alone grow to whole tiles behind them."""
    return tuple(sorted({n if n <= alone else alone + -(-(n - alone) // tile) * tile for n in shapes}))


def _check_devices(lm: LanguageModel) -> None:
    """Refuses weights that are not where the engine's own arrays will be, and cuts that its pages do not know."""
    if lm.devices is not None:
        axes = lm.devices.axes
        if axes.expert or axes.context:
            role = "expert" if axes.expert else "context"
            raise ModelError(
                f"an engine runs over devices that share a model by 'tensor', and {lm.source or 'the model'} is cut by "
                f"{role!r}; load it with parallel={{'tensor': ...}} alone, which cuts experts by their features"
            )
        return
    here = jnp.zeros(()).sharding.device_set
    found = set().union(*(weight.sharding.device_set for weight in lm._weights))
    if found != here:
        raise ModelError(
            f"an engine runs on the default device, {here}, and the weights of {lm.source or 'the model'} are on "
            f"{found}; move them there, set jax_default_device, or let jtile.models.load cut the model over a mesh"
        )


def default_shapes(lm: LanguageModel, rows: int, cpu: bool, invariant: bool, adapters: bool = False) -> tuple[int, ...]:
    """Shapes for decoding `rows` sequences and fewer, and for chunks of prompts beside them.

    The numbers of a token depend on the kernels that a shape takes, and on how its rows are cut into tiles. On CPUs
    products of few rows (up to 16 with dense weights, up to 2 with K-quants) sum in another order than those of many,
    and so do the last rows where a tile reaches beyond them; those with other quantised weights have one order for all.
    Grouped products of experts have tiles for every number of rows. Fp8 weights round rows to 8 bits only where rows
    are many. `invariant` leaves out the shapes that differ from larger ones; `adapters` are dense whatever the weights
    are."""
    if not cpu and not (invariant and _has_experts(lm)):
        alone = -(-rows // 64) * 64  # tokens that decode; chunks of prompts come behind them
        small = (64,) if invariant else (1, 8, 32, 64, 128, 256)
        if invariant and _rounded(lm):
            alone, small = max(alone, MANY), ()
        return tuple(sorted({*(n for n in small if n < alone), alone, alone + 512, alone + 2048, budget_of(alone)}))
    if not cpu:
        chunk, small = max(1024, 4 * rows), ()
    else:
        chunk = max(256, -(-2 * rows // 64) * 64)
        small = (1, 4, 16, 24, 64)
        if invariant:
            small = (24, 64) if adapters else _steady(lm)
    if invariant and _has_experts(lm):
        return (max(64, -(-2 * rows // 64) * 64),)
    return tuple(sorted({*(n for n in small if n < chunk), chunk}))


def budget_of(alone: int) -> int:
    """The number of tokens of the largest step on a GPU, with so many that stand alone; prompts are computed in such
    steps while many requests wait. Its products have whole rounds of tiles: results of models have multiples of 4096
    features, which are 16 tiles of 256, so that with few tokens a good part of the processors waits for the last
    round."""
    units = jt.target().programs_at_once
    whole = TILE_ROWS * (units // math.gcd(units, 4096 // 256))
    return -(-(alone + CHUNK) // whole) * whole


def tile_of(lm: LanguageModel, cpu: bool) -> int:
    """How many tokens attend together: with the heads that share keys they are the rows of a tile of 64, which is what
    the matrix units of a GPU take, or of two beside each other. 1: each alone, as in latent attention, whose heads fill
    tiles, and on CPUs."""
    if cpu:
        return 1
    attentions = [block.attention for block in lm.part.blocks]
    of = lambda one: one.config.heads // one.config.kv_heads if isinstance(one, Attention) else QUERIES
    queries = 2 * QUERIES if _all_twice(lm) else QUERIES
    return max(queries // jt.next_power_of_2(max(map(of, attentions))), 1)


def _all_twice(lm: LanguageModel) -> bool:
    return all(_twice(lm, block.attention) for block in lm.part.blocks)


def _twice(lm: LanguageModel, attention) -> bool:
    """Whether tiles have twice as many queries: where one kernel takes both halves, `hopper_chunks`, and with caches of
    e4m3, whose keys are converted once a tile."""
    if not gpu_tiles.warpgroups() or not isinstance(attention, Attention) or lm.dtype == jnp.float32:
        return False
    c, group = attention.config, attention.config.heads // attention.config.kv_heads
    simple = (c.window, c.chunk, attention.sinks) == (None,) * 3 and lm.cache_dtype in (None, E4M3)
    return simple and (lm.page_size or PAGE) % 64 == 0 and c.head_dim in (64, 128) and group in (2, 4, 8, 16)


def _matrices(lm: LanguageModel) -> list:
    """The dense and quantised matrices of the model."""
    is_weight = lambda x: isinstance(x, QuantizedTensor)
    leaves = jax.tree.leaves(jax.tree.unflatten(lm._structure[1], lm._weights), is_leaf=is_weight)
    return [x for x in leaves if is_weight(x) or x.ndim > 1]


def _steady(lm: LanguageModel) -> tuple[int, ...]:
    """The small shapes of a CPU whose products sum in the order of all larger ones."""
    matrices = _matrices(lm)
    if not all(isinstance(x, QuantizedTensor) for x in matrices):
        return 24, 64
    alone = all(x.shape[-1] % 16 == 0 and not x.is_super for x in matrices)
    return (1 if alone else 3), 4, 16, 32, 64, 128


def _rounded(lm: LanguageModel) -> bool:
    """Whether products with many rows round the rows to 8 bits."""
    return any(isinstance(x, QuantizedTensor) and x.activations in ("rows", "blocks") for x in _matrices(lm))


def _has_experts(lm: LanguageModel) -> bool:
    return any(isinstance(module, Mixture) for _, module in nnx.iter_modules(lm.part))


def token_bytes(lm: LanguageModel) -> int:
    """Bytes that the cache of one device takes for one token, in all layers."""
    devices = 1 if lm.devices is None else lm.devices.size("tensor")
    entries = programs.pool_of(lm, 1, 1, lm.cache_dtype)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(entries)) // devices


def _room(lm: LanguageModel, cpu: bool) -> int:
    """Bytes for the cache of one device; devices of a CPU share its memory."""
    devices = jax.devices()[:1] if lm.devices is None else list(lm.devices.mesh.devices.flat)
    if cpu:
        return CPU_BYTES // len(devices)
    found = [device.memory_stats() or {} for device in devices]
    if not all("bytes_limit" in stats for stats in found):
        return CPU_BYTES
    return min(int(GPU_SHARE * (stats["bytes_limit"] - stats["bytes_in_use"])) for stats in found)
