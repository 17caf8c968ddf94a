"""The checks behind `jtile.testing.check_kernel`: every transform of a kernel against a `jnp` function."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jtile._config import config
from jtile._errors import KernelValueError
from jtile._parts import is_complex, is_key, words
from jtile.testing import TOLERANCES, devices
from jtile.testing.compare import (
    Measured,
    MismatchError,
    SkippedError,
    dot,
    error_of,
    skip,
    stack_rows,
    stacked,
    summed,
    turned,
    where_off,
    wide,
)
from jtile.testing.evaluate import evaluated
from jtile.testing.report import INTEGERS, TRANSFORMS, Check, Report

Skips = Mapping[str, str]
Job = tuple[str, str, Callable[[], "Measured"]]  # transform, subject, run

_DIFFERENTIABLE = ("float64", "float32", "bfloat16", "float16", "complex64")
_HALF = ("float16", "bfloat16")
_SLICES = 3  # slices in a batch


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments of `check_kernel`, where they are documented."""

    tolerance: float | Mapping[str, float] | None = None
    derivative_tolerance: float | Mapping[str, float] | None = None
    dtypes: Sequence[str] = ()
    constant: Skips = dataclasses.field(default_factory=dict)
    skip: Skips = dataclasses.field(default_factory=dict)
    only: Sequence[str] = ()
    order: int = 1
    step: float = 2.0**-5
    seed: int = 0

    def limit(self, dtype: Any, derivative: bool) -> float:
        given = self.derivative_tolerance if derivative else self.tolerance
        name = dtype.name
        if isinstance(given, int | float):
            return float(given)
        if given is not None and name in given:
            return given[name]
        return TOLERANCES.get(name, 0.0) * (4 if derivative else 1)


class Checker:
    """Runs the checks of one kernel.

    `leaves` are the arrays of the arguments and `names` what reports call them; `floats` are the places of those that
    are differentiated.
    """

    def __init__(self, kernel: Callable[..., Any], reference: Callable[..., Any], args: Sequence[Any], s: Settings):
        paths, self.tree = jax.tree_util.tree_flatten_with_path(tuple(args))
        self.leaves = [x if hasattr(x, "dtype") else jnp.asarray(x) for _, x in paths]
        self.names = _names(reference, [path for path, _ in paths])
        self.kernel, self.reference, self.s = self._flat(kernel), self._flat(reference), s
        self.run_kernel, self.expect = jax.jit(self.kernel), evaluated(self.reference)
        self.floats = [k for k, x in enumerate(self.leaves) if x.dtype.name in _DIFFERENTIABLE and not self._why(k)]
        self.rng = np.random.default_rng(s.seed)
        self.outs = jax.eval_shape(self.reference, *self.leaves)
        self.float_outs = [k for k, o in enumerate(self.outs) if o.dtype.name in _DIFFERENTIABLE]
        self.reverse = (
            bool(self.floats and self.float_outs) and "vjp" not in s.skip
        )  # whether the kernel has a gradient that can be checked

    def _flat(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn` from leaves to a tuple of leaves."""

        @functools.wraps(fn, assigned=(), updated=())
        def run(*leaves):
            return tuple(jax.tree.leaves(fn(*jax.tree.unflatten(self.tree, leaves))))

        return run

    def _why(self, k: int) -> str:
        """Why leaf k is not differentiated."""
        return next((why for name, why in self.s.constant.items() if _within(self.names[k], name)), "")

    # -- running -----------------------------------------------------------------------------------------------------
    def run(self, name: str) -> Report:
        jobs = list(self.jobs())
        unknown = set(self.s.only) - set(TRANSFORMS) | {n for n in self.s.skip if not any(_named(j, n) for j in jobs)}
        if unknown:
            known = ", ".join(dict.fromkeys(f"{t} {subject}".strip() for t, subject, _ in jobs))
            raise KernelValueError(f"check_kernel has no check {sorted(unknown)}; there are {known}")
        jobs = [j for j in jobs if not self.s.only or j[0] in self.s.only]
        return Report(name, tuple(self._check(j) for j in jobs))

    def _check(self, job: Job) -> Check:
        transform, subject, run = job
        why = next((w for n, w in self.s.skip.items() if _named(job, n)), None)
        if why is not None:
            return Check(transform, subject, "skipped", detail=why)
        try:
            found = run()
        except SkippedError as e:
            return Check(transform, subject, "skipped", detail=str(e))
        except MismatchError as e:
            return Check(transform, subject, "failed", e.error, e.limit, str(e))
        except Exception as e:  # whatever a kernel under test raises is a finding, and the other checks still run
            return Check(transform, subject, "failed", detail=f"{type(e).__name__}: {e}")
        return Check(transform, subject, "passed", found.error, found.limit, found.detail)

    def jobs(self) -> Iterator[Job]:
        yield "value", "", self.value
        yield "jit", "", self.jitted
        yield "interpreter", "", self.interpreted
        yield "poison", "", self.poisoned
        yield from (("dtype", d, functools.partial(self.in_dtype, d)) for d in self.s.dtypes)
        yield from self._derivatives()
        args = dict.fromkeys(name.split(".")[0].split("[")[0] for name in self.names)
        for name in args:
            batched = [_within(n, name) for n in self.names]
            yield "vmap", name, functools.partial(self.mapped, batched, 0)
        yield "vmap", "all", functools.partial(self.mapped, [True] * len(self.leaves), 1)
        if self.floats and self.float_outs:
            yield "grad of vmap", "", self.grad_of_vmap
            yield "vmap of grad", "", self.vmap_of_grad
        if self.floats and self.float_outs and self.s.order >= 2:
            yield "second order", "", self.second_order
        yield from devices.jobs(self)

    def _derivatives(self) -> Iterator[Job]:
        if not self.float_outs:
            yield "vjp", "", functools.partial(skip, "the results are no floats")
            return
        if self.floats:
            yield "jvp", "", self.jvp
        for k, name in enumerate(self.names):
            if self._why(k):
                yield "vjp", name, functools.partial(skip, self._why(k))
            elif k in self.floats:
                yield "vjp", name, functools.partial(self.vjp, k)
        if any(_discrete(x) for x in self.leaves) and self.floats:
            yield "vjp", INTEGERS, self.integer_cotangents
        if self.floats:
            yield "numeric", "", self.numeric
            yield "checkpoint", "", self.checkpointed

    # -- values ------------------------------------------------------------------------------------------------------
    @functools.cached_property
    def expected(self) -> Any:
        return self.expect(*self.leaves)

    def value(self) -> Measured:
        return self.compare(self.kernel(*self.leaves), self.expected)

    def jitted(self) -> Measured:
        return self.compare(self.run_kernel(*self.leaves), self.expected)

    def interpreted(self) -> Measured:
        with config(interpret=True):
            return self.compare(jax.jit(self.kernel)(*self.leaves), self.expected)

    def poisoned(self) -> Measured:
        with config(poison=True):
            return self.compare(jax.jit(self.kernel)(*self.leaves), self.expected)

    def in_dtype(self, dtype: str) -> Measured:
        with jax.enable_x64(dtype == "float64" or jax.config.jax_enable_x64):
            cast = [
                x.astype(dtype) if jnp.issubdtype(x.dtype, np.floating) else x for x in map(jnp.asarray, self.leaves)
            ]
            return self.compare(jax.jit(self.kernel)(*cast), self.expect(*cast))

    # -- derivatives -------------------------------------------------------------------------------------------------
    def of_floats(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn(leaves, *floats)`: the float results as a function of the differentiated leaves."""

        def run(leaves, *floats):
            full = list(leaves)
            for k, x in zip(self.floats, floats, strict=True):
                full[k] = x
            outs = fn(*full)
            return tuple(outs[k] for k in self.float_outs)

        return run

    def direction(self, x: Any) -> jax.Array:
        draw = lambda: self.rng.uniform(-1, 1, x.shape).astype(np.float32)
        return jnp.asarray(draw().astype(x.dtype) if not is_complex(x.dtype) else lax.complex(draw(), draw()))

    @functools.cached_property
    def tangents(self) -> list[jax.Array]:
        return [self.direction(self.leaves[k]) for k in self.floats]

    @functools.cached_property
    def cotangents(self) -> tuple[jax.Array, ...]:
        return tuple(self.direction(self.outs[k]) for k in self.float_outs)

    def pull(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`(leaves, cotangents) -> cotangents of the differentiated leaves`."""

        def run(leaves, cotangents):
            floats = [leaves[k] for k in self.floats]
            return jax.vjp(functools.partial(self.of_floats(fn), leaves), *floats)[1](tuple(cotangents))

        return run

    def push(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        def run(leaves, tangents):
            floats = [leaves[k] for k in self.floats]
            return jax.jvp(functools.partial(self.of_floats(fn), leaves), floats, list(tangents))[1]

        return run

    @functools.cached_property
    def expect_pull(self) -> Callable[..., Any]:
        return evaluated(self.pull(self.reference))

    @functools.cached_property
    def rows(self) -> devices.Rows:
        return devices.rows(self)

    @functools.cached_property
    def pulled(self) -> tuple[Any, Any]:
        return tuple(f(self.leaves, self.cotangents) for f in (jax.jit(self.pull(self.kernel)), self.expect_pull))

    def jvp(self) -> Measured:
        got, want = (evaluated(self.push(f))(self.leaves, self.tangents) for f in (self.kernel, self.reference))
        return self.compare(got, want, derivative=True)

    def vjp(self, k: int) -> Measured:
        got, want = (cotangents[self.floats.index(k)] for cotangents in self.pulled)
        return self.compare((got,), (want,), derivative=True)

    def integer_cotangents(self) -> Measured:
        """Integers, bools and random keys take part in `jax.vjp` and have cotangents of dtype float0."""
        places = [k for k, x in enumerate(self.leaves) if k in self.floats or _discrete(x)]

        @jax.jit
        def of(*xs):
            full = list(self.leaves)
            for k, x in zip(places, xs, strict=True):
                full[k] = x
            outs = self.kernel(*full)
            return tuple(outs[k] for k in self.float_outs)

        cotangents = jax.vjp(of, *[self.leaves[k] for k in places])[1](self.cotangents)
        for k, ct in zip(places, cotangents, strict=True):
            wanted = self.leaves[k].dtype if k in self.floats else jax.dtypes.float0
            if ct.dtype != wanted or ct.shape != self.leaves[k].shape:
                raise MismatchError(
                    f"the cotangent of {self.names[k]} is {ct.dtype}{list(ct.shape)}, expected {wanted}"
                )
        return self.compare(tuple(c for k, c in zip(places, cotangents) if k in self.floats), self.pulled[1], True)

    def numeric(self) -> Measured:
        """The derivative along one direction, by central differences of fourth order in float32 at least.

        f'(0) = (8 (f(h) - f(-h)) - (f(2h) - f(-2h))) / 12h + O(h^4): Fornberg, Math. Comp. 51 (1988), table 1.
        """
        leaves = [_in_float32(jnp.asarray(x)) for x in self.leaves]
        cotangents = [_in_float32(c) for c in self.cotangents]
        run, pulled = evaluated(self.kernel), self.pulled[0]
        if any(x.dtype.name in _HALF for x in (*self.leaves, *self.outs)):
            pulled = jax.jit(self.pull(lambda *xs: tuple(map(_in_float32, self.kernel(*xs)))))(leaves, cotangents)
        h = self.s.step

        def along(t: float) -> float:
            full = list(leaves)
            for k, d in zip(self.floats, self.tangents, strict=True):
                full[k] = np.asarray(leaves[k]) + np.asarray(_in_float32(d)) * np.asarray(t, leaves[k].dtype)
            outs = run(*full)
            return sum(dot(outs[k], c) for k, c in zip(self.float_outs, cotangents, strict=True))

        found = (8 * (along(h) - along(-h)) - (along(2 * h) - along(-2 * h))) / (12 * h)
        claimed = sum(dot(g, t) for g, t in zip(pulled, self.tangents, strict=True))
        size = sum(float(np.sum(np.abs(wide(g) * wide(t)) ** 2)) for g, t in zip(pulled, self.tangents)) ** 0.5
        error, limit = abs(found - claimed) / max(size, abs(found), 1e-30), 1e-3
        if not error <= limit:
            raise MismatchError(f"differences with step {h:g} give {found:.6g}, the vjp {claimed:.6g}", error, limit)
        return Measured(error, limit, f"step {h:g}")

    def checkpointed(self) -> Measured:
        got = evaluated(self.pull(jax.checkpoint(self.kernel)))(self.leaves, self.cotangents)
        return self.compare(got, self.pulled[1], derivative=True)

    def second_order(self) -> Measured:
        """The derivative of the cotangents along a direction: forward over reverse."""

        def of(fn):
            def run(leaves, tangents):
                pull = lambda *floats: self.pull(fn)(self._with(leaves, floats), self.cotangents)
                return jax.jvp(pull, [leaves[k] for k in self.floats], list(tangents))[1]

            return evaluated(run)(self.leaves, self.tangents)

        return self.compare(of(self.kernel), of(self.reference), derivative=True, factor=4)

    def _with(self, leaves: Sequence[Any], floats: Sequence[Any]) -> list[Any]:
        full = list(leaves)
        for k, x in zip(self.floats, floats, strict=True):
            full[k] = x
        return full

    # -- batches -----------------------------------------------------------------------------------------------------
    def slices(self, batched: Sequence[bool]) -> list[list[Any]]:
        """Arguments of each slice of a batch: every batched leaf with its own elements in another order, so that what
        is legal (an index, a positive scale) stays so."""
        turn = lambda x, k: turned(x, k * max(1, x.size // _SLICES))
        rows = range(_SLICES)
        return [[turn(jnp.asarray(x), k) if b else x for x, b in zip(self.leaves, batched, strict=True)] for k in rows]

    @functools.cached_property
    def everything(self) -> list[list[Any]]:
        return self.slices([True] * len(self.leaves))

    def mapped(self, batched: Sequence[bool], axis: int) -> Measured:
        """Compare vmap with one call of the reference for each slice."""
        slices = self.slices(batched)
        axes = [min(axis, np.ndim(x)) if b else None for x, b in zip(self.leaves, batched, strict=True)]
        batch = [
            x if a is None else stacked([s[k] for s in slices], a) for k, (x, a) in enumerate(zip(self.leaves, axes))
        ]
        got = evaluated(jax.vmap(self.kernel, axes, out_axes=-1))(*batch)
        return self.compare(got, stack_rows([self.expect(*s) for s in slices], -1))

    def grad_of_vmap(self) -> Measured:
        """The cotangent of an unbatched argument is the sum over the batch, so the first float stays unbatched where
        there are others."""
        shared = self.floats[0] if len(self.leaves) > 1 else -1
        batched = [k != shared for k in range(len(self.leaves))]
        slices = self.slices(batched)
        axes = [0 if b else None for b in batched]
        batch = [stacked([s[k] for s in slices]) if b else x for k, (x, b) in enumerate(zip(self.leaves, batched))]
        times = lambda c, k: np.asarray(c) * np.asarray(1 + k, c.dtype)
        cotangents = [stacked([times(c, k) for k in range(_SLICES)]) for c in self.cotangents]
        got = evaluated(self.pull(jax.vmap(self.kernel, axes)))(batch, cotangents)
        each = [self.expect_pull(s, [c[k] for c in cotangents]) for k, s in enumerate(slices)]
        want = list(stack_rows(each, 0))
        if shared >= 0:
            want[0] = summed(want[0])
        return self.compare(got, tuple(want), derivative=True)

    def vmap_of_grad(self) -> Measured:
        leaves = [stacked([s[k] for s in self.everything]) for k in range(len(self.leaves))]
        got = evaluated(jax.vmap(self.pull(self.kernel), (0, None)))(leaves, list(self.cotangents))
        return self.compare(got, stack_rows([self.expect_pull(s, self.cotangents) for s in self.everything], 0), True)

    # -- comparing ---------------------------------------------------------------------------------------------------
    def compare(self, got: Any, want: Any, derivative: bool = False, factor: float = 1) -> Measured:
        """The leaf that comes closest to its limit, or beyond; MismatchError for another shape or dtype."""
        if len(got) != len(want):
            raise MismatchError(f"{len(got)} results, the reference gives {len(want)}")
        worst = Measured(0.0, factor * max([self.s.limit(w.dtype, derivative) for w in want], default=0.0))
        for k, (a, b) in enumerate(zip(got, want, strict=True)):
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                raise MismatchError(
                    f"result {k} is {a.dtype.name}{list(a.shape)}, the reference gives {b.dtype.name}{list(b.shape)}"
                )
            limit = factor * self.s.limit(b.dtype, derivative)
            a, b = words(a), words(b)
            error = error_of(a, b)
            if not error <= limit:
                which = f"result {k}: " if len(want) > 1 else ""
                raise MismatchError(f"{which}relative error {error:.2e} > {limit:.0e}{where_off(a, b)}", error, limit)
            if error * worst.limit >= worst.error * limit:
                worst = Measured(error, limit)
        return worst


def _names(reference: Callable[..., Any], paths: Sequence[Any]) -> list[str]:
    """What reports call the leaves: the reference's parameter, and the path inside of a pytree."""
    try:
        parameters = list(inspect.signature(reference).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    name = lambda i: names[i] if i < len(names) else f"arg{i}"
    return [name(path[0].idx) + jax.tree_util.keystr(path[1:]) for path in paths]


def _within(name: str, argument: str) -> bool:
    """Whether a leaf's name is the argument's, or one inside of it."""
    return name == argument or name.startswith((f"{argument}.", f"{argument}["))


def _named(job: Job, name: str) -> bool:
    return name in (job[0], f"{job[0]} {job[1]}".strip())


def _discrete(x: Any) -> bool:
    return is_key(x.dtype) or x.dtype.kind in "iub"


def _in_float32(x: Any) -> Any:
    return x.astype(jnp.float32) if x.dtype.name in _HALF else x
