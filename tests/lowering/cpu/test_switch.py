"""The option of LLVM that is another one while a kernel's machine code is made is the process's own again behind it."""

import llvmlite.binding as llvm
import pytest

from jtile.lowering.cpu import compile as cpu
from jtile.lowering.cpu.isa import host_isa

LOOP = """define void @f(ptr %p, ptr %q, i64 %n) {
entry:
  br label %body
body:
  %i = phi i64 [ 0, %entry ], [ %j, %body ]
  %a = mul i64 %i, 24
  %from = getelementptr i8, ptr %p, i64 %a
  %x = load i64, ptr %from
  %b = mul i64 %i, 40
  %to = getelementptr i8, ptr %q, i64 %b
  store i64 %x, ptr %to
  %j = add i64 %i, 1
  %again = icmp slt i64 %j, %n
  br i1 %again, label %body, label %done
done:
  ret void
}"""


def code_of_others() -> str:
    """Assembly that depends on the option."""
    cpu.initialize(host_isa())
    return cpu.new_machine(host_isa(), 2).emit_assembly(llvm.parse_assembly(LOOP, llvm.create_context()))


@pytest.mark.parametrize("at", ["nowhere", "within", "as it is set"])
def test_the_option_is_taken_back(monkeypatch, at):
    before, real = code_of_others(), llvm.set_option

    def interrupted(name: str, option: str) -> None:
        real(name, option)
        if option.endswith("true") and at == "as it is set":
            raise KeyboardInterrupt

    monkeypatch.setattr(llvm, "set_option", interrupted)
    try:
        with cpu._loops_as_they_are():
            assert code_of_others() != before
            if at == "within":
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert at != "nowhere"
    assert code_of_others() == before
    assert not cpu._SWITCH.locked()
