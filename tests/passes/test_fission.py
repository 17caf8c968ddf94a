"""What goes through memory between the halves of a kernel, and loops that start and end where they have to."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from accumulation import atomics, check, random_inputs

from jtile.interpret import interpret
from jtile.ir import Dot, For, Full, If, parse_kernel, print_kernel
from jtile.passes.cut import smallest_cut
from jtile.passes.fewer_rounds import fewer_rounds
from jtile.passes.nests import tidy

PRODUCT = """
  %i = program_id 0
  %j = program_id 1
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %c3 = full 3 : i32
  %zero = full 0.0 : tile<4x8xf32>
  %z = for %k in %c0..%c3 step %c1 carry (%acc = %zero) {
    %x = load %a[tile(%i, 4), tile(%k, 2)]
    %y = load %b[tile(%k, 2), tile(%j, 8)]
    %d = dot %x, %y acc=%acc
    yield %d
  }
  %s = mul %z, %z
  %ct = load %g[tile(%i, 4), tile(%j, 8)]
  %h = mul %s, %ct
"""
REFS = (
    "%a: ref<7x6xf32>, %b: ref<6x15xf32>, %g: ref<7x15xf32>, %da: ref<7x6xf32, out>, %db: ref<6x15xf32, out>, "
    "%dr: ref<7x15xf32, out>"
)
LOOP = """
  for %q in %c0..%c3 step %c1 {
    %u = load %a[tile(%i, 4), tile(%q, 2)]
    %w = load %b[tile(%q, 2), tile(%j, 8)]
    %dx = dot %h, %w trans_b=true
    %dy = dot %u, %h trans_a=true
    %0 = atomic add %da[tile(%i, 4), tile(%q, 2)], %dx
    %1 = atomic add %db[tile(%q, 2), tile(%j, 8)], %dy
  }
"""


def whole(rest: str, refs: str = REFS, inits: str = "%da = 0, %db = 0") -> str:
    return f"kernel @k({refs}) grid(2, 2) init({inits}) {{{PRODUCT}{LOOP}{rest}}}"


def products(kernel) -> int:
    return sum(isinstance(op, Dot) for op in kernel.body.walk())


def test_what_a_product_has_made_is_stored_once_and_loaded_by_those_that_are_re_nested():
    pieces = check(whole("store %dr[tile(%i, 4), tile(%j, 8)], %s"))
    assert atomics(pieces) == 0
    first, da, db = pieces.kernels
    assert [products(k) for k in pieces.kernels] == [1, 1, 1]
    assert [(r.piece, r.output) for r in pieces.between] == [(0, 1)]
    # rows and columns follow the grid: the array is one that a product can be taken of
    assert [v.shape for v in first.outputs] == [(7, 15), (8, 16)]
    assert all(v.shape == (8, 16) for v in (da.inputs[-1], db.inputs[-1]))
    assert [pieces.inputs[k][-1] for k in (1, 2)] == [3, 3]


def test_outputs_that_need_no_more_than_that_come_from_the_second_half():
    """`dq` sums over the loop, but the first half is what makes what it starts from."""
    body = (
        PRODUCT
        + """
      %n = full 0.0 : tile<4x2xf32>
      %m = for %q in %c0..%c3 step %c1 carry (%sum = %n) {
        %w = load %b[tile(%q, 2), tile(%j, 8)]
        %dx = dot %h, %w acc=%sum trans_b=true
        %u = load %a[tile(%i, 4), tile(%q, 2)]
        %dy = dot %u, %h trans_a=true
        %1 = atomic add %db[tile(%q, 2), tile(%j, 8)], %dy
        yield %dx
      }
      store %dq[tile(%i, 4), tile(%j, 2)], %m
    """
    )
    refs = REFS.replace("%da: ref<7x6xf32, out>", "%dq: ref<7x4xf32, out>").replace(", %dr: ref<7x15xf32, out>", "")
    pieces = check(f"kernel @k({refs}) grid(2, 2) init(%db = 0) {{{body}}}")
    assert [products(k) for k in pieces.kernels] == [1, 1, 1]
    assert [r.piece for r in pieces.results] == [2, 1] and [r.piece for r in pieces.between] == [0]


def test_sums_and_copies_that_need_no_product_stay_out_of_the_kernel_that_has_it():
    """The bias is rounded as what is kept is, so that it sums that; the residual goes by itself."""
    body = PRODUCT + """
      %e = cast %h : tile<4x8xbf16>
      %t = reduce sum %h axes=(0)
      %2 = atomic add %dc[tile(%j, 8)], %t
      store %dr[tile(%i, 4), tile(%j, 8)], %ct
    """ + LOOP.replace("dot %h, %w", "dot %e, %w16").replace("dot %u, %h", "dot %u16, %e").replace(
        "%dx =", "%w16 = cast %w : tile<2x8xbf16>\n    %u16 = cast %u : tile<4x2xbf16>\n    %dx ="
    )  # fmt: skip
    refs = REFS + ", %dc: ref<15xf32, out>"
    text = f"kernel @k({refs}) grid(2, 2) init(%da = 0, %db = 0, %dc = 0) {{{body}}}"
    inputs = [np.sign(x) for x in random_inputs(parse_kernel(text))]  # exact in bfloat16
    pieces = check(text, (None, None, None, "bfloat16"), inputs)
    assert [products(k) for k in pieces.kernels] == [1, 1, 1, 0, 0] and atomics(pieces) == 0
    assert [r.piece for r in pieces.results] == [1, 2, 3, 4] and len(pieces.between) == 1
    exact = check(text, inputs=inputs)  # a sum in float32 sums what was not rounded
    assert [r.piece for r in exact.results] == [1, 2, 3, 0]


def test_nothing_is_kept_where_the_loop_takes_loads_alone():
    refs = REFS.replace(", %dr: ref<7x15xf32, out>", "")
    body = PRODUCT.split("%z = for")[0] + "%h = load %g[tile(%i, 4), tile(%j, 8)]" + LOOP
    pieces = check(f"kernel @k({refs}) grid(2, 2) init(%da = 0, %db = 0) {{{body}}}")
    assert pieces.between == () and len(pieces.kernels) == 2


def test_the_smallest_cut():
    """Of a long way, what is small; of two values that one is made of, that one where it is smaller."""
    before = {"acc": (), "l": (), "p": ("acc", "l"), "r": ("p",), "w": ("l",), "x": ("r",), "y": ("w", "x")}
    size = {"acc": 64, "l": 1, "p": 64, "r": 1, "w": 64, "x": 4, "y": 64}
    assert smallest_cut(before, size, ["y", "w"]) == ["l", "r"]
    assert smallest_cut(before, size | {"y": 1}, ["y"]) == ["y"]
    assert smallest_cut({"a": ()}, {"a": 3}, ["a"]) == ["a"]


@pytest.mark.parametrize(
    ("condition", "bounds"),
    [
        ("%e = mul %i, %c8\n%t = add %e, %c15\n%d = div %t, %c8\n%on = lt %j, %d", (0, 6)),
        ("%e = mul %i, %c8\n%t = add %e, %c15\n%d = div %t, %c4\n%on = lt %j, %d", (0, 6)),
        ("%e = mul %i, %c3\n%d = div %e, %c8\n%on = ge %j, %d", (0, 6)),
        ("%d = add %i, %c1\n%f = min %d, %c16\n%on = gt %f, %j", (0, 6)),
        ("%e = mul %i, %c8\n%d = div %e, %c8\n%p = le %j, %d\n%q = ge %d, %c0\n%on = and %p, %q", (0, 6)),
    ],
)  # fmt: skip
def test_a_condition_on_the_index_is_a_bound_of_the_loop(condition, bounds):
    numbers = "\n".join(f"%c{n} = full {n} : i32" for n in (0, 1, 3, 4, 6, 8, 15, 16))
    text = f"""
    kernel @k(%x: ref<6xf32>, %o: ref<9x6xf32, out>) grid(9) init(%o = 0) {{
      %j = program_id 0
      {numbers}
      for %i in %c{bounds[0]}..%c{bounds[1]} step %c1 {{
        %v = load %x[%i]
        {condition}
        if %on {{
          %0 = atomic add %o[%j, %i], %v
        }} else {{
        }}
      }}
    }}
    """
    kernel = parse_kernel(text)
    new = tidy(fewer_rounds(kernel))
    (loop,) = (op for op in new.body.walk() if isinstance(op, For))
    left = [op for op in new.body.walk() if isinstance(op, If)]
    assert not left, print_kernel(new)
    inputs = [np.arange(1, 7, dtype=np.float32)]
    np.testing.assert_array_equal(interpret(new, inputs)[0], interpret(kernel, inputs)[0])
    assert not (isinstance(loop.lo.op, Full) and isinstance(loop.hi.op, Full))


@pytest.mark.parametrize("fn", ["lt", "le", "gt", "ge"])
def test_a_limit_of_what_a_condition_compares_with_is_heeded(fn):
    """Where the compared value reaches the limit (0, 2, of programs 0 to 2), and where it does not."""
    for limiting, limit in itertools.product(("min", "max"), (-1, 0, 1, 2, 3)):
        text = f"""
        kernel @k(%x: ref<6xf32>, %o: ref<3x6xf32, out>) grid(3) init(%o = 0) {{
          %j = program_id 0
          %c0 = full 0 : i32
          %c1 = full 1 : i32
          %c2 = full 2 : i32
          %c6 = full 6 : i32
          %limit = full {limit} : i32
          for %i in %c0..%c6 step %c1 {{
            %v = load %x[%i]
            %e = sub %i, %c2
            %d = {limiting} %e, %limit
            %on = {fn} %j, %d
            if %on {{
              %0 = atomic add %o[%j, %i], %v
            }} else {{
            }}
          }}
        }}
        """
        kernel, inputs = parse_kernel(text), [np.arange(1, 7, dtype=np.float32)]
        found = interpret(tidy(fewer_rounds(kernel)), inputs)[0]
        np.testing.assert_array_equal(found, interpret(kernel, inputs)[0], err_msg=f"{limiting} {limit}")
