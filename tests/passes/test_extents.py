"""Which accesses of dynamic dimensions are proved to stay inside."""

from __future__ import annotations

import pytest

from jtile.ir import Load, parse_kernel, verify
from jtile.passes.bounds import bounds

# %i < n, %k < m, %two < 2 n
KERNEL = """\
kernel @k(%a: ref<{{{size}}}xf32>, %b: ref<{{n}}xf32>, %c: ref<{{m}}xf32>, %e: ref<{{8*q}}xf32>) grid({{n}}, {{q}}) {{
  %i = program_id 0 : i32
  %j = program_id 1 : i32
  %np = num_programs 0 : i32
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %c3 = full 3 : i32
  %c8 = full 8 : i32
  %mega = full 1000000 : i32
  %n = size {{n}} : i32
  %m = size {{m}} : i32
  %small = cast %i : i8
  for %k in %c0..%m step %c1 {{
    {text}
  }}
}}
"""


@pytest.mark.parametrize(
    ("size", "text", "inside"),
    [
        ("n", "%x = load %a[%i] : f32", True),
        ("n", "%x = load %a[%i:+1] : tile<1xf32>", True),
        ("n", "%x = load %a[%i:+2] : tile<2xf32>", False),
        ("n", "%x = load %a[%k] : f32", False),
        ("m", "%x = load %a[%k] : f32", True),
        ("8*n", "%x = load %a[tile(%i, 8)] : tile<8xf32>", True),
        ("8*n", "%x = load %a[tile(%i, 9, step=8)] : tile<9xf32>", False),
        ("4*n", "%x = load %a[tile(%i, 8)] : tile<8xf32>", False),
        ("8*n", "%y = mul %i, %c8 : i32  %x = load %a[%y:+8] : tile<8xf32>", True),
        ("8*n", "%y = mul %i, %c8 : i32  %z = add %y, %c3 : i32  %x = load %a[%z:+5] : tile<5xf32>", True),
        ("8*n", "%y = mul %i, %c8 : i32  %z = add %y, %c3 : i32  %x = load %a[%z:+6] : tile<6xf32>", False),
        ("2*n", "%y = add %i, %np : i32  %x = load %a[%y] : f32", True),
        ("2*n", "%y = add %i, %n : i32  %z = add %y, %c1 : i32  %x = load %a[%z] : f32", False),
        ("8*n", "%y = mul %i, %mega : i32  %x = load %a[%y] : f32", False),  # may wrap
        ("n", "%x = load %a[%small] : f32", False),  # the same
        ("n", "%y = sub %n, %i : i32  %x = load %a[%y] : f32", False),  # n for i = 0
        ("n", "%y = min %i, %k : i32  %x = load %a[%y] : f32", True),
        ("3*n", "%x = load %a[%c3:+0] : tile<0xf32>", True),
        ("3*n", "%x = load %a[%c1:+2] : tile<2xf32>", True),
        ("3*n", "%x = load %a[%c1:+3] : tile<3xf32>", False),
    ],
)
def test_proofs(size, text, inside):
    text = text.replace("  %", "\n    %")
    k = parse_kernel(KERNEL.format(size=size, text=text))
    verify(k)
    (load,) = [op for op in bounds(k).body.walk() if isinstance(op, Load)]
    assert load.checked is not inside
