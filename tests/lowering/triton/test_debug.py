"""Print and assert as TTIR: the log that a kernel leaves says what the interpreter prints."""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from typing import Any

import device
import numpy as np
import pytest
from machines import card
from native import unpacked
from ttir import launch_ttir, value_of

from jtile.interpret import interpret
from jtile.interpret.effects import _Shown
from jtile.ir import DTYPES, Kernel, parse_kernel, verify
from jtile.lowering.triton import emit_debug
from jtile.lowering.triton.compile import compile_kernel
from jtile.lowering.triton.emit_debug import FIRST, HEAD, HEADER

pytestmark = pytest.mark.usefixtures("garbage")


def program_ids(kernel: Kernel, grid: list[int], linear: int) -> str:
    """How a program is named: its own axes, three at least, and the lanes of vmaps."""
    ids = [*map(int, np.unravel_index(linear, grid))] if grid else []
    return kernel.program_text((*ids, *[0] * (3 + kernel.lanes - len(ids))))


def array_of(raw: bytes, arg: dict) -> np.ndarray:
    """One argument of a record: 4-bit numbers one a byte."""
    info, n = DTYPES[arg["dtype"]], math.prod(arg["shape"])
    like = np.zeros(arg["shape"], info.numpy)
    if info.bits == 4:
        nibbles = np.frombuffer(raw, np.uint8, n) & 15
        nibbles = np.append(nibbles, np.zeros(n % 2, np.uint8))
        return unpacked(nibbles[0::2] | (nibbles[1::2] << 4), like)
    return np.frombuffer(raw, info.numpy, n).reshape(arg["shape"])


def read(kernel: Kernel, sites: dict[str, Any], log: np.ndarray) -> tuple[list[str], str | None, int]:
    """What a log says: the printed lines by program, the failed assertion, and how many records were lost."""
    raw = log.tobytes()
    grid = [value_of(n) for n in sites["grid"]]
    used, failure, dropped, zero = struct.unpack_from("<4Q", raw)
    assert zero == 0
    lines, at = [], HEADER
    while at + HEAD <= min(HEADER + used, len(raw)):
        number, size, program = struct.unpack_from("<iiq", raw, at)
        if size == 0:
            break
        site, place, args = sites["list"][number], at + HEAD, []
        for a in site["args"]:
            args.append(array_of(raw[place : at + size], a))
            place += -(-args[-1].size * args[-1].itemsize // 8) * 8
        assert place == at + size
        text = site["format"].format(*map(_Shown, args))
        lines.append((program, f"[{kernel.name} {program_ids(kernel, grid, program)}] {text}"))
        at += size
    assert dropped or at == HEADER + used
    failed = None
    if failure:
        program, number = divmod(FIRST - failure, 1 << 16)
        failed = f"{sites['list'][number]['message']} {program_ids(kernel, grid, program)}"
    return [text for _, text in sorted(lines, key=lambda line: line[0])], failed, dropped


def on_evaluator(kernel: Kernel, inputs) -> tuple[dict[str, Any], list[np.ndarray]]:
    launch = launch_ttir(kernel, inputs)
    return json.loads(json.dumps(dataclasses.asdict(launch.record))), launch.extra


def on_device(kernel: Kernel, inputs) -> tuple[dict[str, Any], list[np.ndarray]]:
    artifact = compile_kernel(kernel, card(device.driver().arch))
    return json.loads(artifact.launch["record"]), device.run_artifact(artifact, kernel, inputs).extra


@pytest.fixture(params=[on_evaluator, pytest.param(on_device, marks=pytest.mark.gpu)])
def run(request):
    """`(text of a kernel, inputs) -> the kernel, the lines it prints, what failed, how many records were lost`."""

    def running(text: str, inputs=()) -> tuple[Kernel, list[str], str | None, int]:
        kernel = parse_kernel(text)
        verify(kernel)
        record, extra = request.param(kernel, list(inputs))
        assert record["zeroed"] == [record["sites"]["buffer"]]
        assert extra[-1].nbytes == record["sites"]["bytes"]
        return kernel, *read(kernel, record["sites"], extra[-1])

    return running


IDS = "%i = program_id 0 : i32\n"


@pytest.mark.parametrize(
    "grid", ["", "grid(2)", "grid(2, 1, 3)", "grid(2, 3) lanes(1)", "grid(2, 1, 1, 1, 3, 2) lanes(2)"]
)
def test_every_program_prints(run, grid, capfd):
    kernel, lines, failed, dropped = run(f'kernel @k() {grid} {{\nprint "here"\n}}')
    interpret(kernel, [])
    assert lines == sorted(capfd.readouterr().out.splitlines(), key=lambda line: lines.index(line))
    assert (failed, dropped) == (None, 0)


@pytest.mark.parametrize(
    "dtype", ["bool", "i4", "u4", "i8", "u16", "i32", "i64", "f16", "bf16", "f32", "f64", "f8e4m3fn", "f4e2m1fn"]
)
def test_arguments(run, dtype, capfd):
    """Tiles and scalars of every width, of sides that are no powers of two, two prints a program."""
    text = f"""kernel @k(%x: ref<6x5x{dtype}>) grid(2) {{
      {IDS}
      %zero = full 0 : i32
      %t = load %x[tile(%i, 3), tile(%zero, 5)] : tile<3x5x{dtype}>
      %s = load %x[%i, %zero] : {dtype}
      print "{{}} {{}} {{:d}}" %t, %s, %i
      print "{{{{}}}} {{}}" %s
    }}"""
    kernel = parse_kernel(text)
    info = DTYPES[kernel.inputs[0].dtype]
    x = np.random.default_rng(0).integers(0, 2 if info.kind == "b" else 7, (6, 5)).astype(np.float32).astype(info.numpy)
    kernel, lines, _, _ = run(text, [x])
    interpret(kernel, [x])
    assert "\n".join(lines) == capfd.readouterr().out.rstrip("\n")


def test_the_lowest_program_and_site_fail(run):
    text = f"""kernel @k(%x: ref<12xbool>, %o: ref<4xi32, out>) grid(4) {{
      {IDS}
      %t = load %x[tile(%i, 3)] : tile<3xbool>
      %one = full 1 : i32
      %late = lt %i, %one : bool
      assert %late message="late"
      assert %t message="tile"
      store %o[%i], %i
    }}"""
    good = np.ones(12, bool)
    assert run(text, [good])[2] == "late (1, 0, 0)"
    bad = good.copy()
    bad[2] = False
    assert run(text, [bad])[2] == "tile (0, 0, 0)"
    bad = good.copy()
    bad[5] = False
    assert run(text.replace("lt %i, %one", "le %i, %one"), [bad])[2] == "tile (1, 0, 0)"
    assert run(text.replace("lt %i, %one", "ge %i, %one"), [good])[1:] == ([], "late (0, 0, 0)", 0)


def test_true_assertions_say_nothing(run):
    text = f'kernel @k() grid(3) {{\n{IDS}%ok = eq %i, %i : bool\nassert %ok message="never"\n}}'
    assert run(text)[1:] == ([], None, 0)


def test_prints_in_branches_and_loops(run, capfd, monkeypatch):
    """What does not fit is counted; what was written before stays."""
    text = f"""kernel @k() grid(3) {{
      {IDS}
      %c0 = full 0 : i32
      %c1 = full 1 : i32
      %c9 = full 9 : i32
      %odd = eq %i, %c1 : bool
      for %k in %c0..%c9 step %c1 {{
        if %odd {{
          print "k {{}}" %k
        }}
      }}
    }}"""
    kernel, lines, _, dropped = run(text)
    interpret(kernel, [])
    assert lines == capfd.readouterr().out.splitlines()
    assert (len(lines), dropped) == (9, 0)
    monkeypatch.setattr(emit_debug, "LOG", 100)  # four records of 24 bytes
    kernel, few, _, dropped = run(text)
    assert (few, dropped) == (lines[:4], 5)


@pytest.mark.parametrize("arch", ["sm_80", "gfx942"])
def test_compiles(arch):
    text = f"""kernel @k(%x: ref<100xf32>, %b: ref<100xbool>) grid(4) {{
      {IDS}
      %t = load %x[tile(%i, 30)] : tile<30xf32>
      %c = load %b[tile(%i, 30)] : tile<30xbool>
      print "{{}}" %t
      assert %c message="all"
    }}"""
    assert compile_kernel(parse_kernel(text), card(arch)).image
