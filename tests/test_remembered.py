"""What compilers made in earlier runs of the suite (`tests/support/remembered.py`)."""

import dataclasses
import os

import numpy as np
import pytest
import remembered

import jtile as jt
from jtile import passes
from jtile.lowering import cpu
from jtile.lowering.cpu import compile as of_llvm
from jtile.lowering.cpu.isa import ISAS, host_isa
from jtile.lowering.targets import resolve
from jtile.lowering.triton import stages, versions
from jtile.lowering.triton.compile import compile_kernel

pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """Functions that remember in a folder of the test's own, whatever this run has."""
    monkeypatch.setenv("SUITE_CACHE", str(tmp_path))
    monkeypatch.setattr(remembered, "_off", [False])
    for module, name in ((of_llvm, "assemble"), (stages, "_build")):
        own = vars(module)[name]
        monkeypatch.setattr(module, name, getattr(own, "__wrapped__", own))
    (tmp_path / "images").mkdir()
    return tmp_path


def twice(x, o, *, by=2.0):
    o[...] = x[...] * by


def kernel(by=2.0):
    k = jt.call(lambda x, o: twice(x, o, by=by), out_type=lambda x: x, grid=1, name="twice")
    return passes.run_pipeline(k.lower(np.ones((4, 16), np.float32)).program.kernel, passes.TILE)


class Counted:
    """The function of a compiler, counted, with the wrapper of `remembered` around it."""

    def __init__(self, monkeypatch, module, compiler):
        self.calls, own = 0, vars(module)[compiler.name]

        def counted(*args, **kwargs):
            self.calls += 1
            return own(*args, **kwargs)

        monkeypatch.setattr(module, compiler.name, counted)
        remembered._remember(compiler, remembered.Files(remembered.folder() / "images"))


@pytest.fixture
def llvm(monkeypatch):
    return Counted(monkeypatch, of_llvm, remembered.LLVM)


@pytest.fixture
def triton(monkeypatch):
    return Counted(monkeypatch, stages, remembered.TRITON)


def test_equal_text_is_compiled_once(llvm):
    first, again = cpu.compile_kernel(kernel()), cpu.compile_kernel(kernel())
    assert llvm.calls == 1
    assert first == again
    with remembered.compiled_anew():
        assert cpu.compile_kernel(kernel()).image == first.image
    assert llvm.calls == 2


def test_other_texts_and_options_are_not_found(llvm):
    images = [cpu.compile_kernel(kernel(by)).image for by in (2.0, 3.0)]
    with jt.config(optimize=True):
        images.append(cpu.compile_kernel(kernel()).image)
    images.append(cpu.compile_kernel(kernel(), ISAS["sse2"]).image)
    assert llvm.calls == 4
    assert len(set(images)) == 4
    assert cpu.compile_kernel(kernel(), texts=True).texts["asm"]
    assert llvm.calls == 5


def test_a_file_that_is_broken_is_made_anew(llvm, own_folder):
    image = cpu.compile_kernel(kernel()).image
    (file,) = (own_folder / "images").iterdir()
    file.write_bytes(file.read_bytes()[:-7])
    assert cpu.compile_kernel(kernel()).image == image
    assert llvm.calls == 2
    assert cpu.compile_kernel(kernel()).image == image
    assert llvm.calls == 2


def test_a_file_of_somebody_else_is_made_anew(llvm, own_folder):
    image = cpu.compile_kernel(kernel()).image
    (file,) = (own_folder / "images").iterdir()
    remembered.Files(file.parent).put(file.name, b"[1, 2]\n")
    assert cpu.compile_kernel(kernel()).image == image
    assert llvm.calls == 2


def test_a_folder_that_is_gone_keeps_nothing(llvm, own_folder):
    (own_folder / "images").rmdir()
    assert cpu.compile_kernel(kernel()) == cpu.compile_kernel(kernel())
    assert llvm.calls == 2


def test_a_module_that_a_test_has_changed_is_asked(llvm, monkeypatch):
    cpu.compile_kernel(kernel())
    monkeypatch.setattr(of_llvm, "SHORT", 7)
    cpu.compile_kernel(kernel())
    assert llvm.calls == 2


def test_failures_are_not_kept(llvm, own_folder):
    for _ in range(2):
        with pytest.raises(RuntimeError, match="parsing error"):
            of_llvm.assemble("define nothing", host_isa())
    assert llvm.calls == 2
    assert not any((own_folder / "images").iterdir())


def test_code_for_gpus(triton, monkeypatch):
    made = [compile_kernel(kernel(), resolve("cuda:sm_90"), {}) for _ in range(2)]
    assert triton.calls == 1
    assert made[0] == made[1]
    compile_kernel(kernel(), resolve("cuda:sm_80"), {})
    assert triton.calls == 2
    first, again = (compile_kernel(kernel(), resolve("cuda:sm_80"), {}, texts=True) for _ in range(2))
    assert triton.calls == 3
    assert dict(first.texts) == dict(again.texts)
    assert "sass" in again.texts
    assert dataclasses.replace(first, texts={}) == dataclasses.replace(again, texts={})
    triton.calls = 2
    monkeypatch.setenv("DISABLE_PTXAS_OPT", "1")
    compile_kernel(kernel(), resolve("cuda:sm_90"), {})
    assert triton.calls == 3
    monkeypatch.setattr(versions, "forgets_modifiers", lambda: True)
    compile_kernel(kernel(), resolve("cuda:sm_90"), {})
    assert triton.calls == 4


def test_what_was_used_last_stays(own_folder, monkeypatch):
    files = remembered.Files(own_folder / "images")
    for k in range(10):
        files.put(str(k), bytes(1000))
        os.utime(own_folder / "images" / str(k), (k, k))
    remembered.prune()
    assert files.get("0") is not None  # it is the newest now
    monkeypatch.setattr(remembered, "MOST", 4500)
    remembered.prune()
    assert sorted(p.name for p in (own_folder / "images").iterdir()) == ["0", "9"]


def test_there_may_be_none(monkeypatch):
    monkeypatch.setenv("SUITE_CACHE", "")
    assert remembered.install() is None


def test_a_file_that_another_run_has_taken_away(own_folder, monkeypatch):
    monkeypatch.setattr(remembered, "MOST", 1)
    (own_folder / "images" / "kept").write_bytes(bytes(8))
    (own_folder / "images" / ".part-gone").symlink_to(own_folder / "nothing")  # listed, but no longer there
    remembered.prune()
    assert not (own_folder / "images" / "kept").exists()
