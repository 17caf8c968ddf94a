"""Layouts of TTGIR as linear maps, which triton's own are the reference of; bank conflicts of accesses that people have
counted by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import forked
import pytest

from jtile.lowering.triton import attributes, banks, versions

pytest.importorskip("triton", reason="triton is not installed")

_MMA2 = "#ttg.nvidia_mma<{versionMajor = 2, versionMinor = 0, warpsPerCTA = [2, 2], instrShape = [16, 8]}>"
_MMA3 = "#ttg.nvidia_mma<{versionMajor = 3, versionMinor = 0, warpsPerCTA = [4, 1], instrShape = [16, 64, 16]}>"
_BLOCKED = "#ttg.blocked<{sizePerThread = [1, 8], threadsPerWarp = [4, 8], warpsPerCTA = [4, 1], order = [1, 0]}>"
_SMALL = "#ttg.blocked<{sizePerThread = [2, 4], threadsPerWarp = [2, 16], warpsPerCTA = [4, 1], order = [1, 0]}>"
_MFMA = "#ttg.amd_mfma<{version = 3, warpsPerCTA = [1, 2], instrShape = [32, 32, 8], isTransposed = true}>"
_MFMA16 = "#ttg.amd_mfma<{version = 3, warpsPerCTA = [2, 2], instrShape = [16, 16, 16], isTransposed = false}>"
_WMMA1 = "#ttg.amd_wmma<{version = 1, isTranspose = true, ctaLayout = {warp = [[0, 1], [1, 0]]}}>"
_WMMA2 = "#ttg.amd_wmma<{version = 2, isTranspose = true, ctaLayout = {warp = [[0, 1], [1, 0]]}}>"
_LINEAR = (
    "#ttg.linear<{register = [[0, 1], [0, 8], [0, 16], [0, 32], [32, 0]], lane = [[0, 2], [0, 4], [1, 0], [2, 0], "
    "[4, 0]], warp = [[8, 0], [16, 0]], block = []}>"
)


def _operand(side, parent, width):
    return f"#ttg.dot_op<{{opIdx = {side}, parent = {parent}{f', kWidth = {width}' if width else ''}}}>"


def _slice(dim, parent):
    return f"#ttg.slice<{{dim = {dim}, parent = {parent}}}>"


CUDA, CDNA = ("cuda", 90, 32), ("hip", "gfx942", 64)
RDNA3, RDNA4 = ("hip", "gfx1100", 32), ("hip", "gfx1201", 32)
TILES = [
    (CUDA, _BLOCKED, (64, 64)), (CUDA, _BLOCKED, (8, 16)), (CUDA, _slice(1, _BLOCKED), (64,)),
    (CUDA, _slice(0, _slice(1, "#ttg.blocked<{sizePerThread = [1, 1, 4], threadsPerWarp = [2, 2, 8], "
                               "warpsPerCTA = [1, 2, 2], order = [2, 1, 0]}>")), (64,)),
    (CUDA, _LINEAR, (64, 64)), (CUDA, _MMA2, (64, 64)), (CUDA, _MMA3, (128, 128)), (CUDA, _slice(1, _MMA3), (128,)),
    (CUDA, _operand(0, _MMA2, 2), (64, 32)), (CUDA, _operand(1, _MMA2, 2), (32, 64)),
    (CUDA, _operand(1, _MMA2, 4), (64, 32)), (CUDA, _operand(0, _MMA3, 2), (64, 64)),
    (CUDA, _operand(0, _SMALL, 0), (32, 16)), (CUDA, _operand(1, _SMALL, 0), (16, 64)),
    (CDNA, _MFMA, (64, 64)), (CDNA, _MFMA16, (64, 64)), (CDNA, _operand(0, _MFMA, 4), (64, 32)),
    (CDNA, _operand(1, _MFMA16, 4), (64, 64)),
    (RDNA3, _WMMA1, (64, 64)), (RDNA3, _operand(0, _WMMA1, 16), (32, 64)), (RDNA3, _operand(1, _WMMA1, 16), (64, 32)),
    (RDNA4, _WMMA2, (64, 64)), (RDNA4, _operand(1, _WMMA2, 8), (64, 32)),
]  # fmt: skip
OLD = versions.version() < (3, 7)
if OLD:  # it takes this text of WMMA's layouts for one of no axes, and ends the process
    TILES = [tile for tile in TILES if "amd_wmma" not in tile[1]]


def _swizzled(vec, per_phase, max_phase, order="[1, 0]"):
    return f"#ttg.swizzled_shared<{{vec = {vec}, perPhase = {per_phase}, maxPhase = {max_phase}, order = {order}}}>"


def _for_products(width, bits, turned="false"):
    return f"#ttg.nvmma_shared<{{swizzlingByteWidth = {width}, transposed = {turned}, elementBitWidth = {bits}}}>"


BUFFERS = [
    (_swizzled(8, 1, 8), (64, 64), "bf16"), (_swizzled(8, 4, 2), (16, 16), "bf16"), (_swizzled(1, 1, 1), (8, 8), "f32"),
    (_swizzled(4, 2, 4, "[0, 1]"), (32, 64), "f32"), (_swizzled(16, 1, 8), (64, 128), "i8"),
    (_for_products(128, 16), (64, 128), "bf16"), (_for_products(64, 16), (64, 32), "bf16"),
    (_for_products(32, 8), (64, 128), "i8"), (_for_products(128, 32), (32, 32), "f32"),
    (_for_products(128, 16, "true"), (64, 64), "bf16"), (_for_products(0, 16), (32, 16), "bf16"),
]  # fmt: skip


SCRIPT = Path(__file__).resolve().parent.parent.parent / "support" / "triton_layouts.py"


@pytest.fixture(scope="module")
def triton(tmp_path_factory):
    """What triton says of all these layouts, from a process of its own: it ends a process whose layouts it refuses."""
    asked = [[*target, _tensor(shape, text), shape] for target, text, shape in TILES]
    if not OLD:
        asked += [[*CUDA, _memdesc(shape, text, dtype), shape] for text, shape, dtype in BUFFERS]
    path = tmp_path_factory.mktemp("layouts") / "asked.json"
    path.write_text(json.dumps(asked))
    done = forked.run([sys.executable, SCRIPT, path])
    if done.returncode == 3:
        pytest.skip("this triton does not tell its linear layouts")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _tensor(shape, text):
    return f"tensor<{'x'.join(map(str, shape))}xf32, {text}>"


def _memdesc(shape, text, dtype):
    return f"!ttg.memdesc<{'x'.join(map(str, shape))}x{dtype}, {text}, #ttg.shared_memory>"


def test_registers_are_those_of_triton(triton):
    for (_, text, shape), wanted in zip(TILES, triton, strict=False):
        found = attributes.registers(attributes.fields(text), shape)
        lists = [[list(b) for b in bases] for bases in (found.register, found.lane, found.warp)]
        assert lists == wanted, text


@pytest.mark.skipif(OLD, reason="this triton tells the layouts of tiles only")
def test_memory_is_that_of_triton(triton):
    for (text, shape, _), wanted in zip(BUFFERS, triton[len(TILES) :], strict=True):
        memory = attributes.memory(attributes.fields(text), shape)
        assert [memory.moved(base) for base in wanted] == [1 << k for k in range(len(wanted))], text


def test_names_and_what_is_not_known():
    module = f"#blocked = {_BLOCKED}\n#mma = {_MMA2}\n#slice = #ttg.slice<{{dim = 0, parent = #mma}}>\n#smem = #ttg.x\n"
    names = attributes.resolved(module)
    assert names == {"#blocked": _BLOCKED, "#mma": _MMA2, "#slice": _slice(0, _MMA2)}
    assert attributes.spelled("#ttg.slice<{dim = 1, parent = #blocked}>", names) == _slice(1, _BLOCKED)
    assert attributes.fields("#ttg.strange") is None
    strange = attributes.fields("#ttg.strange<{a = [1, 2], b = false}>")
    assert strange == {"kind": "strange", "a": [1, 2], "b": False}
    assert attributes.registers(strange, (4, 4)) is attributes.memory(strange, (4, 4)) is None
    assert attributes.registers(attributes.fields(_BLOCKED), (48, 64)) is None  # no power of two


def test_padding():
    """After every 32 elements four are free; the map from places to coordinates is turned round."""
    text = "#ttg.padded_shared<[32:+4] {offset = [[0, 1], [0, 2], [0, 4], [0, 8], [4, 0], [1, 0], [2, 0]], block = []}>"
    memory = attributes.memory(attributes.fields(text), (8, 16))
    assert memory.pads == ((32, 4),) and memory.along == ((32, 64, 16), (1, 2, 4, 8))
    assert memory.padded(memory.moved((3, 1))) == 32 + 64 + 1 + 3 * 4


def _access(tile, buffer, shape, bits, matrices=False):
    held = attributes.registers(attributes.fields(tile), shape)
    memory = attributes.memory(attributes.fields(buffer), shape)
    found = banks.of_registers(held, memory, bits, matrices=matrices)
    return found.how, found.width, found.wavefronts, found.least


def test_bank_conflicts():
    """A warp along a row of words has none, one along a column of 32 words waits 32 times, and a swizzle or padding by
    a word mends that."""
    row = "#ttg.blocked<{sizePerThread = [1, 1], threadsPerWarp = [1, 32], warpsPerCTA = [4, 1], order = [1, 0]}>"
    column = "#ttg.blocked<{sizePerThread = [1, 1], threadsPerWarp = [32, 1], warpsPerCTA = [1, 4], order = [0, 1]}>"
    plain, mended = _swizzled(1, 1, 1), _swizzled(1, 1, 32)
    rows, columns = ([[1 << k if axis == a else 0 for a in (0, 1)] for k in range(5)] for axis in (0, 1))
    padded = f"#ttg.padded_shared<[32:+1] {{offset = {columns + rows}, block = []}}>"
    assert _access(row, plain, (32, 32), 32) == ("vector", 4, 1, 1)
    assert _access(column, plain, (32, 32), 32) == ("vector", 4, 32, 1)
    assert _access(column, mended, (32, 32), 32) == ("vector", 4, 1, 1)
    assert _access(column, padded, (32, 32), 32) == ("vector", 4, 1, 1)
    # 16 bytes of each thread are four wavefronts at least; bytes of one word are read together
    assert _access(_BLOCKED, _swizzled(8, 1, 8), (64, 64), 16) == ("vector", 16, 4, 4)
    assert _access(column, plain, (32, 32), 8) == ("vector", 1, 8, 1)
    assert _access(row, plain, (32, 32), 8) == ("vector", 1, 1, 1)
    # rows of 64 bytes: eight of them are 16 bytes each on half of the banks
    left, right = _operand(0, _MMA2, 2), _operand(1, _MMA2, 2)
    assert _access(left, _swizzled(8, 1, 8), (64, 64), 16, True) == ("ldmatrix", 16, 1, 1)
    assert _access(left, _swizzled(1, 1, 1), (64, 64), 16, True) == ("ldmatrix", 16, 8, 1)
    assert _access(right, _swizzled(8, 1, 8), (64, 64), 16, True) == ("ldmatrix.trans", 16, 1, 1)


@pytest.mark.parametrize(("width", "taken"), [(128, 1), (64, 1), (32, 1), (0, 8)])
def test_products_read_rows_without_conflicts(width, taken):
    """Every swizzle of a tensor map is for that; plain rows of 128 bytes are read one after the other."""
    shape = (64, 64)
    memory = attributes.memory(attributes.fields(_for_products(width, 16)), shape)
    found = banks.of_product(memory, shape, 16)
    assert (found.wavefronts, found.least, len(found.offsets)) == (taken, 1, 8)
