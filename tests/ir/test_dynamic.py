"""Sizes that are known when a kernel runs: arithmetic, proofs, text, and the kernel for given sizes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jtile._errors import KernelTypeError, KernelValueError, ParseError, VerificationError
from jtile.interpret import interpret
from jtile.ir import (
    Extent,
    UndecidedError,
    at_least,
    bind_sizes,
    concrete,
    evaluate,
    is_dynamic,
    parse_kernel,
    parse_size,
    print_kernel,
    sources,
    symbol,
    used_symbols,
    verify,
)

n, m = symbol("n"), symbol("m")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (n + 3 + n - 1, "2*n + 2"),
        (3 - n, "-n + 3"),
        (n * m - m * n + 4, "4"),
        ((n + 1) * (n - 1), "n*n - 1"),
        (-(-n // 128), "cdiv(n, 128)"),
        (-(-(256 * n) // 128), "2*n"),
        ((128 * n + 64) // 128, "n"),
        ((128 * n + m) // 128, "floordiv(m, 128) + n"),
        (n % 8, "mod(n, 8)"),
        ((16 * n + 3) % 8, "3"),
        (n // m, "floordiv(n, m)"),
        (5 // n, "floordiv(5, n)"),
        (5 % n, "mod(5, n)"),
        (parse_size("max(n, 1)"), "n"),
        (parse_size("max(n, m)"), "max(m, n)"),
        (parse_size("min(n, n + m)"), "n"),
        (parse_size("- floordiv(- x_0, 128)"), "cdiv(x_0, 128)"),
        (parse_size("n^2*m - 3"), "m*n*n - 3"),
        (parse_size("cdiv(7, 2)"), "4"),
    ],
)
def test_arithmetic(size, text):
    assert str(size) == text
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "n +", "f(n)", "n.x", "1.5", "n**-1", "n if m else 1", "max()"])
def test_text_that_is_no_size(text):
    with pytest.raises(ValueError, match="is no size"):
        parse_size(text)


def test_comparisons_answer_where_all_sizes_agree():
    assert n >= 1
    assert not n < 1
    assert n * m >= n
    assert 2 * n > n
    assert n + 1 != n
    assert n
    assert n != 1  # no constant
    assert -(-n // 8) >= 0
    for ask in (lambda: n > 5, lambda: n < m, lambda: n - 3 >= 0, lambda: bool(n - 3)):
        with pytest.raises(UndecidedError, match="depends on sizes"):
            ask()
    with pytest.raises(UndecidedError, match="known only when"):
        range(n)


SIZES = st.recursive(
    st.sampled_from(["n", "m"]) | st.integers(-9, 9).map(str),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(st.sampled_from(["cdiv", "floordiv", "mod"]), inner, st.integers(1, 9)).map(
            lambda t: f"{t[0]}({t[1]}, {t[2]})"
        ),
        st.tuples(st.sampled_from(["max", "min"]), inner, inner).map(lambda t: f"{t[0]}({t[1]}, {t[2]})"),
    ),
    max_leaves=6,
)
FUNCTIONS = {"cdiv": lambda a, b: -(-a // b), "floordiv": lambda a, b: a // b, "mod": lambda a, b: a % b}


@given(SIZES, SIZES, st.integers(1, 40), st.integers(1, 40))
def test_simplified_sizes_have_the_same_values(a, b, n_value, m_value):
    values = {"n": n_value, "m": m_value}
    plain = lambda text: eval(text, {**FUNCTIONS, "max": max, "min": min, **values})
    x, y = parse_size(a), parse_size(b)
    assert evaluate(x, values) == plain(a)
    assert parse_size(str(x)) == x
    if at_least(x, y):
        assert plain(a) >= plain(b)


KERNEL = """\
kernel @copy(%a: ref<{8*n}x4xf32>, %b: ref<{8*n}x{m}xf32>, %o: ref<{8*n}x{m}xf32, out>) grid({n}, {cdiv(m, 16)}) {
  %i = program_id 0 : i32
  %j = program_id 1 : i32
  %k = size {8*n} : i32
  %p = num_programs 1 : i64
  %x = load %b[tile(%i, 8), tile(%j, 16)] : tile<8x16xf32>
  store %o[tile(%i, 8), tile(%j, 16)], %x
}
"""
KERNEL = KERNEL.replace("  %p = num_programs 1 : i64\n", "  %p = num_programs 1 : i32\n")


def test_text_and_symbols():
    k = parse_kernel(KERNEL)
    verify(k)
    assert print_kernel(k) == KERNEL
    assert is_dynamic(k)
    assert used_symbols(k) == {"n", "m"}
    assert [(s.operand, s.axis, s.multiple) for s in sources(k)["n"]] == [(0, 0, 8), (1, 0, 8)]
    assert isinstance(k.grid[0], Extent)


def test_the_kernel_for_given_sizes():
    k = concrete(parse_kernel(KERNEL), bind_sizes(parse_kernel(KERNEL), [(16, 4), (16, 5)]))
    verify(k)
    assert print_kernel(k) == KERNEL.replace("{8*n}x", "16x").replace("{m}", "5").replace("{n}", "2").replace(
        "{cdiv(m, 16)}", "1"
    ).replace("size {8*n}", "full 16")


def test_the_interpreter_takes_sizes_from_the_arrays():
    k = parse_kernel(KERNEL)
    for shape in [(8, 1), (24, 33)]:
        b = np.arange(np.prod(shape), dtype="f").reshape(shape)
        np.testing.assert_array_equal(interpret(k, [np.zeros((shape[0], 4), "f"), b])[0], b)
    with pytest.raises(KernelTypeError, match=r"axis 0 of input a has 12 elements, where 8\*n"):
        interpret(k, [np.zeros((12, 4), "f"), np.zeros((12, 4), "f")])
    with pytest.raises(KernelTypeError, match="axis 0 of input b"):
        interpret(k, [np.zeros((16, 4), "f"), np.zeros((8, 4), "f")])
    with pytest.raises(KernelValueError):
        interpret(k, [np.zeros((16, 5), "f"), np.zeros((16, 4), "f")])


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("kernel @k(%o: ref<{n}xf32, out>) grid(1) {\n}", KernelValueError, "no dimension of an input says what n is"),
        ("kernel @k(%a: ref<4xf32>) grid({n}) {\n}", KernelValueError, "no dimension of an input says what n is"),
        ("kernel @k(%a: ref<{n + 1}xf32>) grid(1) {\n}", KernelValueError, "what n is"),
        (
            "kernel @k(%a: ref<{n}xf32>) grid(1) {\n  %x = full 0.0 : tile<{n}xf32>\n}",
            VerificationError,
            "the shape of a tile is static",
        ),
        ("kernel @k(%a: ref<{n}xf32>) grid(1) {\n  %x = size {n} : u8\n}", ParseError, "int32 or int64"),
        ("kernel @k(%a: ref<{n}xf32>) grid(1) {\n  %x = size 4 : i32\n}", ParseError, "has symbols"),
        ("kernel @k(%a: ref<{f(n)}xf32>) grid(1) {\n}", ParseError, "is no size"),
    ],
)
def test_kernels_that_are_refused(text, kind, words):
    with pytest.raises(kind, match=words):
        verify(parse_kernel(text))
