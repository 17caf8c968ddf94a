"""What `jt.tune` may choose for the kernels of `jt.fuse`: tiles, the order of programs, warps."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

import jtile as jt
from jtile._config import current
from jtile._errors import KernelValueError
from jtile.ops._shapes import fit, machine
from jtile.tune import device
from jtile.tune.choose import lookup
from jtile.tune.space import Call, recorder
from jtile.tune.store import store

from .steps import Constant, Operand, Step
from .tilings import Tiling

FACTORS = (1, 0.25, 4, 0.5, 2, 16)  # of the side that the model chooses
POINTS = 48  # that a search tries, at most
WARPS = (None, 2, 8)  # of a program on a GPU; None: as many as the compiler takes
LARGEST = 1 << 15  # elements of a tile


def digest_of(steps: Iterable[Step], outputs: Sequence[Operand], more: object = "") -> str:
    """Twelve digits that are the same for equal steps on arrays of the same types, in every process."""
    numbers: dict[Operand, int] = {}

    def name(x: Operand) -> str:
        if isinstance(x, Constant):
            return f"{x.value}:{x.dtype}"
        return f"{numbers.setdefault(x, len(numbers))}:{x.dtype}{list(x.shape)}"

    lines = [f"{[*map(name, s.outs)]} = {s.name} {[*map(name, s.ins)]} {dict(s.params)}" for s in steps]
    return digest("\n".join([*lines, str([*map(name, outputs)]), str(more)]))


def digest(text: str) -> str:
    """Twelve digits of a text, whatever addresses of objects are in it."""
    return hashlib.sha256(re.sub(r" at 0x[0-9a-f]+", "", text).encode()).hexdigest()[:12]


class Tunable:
    """A kernel whose tile `jt.tune` may choose.

    Attributes:
      kernel: the kernel. Its meta-parameters are `tile`, the sides, and `order`, that of the grid's axes.
      model: the tiling that is taken where the tuner has none.
    """

    def __init__(
        self,
        body: Callable[..., None],
        types: Sequence[jax.ShapeDtypeStruct],
        tiling: Tiling,
        *,
        name: str,
        key: Callable[[], str],
        scratch: Sequence[jax.ShapeDtypeStruct] = (),
        points: Callable[[], Sequence[Mapping[str, Any]]] | None = None,
        defaults: Mapping[str, Any] | None = None,
        compared: Callable[[Sequence[Any]], Any] | None = None,
        written: Callable[[Tiling, Sequence[Any]], Any] | None = None,
    ):
        """body(tiling, refs); written(tiling, types of the refs): the jaxpr of that, None where it has to be traced;
        key: what the choice depends on; points: those of the search space; defaults: options for the compiler;
        compared: what does not depend on the tiling, of what the kernel writes."""
        self.model, self._defaults = tiling, dict(defaults or {})

        def run(*refs, tile=tiling.sides, order=tiling.order):
            body(tiling.of(tile, order), refs)

        def grid(*_, tile, order):
            return tiling.of(tile, order).grid or 1

        made = jt.call(run, out_type=list(types), grid=grid, name=name, scratch=[*scratch] or None)
        if written is not None:
            made._written = lambda refs, meta: written(tiling.of(meta["tile"], meta["order"]), refs)
        self.kernel, self._asks = made, _is_asked(name)
        if self._asks:
            space = points or (lambda: points_of(tiling))
            self.kernel = made.autotune(space=lambda *_, **__: [*space()], key=lambda *_, **__: key())
            self.kernel._tuning = dataclasses.replace(self.kernel._tuning, compared=compared)

    def __call__(self, *args: Any) -> Any:
        return jt.tuned(self.kernel, self._defaults, *args)

    def choice(self, types: Sequence[Any]) -> tuple[Tiling, str]:
        """(the tiling in force for arrays of these types, what to say of its origin)."""
        own = self.model
        if not self._asks:
            return own, ""
        entry = lookup(Call(self.kernel, jax.tree.structure((*types,)), types, {}, self._defaults))
        if entry is None:
            return own, ""
        try:
            own = own.of(entry.config.get("tile", own.sides), entry.config.get("order", own.order))
        except KernelValueError:  # of another version; the call warns of it, and takes the model's
            return own, ""
        if entry.time_us == entry.default_us:
            return own, "; jt.tune found nothing better"
        return own, f"; jt.tune chose this, {entry.speedup:.2f} times as fast as what the model chooses"


def _is_asked(name: str) -> bool:
    """Whether a choice may be made for a kernel: the tuner looks for kernels, or has entries for some of this name."""
    if recorder.get() is not None or current().autotune:
        return True
    return any(entry.startswith(f"{name}#") for entry in store.entries(device.kind()))


def points_of(tiling: Tiling) -> list[dict[str, Any]]:
    """The search space of a kernel: sides around those that the model chooses, along the axes that programs share, the
    grid in both orders, and on GPUs numbers of warps."""
    layout, warps = tiling.layout, (None,) if machine().whole else WARPS
    sides: list[Sequence[int]] = []
    for a, (n, side) in enumerate(zip(layout.sizes, tiling.sides, strict=True)):
        around = [fit(n, min(max(int(side * f), 1), n)) for f in FACTORS]
        sides.append([*dict.fromkeys(around)] if a not in layout.whole else [side])
    orders = [tiling.order, tiling.order[::-1]] if len(tiling.order) > 1 else [tiling.order]
    tiles = [t for t in itertools.product(*sides) if math.prod(t) <= max(LARGEST, math.prod(tiling.sides))]
    tiles.sort(key=lambda t: sum(abs(math.log2(x / y)) for x, y in zip(t, tiling.sides, strict=True)))
    options = [{} if w is None else {"num_warps": w} for w in warps]
    found = [{"tile": t, "order": o, **own} for t in tiles for own in options for o in orders]
    return found[:POINTS]
