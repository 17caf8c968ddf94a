"""How programs compute convolutions by boxes of points, and gradients of their weights, on Hopper: a model of time."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import jtile as jt
from jtile.ops.convolution_points import Sides
from jtile.ops.hopper_convolution import ROOM, ROWS, Axis, Form, planes_of
from jtile.ops.hopper_convolution_sums import SumForm


@functools.lru_cache(maxsize=1024)
def box_of(sides: Sides, rows: int = ROWS) -> Sides:
    """The sides of a box of `rows` images and points, the first of which are images, by which the fewest cover arrays
    of these sides: powers of two. Of several, the one whose points are the most neighbours of a row."""
    powers = [1 << k for k in range(rows.bit_length())]
    boxes = [box for box in itertools.product(powers, repeat=len(sides)) if math.prod(box) == rows]
    return min(boxes, key=lambda box: (math.prod(map(jt.cdiv, sides, box)), box[0], tuple(-n for n in box[::-1])))


@functools.lru_cache(maxsize=1024)
def form_of(
    sides: Sides, outputs: int, terms: int, groups: int, axes: tuple[Axis, ...], processors: int
) -> tuple[Form, float]:
    """How programs compute a convolution with so many images and points, and outputs and terms of a group, and in how
    many thousand cycles about."""
    apart = groups > 1 or axes[-1].phases > 1  # what hangs over the outputs of a group is another's
    width = math.gcd(outputs, 64) if apart else 64
    deep, box = _terms(terms, groups > 1 or axes[-1].stride > 1), box_of(sides)
    found = []
    for columns in (n for n in reversed(_REGISTERS) if n < 2 * outputs and (n >= 64 or n >= outputs)):
        for consumers in _REGISTERS[columns]:
            form = Form(
                box, columns, deep, consumers, width=min(columns, width), registers=_REGISTERS[columns][consumers]
            )
            for one in (form, *_sliding(form, sides, terms, axes)):
                slots = _slots(one, axes, terms)
                if one.slide and slots < _FEWEST_PLANES:
                    continue
                one = dataclasses.replace(one, slots=slots)
                found.append(_shared_out(one, sides, outputs, terms, groups, axes, processors))
                if not one.kept:
                    found += _in_a_line(one, sides, outputs, terms, groups, axes, processors)
    return min(found, key=lambda of: of[1] * (_GAIN if of[0].slide else 1))


# Planes that consumers share: by how much they must be quicker, and how many rounds of them have to be on their way (of
# an H200: 3x3 of 64 channels takes 38 us with two slots of 64 terms, 29 with five of 32, and 36 without).
_GAIN, _FEWEST_PLANES = 1.15, 4


def _sliding(form: Form, sides: Sides, terms: int, axes: tuple[Axis, ...]) -> tuple[Form, ...]:
    """The forms whose consumers are neighbours along the first axis, where the points of the window along it are
    several planes for all remainders alike, and whose weight stays: where it comes with each round, nothing is won."""
    first, *others = axes
    alike = all(len({*a.counts}) == 1 for a in axes)
    if not others or first.stride > 1 or not alike or not 2 <= first.counts[0] <= 4:
        return ()
    form = dataclasses.replace(form, box=(1, 1, *box_of(sides[2:])), slide=True, kept=True)
    forms = (dataclasses.replace(form, terms=n) for n in {form.terms, max(form.terms // 2, min(form.terms, 32))})
    fits = lambda one: max(planes_of(axes, one)) <= 4 and _weight(one, axes) * _rounds(one, axes, terms) <= _KEPT
    return tuple(filter(fits, forms))


def _rounds(form: Form, axes: tuple[Axis, ...], terms: int) -> int:
    """Rounds of a tile, at most."""
    return math.prod((max(a.counts) for a in axes[form.slide :]), start=jt.cdiv(terms, form.terms))


def _weight(form: Form, axes: tuple[Axis, ...], itemsize: int = 2) -> int:
    """Bytes of the weight of a round."""
    return len(planes_of(axes, form)) * form.columns * form.terms * itemsize


_KEPT = 96 << 10  # bytes of a weight that stays, at most


# Registers of a consumer's thread, by the columns of a tile and how many consumers it has.
_FEW = {2: 240, 4: 104}
_REGISTERS = {16: _FEW, 32: _FEW, 64: _FEW, 128: {2: 240, 3: 152}, 256: {2: 240}}
# Cycles of a multiprocessor: operands come at so many bytes in each, products take 4096 terms in two, and a little more
# than that; besides, a tile takes this long, and one for so many of its numbers, and a launch. Fitted to convolutions
# of an H200.
_BYTES, _BUSY, _LEAVES, _LEAVING, _STARTS = 48, 1.13, 500, 16, 6000


def _shared_out(form: Form, sides, outputs: int, terms: int, groups: int, axes, processors: int) -> tuple[Form, float]:
    """A form with as many tiles of a program as keep all multiprocessors busy, and the thousands of cycles it takes."""
    parts = groups * jt.cdiv(outputs, form.columns) * math.prod(a.phases for a in axes)
    taps = [math.prod(k) for k in itertools.product(*(a.counts for a in axes))]
    tiles, rounds = jt.cdiv(math.prod(form.boxes(sides)), form.own), jt.cdiv(terms, form.terms)
    at_once = max(1, processors // parts)
    if len(set(taps)) > 1:  # remainders take unequal times: programs are more than run at once
        at_once = max(1, 3 * processors // (2 * parts))
    form = dataclasses.replace(form, tiles=jt.cdiv(tiles, at_once))
    of_program = form.tiles * (sum(taps) / len(taps) * rounds * _took(form, axes) + _left(form))
    return form, (_STARTS + jt.cdiv(parts * form.programs(sides), processors) * of_program) / 1e3


def _in_a_line(form: Form, sides, outputs: int, terms: int, groups: int, axes, processors: int):
    """The same as one line of tiles for all multiprocessors, where these are too many for one each."""
    parts, tiles = groups * jt.cdiv(outputs, form.columns), form.tiles_of(sides)
    taps = sorted((math.prod(k) for k in itertools.product(*(a.counts for a in axes))), reverse=True)
    if parts * len(taps) * tiles <= processors:
        return
    rounds = jt.cdiv(terms, form.terms) * _took(form, axes)
    longest = (taps[at // (parts * tiles)] for at in range(0, parts * len(taps) * tiles, processors))
    form = dataclasses.replace(form, lined=processors)
    yield form, (_STARTS + sum(n * rounds + _left(form) for n in longest)) / 1e3


def _took(form: Form, axes: tuple[Axis, ...]) -> float:
    """Cycles of the terms of a round at one point of the window."""
    planes = planes_of(axes, form)
    read = 2 * form.terms * (form.consumers + max(planes)) * ROWS + (0 if form.kept else _weight(form, axes))
    return max(_BUSY * form.terms * form.consumers * ROWS * form.columns / 2048, read / _BYTES / len(planes))


def _left(form: Form) -> float:
    """Cycles in which the results of a tile leave."""
    return _LEAVES + form.consumers * ROWS * form.columns / _LEAVING


def _terms(terms: int, whole: bool) -> int:
    """Terms of a round; `whole`: what hangs over is not zero."""
    sides = [n for n in (16, 32, 64) if not whole or terms % n == 0]
    return min(sides, key=lambda n: (jt.cdiv(terms, n) * n, -n))


def _slots(form: Form, axes: tuple[Axis, ...], terms: int, itemsize: int = 2) -> int:
    """Slots that rings have room for, beside what leaves, and a weight that stays."""
    buffers = min(form.buffers, form.columns // form.width)
    room = ROOM - form.consumers * buffers * ROWS * form.width * itemsize
    rows, weight = (form.consumers + max(planes_of(axes, form))) * ROWS * form.terms * itemsize, _weight(form, axes)
    return min(8, (room - weight * _rounds(form, axes, terms)) // rows if form.kept else room // (rows + weight))


# -- gradients of weights ----------------------------------------------------------------------------------------------

# Cycles that a program of sums takes besides its rounds, and bytes of sums in a cycle that are written and added up.
_AROUND, _SUMMED = 5000, 2600


@functools.lru_cache(maxsize=1024)
def sum_form_of(sides: Sides, outputs: int, channels: int, taps: int, groups: int, processors: int) -> SumForm:
    """How programs compute the gradient of a weight."""
    units, box = taps * jt.cdiv(channels, ROWS), box_of(sides)
    whole = [n for n in (256, 128, 64, 32, 16) if (outputs % n == 0 if groups > 1 else n < 2 * outputs or n == 16)]
    found = []
    for columns, consumers in ((n, m) for n in whole for m in ((2,) if n > 128 else (3, 2))):
        slots, registers = min(8, ROOM // ((consumers * ROWS + columns) * ROWS * 2)), 240 if consumers == 2 else 152
        form = SumForm(box, columns, consumers, slots=slots, registers=registers)
        boxes, programs = math.prod(form.boxes(sides)), groups * jt.cdiv(outputs, columns) * jt.cdiv(units, consumers)
        most = max(1, min(boxes // 8, 4 * processors // programs))
        every = 4 * taps * channels * outputs * groups
        for splits in range(1, most + 1):
            took = jt.cdiv(programs * splits, processors) * (jt.cdiv(boxes, splits) * _round(form) + _AROUND)
            found.append((took + (splits > 1) * splits * every / _SUMMED, dataclasses.replace(form, splits=splits)))
    return min(found, key=lambda of: of[0])[1]


def _round(form: SumForm) -> float:
    """Cycles of a round of sums."""
    products = form.consumers * ROWS * form.columns * ROWS / 2048
    return max(_BUSY * products, 2 * ROWS * (form.consumers * ROWS + form.columns) / _BYTES)
