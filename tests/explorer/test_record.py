"""The record of a kernel: plain data that says what the page shows."""

from __future__ import annotations

import dataclasses
import json
import types
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtile as jt
from jtile import errors
from jtile.explorer import record as schema
from jtile.explorer.passes import difference
from jtile.explorer.places import Places, run_lengths
from jtile.ir import Loc
from jtile.passes import TILE
from jtile.transforms import reverse


@jt.kernel(
    out_type=lambda a, b, **_: jt.like(a, shape=(a.shape[0], b.shape[1])),
    grid=lambda a, b, *, m, **_: jt.cdiv(a.shape[0], m),
)
def product(a, b, o, *, m=4):
    i = jt.program_id(0)
    acc = jt.zeros((m, b.shape[1]), jnp.float32)
    for k in jt.range(a.shape[1]):
        acc = acc + a.tiles(m, 1)[i, k] * b.tiles(1, b.shape[1])[k, 0]
    o.tiles(m, b.shape[1])[i, 0] = acc


A, B = jax.ShapeDtypeStruct((10, 3), jnp.float32), jax.ShapeDtypeStruct((3, 8), jnp.float32)


@pytest.fixture(scope="module")
def view():
    return jt.view(product, A, B, target="cpu", run=False)


def check(value, annotation, where="record"):
    """A value is what the annotation of its field says; nothing but dataclasses, lists, dicts, texts and numbers."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is typing.Any:
        json.dumps(value)
    elif origin is types.UnionType:
        assert value is None or check(value, next(a for a in args if a is not types.NoneType), where) is None
    elif dataclasses.is_dataclass(annotation):
        assert isinstance(value, annotation), where
        for name, of in typing.get_type_hints(annotation).items():
            check(getattr(value, name), of, f"{where}.{name}")
    elif origin in (list, dict):
        assert isinstance(value, origin), where
        for x in value.values() if origin is dict else value:
            check(x, args[-1], f"{where}[]")
    else:
        assert type(value) is annotation, (where, type(value), annotation)


def test_the_record_is_of_its_schema(view):
    check(view.record, schema.Record)
    assert json.loads(json.dumps(view.record.json())) == view.record.json()
    assert (view.record.target, view.record.title, view.record.schema) == ("cpu", "product", schema.SCHEMA)
    assert [p.group for p in view.record.pieces] == ["kernel", "gradient", "gradient"]
    assert view.record.notes == []
    speed = view.record.pieces[0].speed
    assert (speed.read, speed.written, speed.traffic) == (4 * (30 + 24), 320, 4 * (30 + 3 * 24 + 80))
    assert speed.time_us is None and speed.elements == 12 * 8 * 3 * 2 and speed.exact


def test_places_are_lines_of_sources(view):
    for piece in view.record.pieces:
        for text in [level.body for level in piece.levels] + [s.body for s in piece.steps if s.body]:
            assert sum(text.places[1::2]) == len(text.text.split("\n"))
            assert max(text.places[::2]) < len(view.record.places)
    (source,) = view.record.sources
    assert source.name == "test_record.py" and source.lines[0].startswith("@jt.kernel")
    texts = {source.lines[line - source.first].strip() for k, line in view.record.places[1:] if k == 0}
    assert "acc = acc + a.tiles(m, 1)[i, k] * b.tiles(1, b.shape[1])[k, 0]" in texts


def test_steps_lead_from_one_kernel_to_the_next(view):
    """The lines of a step follow from those of the step before it by its difference."""
    for piece in view.record.pieces:
        first, *steps = piece.steps
        assert first.name == "traced" and [s.name for s in steps] == [p.name for p in TILE]
        before = first.body.text.split("\n")
        for step in steps:
            if step.body is None:
                assert step.diff == []
                continue
            after = step.body.text.split("\n")
            rebuilt = []
            for kind, a, b, c, d in step.diff:
                rebuilt += after[c:d]
                if kind == "equal":
                    assert difference(before[a:b], after[c:d]) == [["equal", 0, b - a, 0, d - c]]
            assert rebuilt == after
            before = after
        assert before == next(x for x in piece.levels if x.name == "tile_ir_opt").body.text.split("\n")


def test_numbers_of_values_are_no_difference():
    assert difference(["%1 = add %0, %c1_1", "x"], ["%2 = add %1, %c1", "y"]) == [
        ["equal", 0, 1, 0, 1],
        ["replace", 1, 2, 1, 2],
    ]
    assert run_lengths([3, 3, 0, 3]) == [3, 2, 0, 1, 3, 1]
    assert run_lengths([]) == []


def test_sources_in_parts(tmp_path):
    """Functions far apart in a file are two sources; lines that are not there have none; jtile's own are no places."""
    path = tmp_path / "far.py"
    path.write_text("a = 1\nb = 2\n" + "\n" * 100 + "c = 3\n")
    places = Places()
    numbers = [places.number(Loc(str(path), n)) for n in (2, 103, 999)]
    sources, table = places.sources()
    assert [(s.first, s.lines) for s in sources] == [(1, ["a = 1", "b = 2"]), (103, ["c = 3"])]
    assert [table[n] for n in numbers] == [[0, 2], [1, 103], [-1, 999]]
    assert places.number(Loc(reverse.__file__, 3)) == places.number(Loc("", 3)) == 0


def test_functions_and_their_kernels():
    """A function's kernels with how often each is called; meta-parameters and keywords go through."""
    twice = lambda a, b, n: product(product(a, b, m=n)[:, :3], b, m=n)
    found = jt.view(twice, A, B, target="cpu", run=False, gradient=False, n=5).record
    assert [(p.name, p.calls, p.grid) for p in found.pieces] == [("product", 2, [2])]


def test_kernels_without_a_gradient_say_so():
    @jt.kernel(out_type=lambda x: jt.like(x))
    def flags(x, o):
        o[...] = x[...] + 1

    found = jt.view(flags, np.zeros(4, np.int32), target="cpu", run=False).record
    assert len(found.pieces) == 1
    assert found.notes[0].startswith("The gradient of flags is not shown: ") and "int32" in found.notes[0]


def test_errors(view, tmp_path):
    with pytest.raises(errors.KernelTypeError, match=r"jt\.view takes a kernel or a function"):
        jt.view(3)
    with pytest.raises(errors.KernelValueError, match="calls no kernel"):
        jt.view(lambda a, b: a @ b, A, B, target="cpu", run=False)
    with pytest.raises(errors.UnsupportedError, match="no target"):
        jt.view(product, A, B, target="abacus")
    (tmp_path / "file").touch()
    with pytest.raises(errors.KernelValueError, match="cannot be written"):
        view.save(tmp_path / "file" / "page.html")


@pytest.mark.usefixtures("on_the_cpu")
def test_speed_on_this_machine(monkeypatch):
    """What `jt.explain` measures is shown where the target is the device at hand, and only there."""
    from jtile.explorer import speed

    calls = []

    class Cost:
        name, time_us, limit = "product", 12.5, "launch"

    class Found:
        kernels = (Cost,)

    monkeypatch.setattr(speed, "explain", lambda f, *args: calls.append(args) or Found)
    monkeypatch.setattr(speed, "machine_rates", lambda *args: {"memory": 1e9, "float32": 1e9})
    found = jt.view(product, A, B, target="cpu", gradient=False).record.pieces[0].speed
    assert (found.time_us, found.limit, found.memory, found.measured) == (12.5, "launch", 1e9, True)
    assert found.limits["memory"] == pytest.approx(536e-9 * 1e6)
    far = jt.view(product, A, B, target="cpu:avx2", gradient=False).record.pieces[0].speed
    assert far.time_us is None and not far.measured and len(calls) == 1
