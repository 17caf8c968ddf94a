"""How far the tiles that `ops.matmul` chooses by shape are from the best of a search, on shapes that neither the
shipped tuning records nor `tiles.json`, which the choices are fitted to, have. The peer is the best form that was
found, the choice among them: a ratio of 0.95 means that tuning gains 5 %."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import importlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jtile as jt
from benchmarks.data import normal
from benchmarks.gpu import timing
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.measure import Options, relative_error, short
from benchmarks.harness import Result, result
from jtile import ops
from jtile.ops import gpu_tiles, hopper_tiles, spaces
from jtile.testing import Timing
from jtile.tune.warpgroups import LINE

_matmul: Any = importlib.import_module("jtile.ops.matmul")  # `ops.matmul` is its function
Form = Mapping[str, int]  # keyword arguments of `in_tiles`

USUAL = {"num_warps": 4, "stages": 3}  # of products of few rows; others are tried with the choice's tile
ROUNDS, LAST_ROUNDS = 6, 8  # samples of every form, then more samples of the forms that are left
LEFT = 1.08  # forms up to so many times the shortest median are left
SETS, CALLS = 16, 192  # sets of arguments; calls of a short kernel in one program, so that its start does not count
PROGRAM_US = 3000.0
COMPILERS = 16  # threads


@dataclasses.dataclass(frozen=True)
class Product:
    """A product [m, k] [k, n], or `batch` of them: the order of its operands in memory, as in "NT", and their dtype."""

    m: int
    n: int
    k: int
    order: str = "NN"
    dtype: str = "bfloat16"
    batch: int = 1

    @property
    def config(self) -> str:
        return f"{f'{self.batch}x' if self.batch > 1 else ''}{self.m}x{self.n}x{self.k} {self.order}"

    @property
    def whole(self) -> bool:
        """Whether the operands are integers."""
        return self.dtype == "int8"

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    @property
    def transposes(self) -> dict[str, Any]:
        return {f"transpose_{name}": letter == "T" for name, letter in zip("ab", self.order)}

    def shapes(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        swap = lambda letter, r, c: (self.batch, *((c, r) if letter == "T" else (r, c)))
        return swap(self.order[0], self.m, self.k), swap(self.order[1], self.k, self.n)

    def types(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(jax.ShapeDtypeStruct(s, jnp.dtype(self.dtype)) for s in self.shapes())

    def make(self, seed: int) -> tuple[jax.Array, ...]:
        scale = 40.0 if self.whole else 1.0  # integers from -128 to 127, mostly
        return tuple(normal(2 * seed + j, *s, dtype=self.dtype, scale=scale) for j, s in enumerate(self.shapes()))

    def ours(self, a, b):
        """The product as a user calls it."""
        return ops.matmul(a, b, **self.transposes)

    def formed(self, form: Form) -> Callable:
        """The product in another form."""
        more = dict(out_dtype="int32") if self.whole else {}
        return lambda a, b: _matmul.in_tiles(a, b, **self.transposes, **more, **form)


P = Product
SHAPES = (
    P(2176, 3968, 3072), P(1344, 6400, 2560, "NT"), P(4224, 2304, 4096, "TN"), P(736, 9984, 3328),
    P(320, 11264, 4096, "NT"), P(224, 7168, 5120), P(120, 18432, 3072, "NT"), P(176, 14848, 2304),
    P(2880, 1152, 6912), P(1152, 1920, 16384, "TN"), P(3584, 4480, 5888, "TT"), P(5000, 2600, 3400),
    P(1904, 3104, 2304, "NT"), P(704, 832, 2048), P(1216, 1216, 2432), P(4864, 4864, 1792),
    P(2560, 7680, 1280, "NN", "float16"), P(1792, 5632, 5120, "NT", "int8"), P(2688, 3200, 4608, "NT", "float8_e4m3fn"),
    P(40, 12288, 3072, "NT"),
)  # fmt: skip
TINY = (P(96, 96, 64), P(96, 64, 64, "TT", "float16"))


def results(machine: Machine, options: Options, say: Callable[[str], None], tiny: bool = False) -> Iterator[Result]:
    """A result for each shape: the time of the choice, and of the best form, each checked against the choice's result.

    All forms of all shapes compile first, side by side; nothing is timed meanwhile.
    """
    began = time.monotonic()
    products = [p for p in (TINY if tiny else SHAPES) if options.takes(p.config, p.dtype)]
    calls = {p: (2, 2) if tiny else calls_of(p, options) for p in products}
    programs = _compiled({p: forms(p)[: 4 if tiny else None] for p in products}, calls)
    say(f"choices: {sum(map(len, programs.values()))} programs compiled in {time.monotonic() - began:.0f} s")
    for p in products:
        yield _searched(p, programs.pop(p), calls[p], machine, say)


def choice(p: Product) -> Form:
    """The form that `ours` chooses, or would, had it no tiles of any columns."""
    left, right = (letter == "T" for letter in p.order)
    gpu = "warps" in jt.target().features
    of = dict(left=left, fast=p.whole, cut=True) if gpu else {}
    tiles = _matmul.tiles(p.m, p.n, p.k, p.itemsize, transposed=right, batch=p.batch, **of)
    if not gpu:
        return tiles
    split = not p.whole and p.batch == 1
    sizes = p.m, p.n, p.k, p.itemsize
    parts, sides = gpu_tiles.parts_of_product(*sizes, left=left, transposed=right, cut=True) if split else (1, {})
    if parts > 1:
        return dict(parts=parts, **sides)
    if p.m > 64:  # the block level has its own warps and stages
        return tiles
    few = gpu_tiles.few_rows(**tiles, itemsize=p.itemsize)
    return tiles | USUAL | gpu_tiles.product_options(tiles["bm"], tiles["bn"], p.itemsize) | few.options | few.tiles


def in_tiles(p: Product) -> bool:
    """Whether `ours` is a product in the tiles of a form, and not in tiles of any columns."""
    return all(c.implementation != "tiles of any columns" for c in ops.choices(p.ours, *p.types()))


def forms(p: Product) -> list[Form]:
    """The forms that are tried besides ours: all of the tuner's space, and sums in parts. Products of few rows
    have a larger space: for them all tiles are tried with the usual warps and stages, and the choice's tile with all of
    these."""
    a, b = p.types()
    left, right = (letter == "T" for letter in p.order)
    chosen = choice(p)
    tiles = {name: x for name, x in chosen.items() if name in ("bm", "bn", "bk")}
    points = spaces.products(a, b, ta=left, tb=right, bk=tiles["bk"])
    tried = [{**tiles, **q} for q in points]
    if "num_warps" in points[0]:
        like = lambda q, names: all(q[name] == {**USUAL, **tiles}[name] for name in names)
        tried = [q for q in tried if like(q, USUAL) or like(q, tiles)]
    elif "warps" in jt.target().features:
        product = hopper_tiles.Product(
            p.m, p.n, p.k, p.itemsize, batch=p.batch, fast=p.whole, left=left, transposed=right, cut=True
        )
        near = hopper_tiles.near(product, whole=False)
        tried += [dict(**f._asdict(), bk=LINE // p.itemsize) for f in near if f.parts > 1]
    return [q for q in tried if q != chosen or not in_tiles(p)]


def calls_of(p: Product, options: Options) -> tuple[int, int]:
    """(how many sets of arguments, so many that no cache holds them together, and how many calls in a program)."""
    a, b = p.types()
    size = (a.size + b.size) * p.itemsize
    sets = max(1, min(SETS, -(-options.cold_bytes // size)))
    rate = 700e6 if p.itemsize == 2 else 1300e6  # operations in a microsecond of an H200
    us = max(2 * p.batch * p.m * p.n * p.k / rate, size / 4e6, 5.0)
    return sets, sets * -(-min(CALLS, max(1, round(PROGRAM_US / us))) // sets)


def _compiled(
    tried: Mapping[Product, Sequence[Form]], calls: Mapping[Product, tuple[int, int]]
) -> dict[Product, dict[str, Any]]:
    """The programs of each product by name, "ours" and the forms; where one failed, its error stands instead."""
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(_threads()) as pool:
        if "warps" in jt.target().features:
            _compile_kernels(tried, folder)
        build = lambda p, f: pool.submit(_compile, f, p, *calls[p], folder)
        jobs = {
            p: {"ours": build(p, p.ours), **{_name(f): build(p, p.formed(f)) for f in many}}
            for p, many in tried.items()
        }
        return {p: {name: job.exception() or job.result() for name, job in of.items()} for p, of in jobs.items()}


def _compile_kernels(tried: Mapping[Product, Sequence[Form]], folder: str) -> None:
    """Fill the cache of compiled kernels: in processes, since the compiler passes of all threads would share one
    interpreter."""
    here = jt.target().platform, jt.architecture(), folder
    jobs = [(p, form, *here) for p, many in tried.items() for form in (None, *many)]
    new = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(_threads(), new, _without_gpu) as pool:
        list(pool.map(_compile_kernel, jobs, chunksize=2))


def _without_gpu() -> None:
    jax.config.update("jax_platforms", "cpu")


def _compile_kernel(job: tuple[Product, Form | None, str, str, str]) -> None:
    p, form, platform, arch, folder = job
    with jt.config(arch=arch, cache_dir=folder), contextlib.suppress(Exception):  # the program raises the error again
        function = p.ours if form is None else p.formed(form)
        jax.jit(function).trace(*p.types()).lower(lowering_platforms=(platform,))


def _compile(function: Callable, p: Product, sets: int, calls: int, folder: str) -> Any:
    with jt.config(cache_dir=folder):  # the user's own tuning entries do not count
        return timing.repeated(function, calls).lower([p.types()] * sets).compile()


def _threads() -> int:
    return max(1, min(COMPILERS, len(os.sched_getaffinity(0))))


def _name(form: Form) -> str:
    sides = f"{form['parts']} parts " if form.get("parts", 1) > 1 else ""
    sides += f"{form['bm']}x{form['bn']}"
    return sides + "".join(f" {k} {v}" for k, v in form.items() if k not in ("parts", "bm", "bn"))


def _searched(
    p: Product, programs: Mapping[str, Any], calls: tuple[int, int], machine: Machine, say: Callable[[str], None]
) -> Result:
    """All forms in turns, then those close to the best, and the choice, some more."""
    if isinstance(programs["ours"], Exception):
        raise programs["ours"]
    sets = [p.make(seed) for seed in range(calls[0])]
    samplers, expected = {}, None
    for name, program in programs.items():
        try:
            if isinstance(program, Exception):
                raise program
            runner = timing.JaxRunner(program, sets, calls[1])
        except Exception as error:
            say(f"    choices {p.config}: {name} is left out: {short(error)}")
            continue
        expected = runner.output if expected is None else expected
        error = relative_error(runner.output, expected)
        runner.output = None
        if error > 1e-2:
            say(f"    choices {p.config}: {name} is left out: relative error {error:.2g}")
            continue
        samplers[name] = _sampler(runner)
    samples = timing.alternate(samplers, repeats=ROUNDS, budget_s=60.0)
    times = timing.timings(samples)
    most = LEFT * min(t.median_us for t in times.values())
    left = {name: s for name, s in samplers.items() if name == "ours" or times[name].median_us <= most}
    last = timing.timings(
        {
            name: samples[name] + more
            for name, more in timing.alternate(left, repeats=LAST_ROUNDS, budget_s=60.0).items()
        }
    )
    best = min(last, key=lambda name: last[name].median_us)
    text = ", ".join(f"{name}: {t.median_us:.1f}" for name, t in sorted((times | last).items(), key=_by_time))
    say(
        f"choices {p.config} {p.dtype}: {last['ours'].median_us / last[best].median_us:.3f} of the best; "
        f"ours is {_name(choice(p))}; {text}"
    )
    both: dict[str, Timing] = {"ours": last["ours"], "tuned": last[best]}
    return result("choices", p.config, p.dtype, machine.device, both, timed=timing.way(calls[1]))


def _sampler(runner: timing.JaxRunner) -> Callable[[], float]:
    """A sampler of short samples, of which many are taken: the speed that a card's power allows changes within tenths
    of a second."""
    runner.run(1, 1)
    return lambda: runner.run(2, 2)


def _by_time(item: tuple[str, Timing]) -> float:
    return item[1].median_us
