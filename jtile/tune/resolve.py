"""From a call with `jt.auto` to its program: chosen for the target at hand, anew for other targets and under vmaps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.tree_util import tree_flatten, tree_unflatten

from jtile._compat import is_symbolic
from jtile._memo import Recent
from jtile.calls.boundary import runner
from jtile.calls.marks import declared, strip
from jtile.calls.signature import autos
from jtile.primitive.program import Choice, under, with_choice
from jtile.tune import device, warpgroups
from jtile.tune.auto import Asked, all_guesses, choose, probe
from jtile.tune.space import source_hash

LARGE = 8192  # what a size that is known only when the kernel runs counts as


class _Anew:
    """A call whose meta-parameters are chosen for one target after another, and for vmaps around it."""

    def __init__(self, kernel: Any, tree: Any, leaves: Sequence[Any], meta: Mapping[str, Any]):
        self.kernel, self.tree = kernel, tree
        self.types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
        self.names = autos(meta)
        self.meta = {k: v for k, v in meta.items() if k not in self.names}
        self._made: Recent[Any, Any] = Recent(16)
        self.key = f"auto {' '.join(self.names)} {source_hash(kernel)}"

    def asked(self, levels: Sequence[Any] = ()) -> Asked:
        """The call as it is traced to choose: sizes that are known only when it runs are `LARGE`."""
        args, marks = strip(tree_unflatten(self.tree, self.types))
        leaves, tree = tree_flatten(args)
        marks = [a + b for a, b in zip(marks, declared(self.kernel._signature, self.kernel._spec.dynamic, args))]
        large = [
            jax.ShapeDtypeStruct([LARGE if is_symbolic(n) or k in at else n for k, n in enumerate(x.shape)], x.dtype)
            for x, at in zip(leaves, ({axis % max(x.ndim, 1) for axis, *_ in m} for x, m in zip(leaves, marks)))
        ]
        plain = self.kernel.with_options(dynamic=None)
        plain._vjp = plain._tuning = None
        known = [level for level in levels if not is_symbolic(level.size)]
        return Asked(plain, tree_unflatten(tree, large), self.names, self.meta, known)

    def bound(self, target: Any, levels: tuple[Any, ...] = ()) -> tuple[Any, Choice]:
        """The kernel with what is chosen for a target under these vmaps, without them; and the choice."""
        key = target, levels
        found = self._made.get(key)
        if found is None:
            chosen = choose(self.asked(levels), target)
            given = self.kernel._options
            options = {k: v for k, v in chosen.options.items() if getattr(given, k) is None}
            bound = self.kernel._variant(options)._resolve(self.tree, self.types, {**self.meta, **chosen.config})
            found = self._made.put(key, (bound, Choice(target, chosen.why, self.key, self.again, self.derived)))
        return found

    def again(self, target: Any, levels: tuple[Any, ...]) -> Any:
        """The program that is chosen for another target or under other vmaps; see `Choice.again`."""
        bound, choice = self.bound(target, levels)
        return _under(with_choice(bound.program, choice), levels)

    def derived(self, target: Any, levels: tuple[Any, ...], make: Any) -> Any:
        """The program whose derivative is best, where the model of time knows its products; see `Choice.derived`."""
        from jtile.tune import derived

        found = derived.choose(self.asked(levels), target, make) if warpgroups.multiplies(target) else None
        if found is None:
            return None
        config, us = found
        bound = self.kernel._resolve(self.tree, self.types, {**self.meta, **config})
        values = ", ".join(f"{k}={v}" for k, v in config.items())
        why = f"{values} for {target.name}: the model of time expects {us:.3g} us for all products of the derivative"
        choice = Choice(target, why, self.key, self.again, self.derived)
        return _under(with_choice(bound.program, choice), levels)


def _under(program: Any, levels: Sequence[Any]) -> Any:
    for level in levels:
        program = under(program, level, None)
    return program


def resolve(kernel: Any, tree: Any, leaves: Sequence[Any], meta: Mapping[str, Any]) -> Any:
    """A call with what is `jt.auto` chosen, for the target at hand first; like `Kernel._bind`.

    Raises:
      AutoError: nothing can be chosen for a `jt.auto`. What the kernel raises, where it takes no value at all.
    """
    bound, choice = _Anew(kernel, tree, leaves, meta).bound(device.target())
    return _with_choice(bound, choice)


def _with_choice(bound: Any, choice: Choice) -> Any:
    program = with_choice(bound.program, choice)
    return dataclasses.replace(bound, program=program, run=runner(program, bound.layout))


def tuned(call: Any, bound: Any, entry: Any) -> Any:
    """What a call with `jt.auto` got from the tuner's entry, with that as its reason; other calls as they are.

    The entry is for the device at hand, under vmaps too; another target gets the model's choice.
    """
    meta = {**call.kernel._signature.meta, **call.config({}), **call.given}
    if not autos(meta):
        return bound
    here, anew = device.target(), _Anew(call.kernel._variant({}), call.tree, call.types, meta)
    values = ", ".join(f"{k}={v}" for k, v in entry.config.items())
    times = f"{entry.time_us:.3g} us, and {entry.default_us:.3g} with the model's choice"
    why = f"{values} for {device.kind()}: the tuner measured {times}"

    def again(target: Any, levels: tuple[Any, ...]) -> Any:
        return _under(with_choice(bound.program, choice), levels) if target == here else anew.again(target, levels)

    choice = Choice(here, why, anew.key, again)
    return _with_choice(bound, choice)


def around(kernel: Any, tree: Any, leaves: Sequence[Any], meta: Mapping[str, Any]) -> list[dict[str, int]]:
    """What a search tries for a call with `jt.auto`: what the model of time expects to be near the best; where it says
    nothing, the choice, and twice and half of each of its values."""
    asked = _Anew(kernel, tree, leaves, meta).asked()
    target = device.target()
    base, start, places = probe(asked)
    found = [g for g in all_guesses(asked, base, start, places, target) if asked.kept(g.config) is not None]
    best = min((g.us for g in found if g.us), default=0.0)
    near = [g.config for k, g in enumerate(found) if g.us and (k < warpgroups.ALWAYS or g.us <= warpgroups.NEAR * best)]
    points = [dict(g) for g in near] or _beside(dict(choose(asked, target).config))
    return [dict(p) for p in dict.fromkeys(tuple(sorted(p.items())) for p in points)]


def _beside(config: dict[str, int]) -> list[dict[str, int]]:
    """A point, and those that differ from it by a factor of two in one value."""
    steps = [{**config, name: n} for name, value in config.items() for n in (value // 2, 2 * value) if n >= 1]
    return [config, *steps]
