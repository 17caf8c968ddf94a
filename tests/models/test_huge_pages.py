"""Weights of a host in huge pages: where they lie, and that they are the same."""

from __future__ import annotations

import gc
import mmap
import weakref
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
from gguf_models import write

import jtile as jt
import jtile.models
from jtile.models import huge_pages
from jtile.ops import QuantizedTensor

pytestmark = pytest.mark.cpu
SMAPS = Path("/proc/self/smaps")


def flags(x: jax.Array) -> list[str]:
    """What the system says of the memory that an array begins in: "hg" is a wish for huge pages."""
    at, inside = x.unsafe_buffer_pointer(), False
    for line in SMAPS.read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if not first.endswith(":"):
            low, high = (int(end, 16) for end in first.split("-"))
            inside = low <= at < high
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    return []


def quantised(shape: tuple[int, int], kind: str, panels: bool = True) -> QuantizedTensor:
    rng = np.random.default_rng(shape[0])
    weight = QuantizedTensor.quantize(rng.normal(size=shape).astype(np.float32), kind)
    return weight.in_panels() if panels else weight


@pytest.fixture
def pages(monkeypatch):
    """Small weights move, too, and pieces of memory are small."""
    if not SMAPS.exists() or not huge_pages.available():
        pytest.skip("this system has no huge pages for who asks")
    monkeypatch.setattr(huge_pages, "LEAST", 1)
    monkeypatch.setattr(huge_pages, "_MOST", 64 << 10)


def test_panels_move_and_other_weights_stay(pages):
    tree = {
        "bytes": quantised((32, 64), "q4_1", panels=False),
        "dense": jax.numpy.ones((4, 4)),
        "four": quantised((80, 96), "q4_1"),
        "half": quantised((48, 64), "q4_0"),
        "large": quantised((1024, 160), "q8_0"),  # larger than a piece
        "eight": quantised((16, 32), "q8_0"),
    }
    weights, structure = jax.tree.flatten(tree)
    before = list(weights)
    assert huge_pages.move(weights, structure) > tree["large"].nbytes
    moved = {id(x) for name in ("four", "half", "large", "eight") for x in jax.tree.leaves(tree[name])}
    assert len(moved) == 3 + 3 * 2
    for old, new in zip(before, weights, strict=True):
        assert (new is not old) == (id(old) in moved) and ("hg" in flags(new)) == (id(old) in moved)
        assert new.dtype == old.dtype and new.shape == old.shape
        np.testing.assert_array_equal(np.asarray(new), np.asarray(old))


def test_memory_goes_with_the_last_array_in_it(pages, monkeypatch):
    pieces, real = [], mmap.mmap

    class Piece(real):
        def __init__(self, *_, **__):
            pieces.append(weakref.ref(self))

    monkeypatch.setattr(mmap, "mmap", Piece)
    weights, structure = jax.tree.flatten(quantised((64, 64), "q8_0"))
    huge_pages.move(weights, structure)
    assert len(pieces) == 1
    last = weights.pop()
    values = np.asarray(last).copy()
    del weights
    gc.collect()
    assert pieces[0]() is not None
    np.testing.assert_array_equal(np.asarray(last), values)
    del last
    gc.collect()
    assert pieces[0]() is None


def test_nothing_moves_where_it_would_not_matter(monkeypatch, tmp_path):
    weights, structure = jax.tree.flatten(quantised((64, 64), "q8_0"))
    before = list(weights)
    assert huge_pages.move(weights, structure) == 0  # too few bytes
    monkeypatch.setattr(huge_pages, "LEAST", 1)
    setting = tmp_path / "enabled"
    for text in (None, "always madvise [never]\n"):
        if text is not None:
            setting.write_text(text)
        monkeypatch.setattr(huge_pages, "_SETTING", setting)
        assert huge_pages.move(weights, structure) == 0
    assert all(x is y for x, y in zip(weights, before, strict=True))


def test_weights_stay_where_the_system_refuses_memory(pages, monkeypatch):
    weights, structure = jax.tree.flatten([quantised((1024, 64), "q8_0"), quantised((1024, 96), "q8_0")])
    before, given, real = list(weights), [], huge_pages._piece

    def piece(size: int) -> np.ndarray:
        if given:
            raise OSError(12, "Cannot allocate memory")
        given.append(size)
        return real(size)

    monkeypatch.setattr(huge_pages, "_piece", piece)
    count = huge_pages.move(weights, structure)
    moved = [new is not old for old, new in zip(before, weights, strict=True)]
    assert any(moved) and not all(moved)
    assert count == sum(x.nbytes for x, there in zip(before, moved, strict=True) if there)
    for old, new in zip(before, weights, strict=True):
        np.testing.assert_array_equal(np.asarray(new), np.asarray(old))


def test_a_model_has_its_panels_in_huge_pages(pages, data, tmp_path, monkeypatch):
    """With the same tokens as one that has not."""
    if "int16 products" not in jt.target().features:
        pytest.skip("this machine does not multiply integers of 16 bits")
    kind = gguf.GGMLQuantizationType.Q8_0

    def change(name: str, tensor: np.ndarray):
        fits = tensor.ndim == 2 and tensor.shape[1] % 32 == 0
        return name, (gguf.quantize(np.ascontiguousarray(tensor), kind), kind) if fits else tensor

    path = write(data / "llama", tmp_path / "it.gguf", change)
    moved = jtile.models.load(path)
    monkeypatch.setattr(huge_pages, "LEAST", 1 << 40)
    stays = jtile.models.load(path)
    codes = [[w for w in lm._weights if w.dtype == np.int32] for lm in (moved, stays)]
    assert len(codes[0]) == len(codes[1]) > 5
    assert all("hg" in flags(w) for w in codes[0])
    ids = np.arange(3, 12)
    tokens = [[*lm.stream(ids, 8, eos=None)] for lm in (moved, stays)]
    assert tokens[0] == tokens[1]
