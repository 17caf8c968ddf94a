"""Programs that the source rewrite refuses: the error, its line, and the way out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtile import language as jt
from jtile.errors import KernelSyntaxError, KernelTypeError
from jtile.trace import function

F32, I32 = np.dtype("f"), np.dtype("i4")
GLOBAL = 1
X = np.arange(24, dtype="f").reshape(6, 4)


def bad_break_in_finally(x, o):
    for k in jt.range(3):
        try:
            o[k, 0] = x[k, 0]
        finally:
            break  # noqa: B012


def bad_late_name_after_a_break(x, o):
    for k in jt.range(3):
        if x[k, 0] > 1:
            y = x[k, 1]
            break
    o[0, 0] = y


def bad_name_behind_a_break(x, o):
    while True:
        if x[0, 0] > 1:
            break
        y = x[0, 1]
    o[0, 0] = y


@function
def _sometimes(v):
    if v > 0:
        return v


def bad_return_on_one_path(x, o):
    o[0, 0] = _sometimes(x[0, 0])


@function
def _one_or_two(v):
    if v > 0:
        return v, v
    return v


def bad_return_kinds(x, o):
    o[0, 0] = _one_or_two(x[0, 0])[0]


@function
def _row_or_element(x):
    if x[0, 0] > 0:
        return x[0]
    return x[0, 0]


def bad_return_types(x, o):
    o[0] = _row_or_element(x)


def bad_while_true(x, o):
    while True:
        if x[0] > 1:
            break
        o[0, 0] = 1.0


@function
def _countdown(n):
    if n <= 0:
        return 0
    return _countdown(n - 1) + 1


def bad_recursion(x, o):
    o[0, 0] = _countdown(x[0, 0])


def bad_raise(x, o):
    if x[0, 0] > 0:
        raise ValueError("positive")


def bad_max_key(x, o):
    o[0, 0] = max(x[0, 0], x[0, 1], key=abs)


def bad_max_rank(x, o):
    o[0, 0] = max(x[...])


def bad_step(x, o):
    for k in jt.range(0, 3, x[0, 0]):
        o[k, 0] = 0.0


def bad_tile_case(x, o):
    match x[0]:
        case 1:
            o[0, 0] = 1.0


def bad_class_case(x, o):
    match x[0, 0]:
        case str():
            o[0, 0] = 0.0
        case 1:
            o[0, 0] = 1.0


def bad_rest_case(x, o):
    for k in jt.range(3):  # the function itself is rewritten
        match (x[k, 0], x[k, 1]):
            case [1, *_]:
                o[k, 0] = 1.0


def bad_one_branch(x, o):
    if x[0, 0] > 0:
        y = x[0, 1]
    o[0, 0] = y


def bad_other_branch(x, o):
    if x[0, 0] > 0:
        z = 1.0  # noqa: F841
    else:
        y = 2.0
    o[0, 0] = y


def bad_late_name(x, o):
    for k in jt.range(3):
        y = x[k, 0]
    o[0, 0] = y


def bad_loop_variable(x, o):
    for k in jt.range(3):
        o[k, 0] = 0.0
    o[0, 0] = x[k, 0]


def bad_unbound_carry(x, o):
    for k in jt.range(3):
        if k > 0:
            o[k, 0] = y  # noqa: F821
        y = x[k, 0]  # noqa: F841


def bad_shape(x, o):
    acc = 0.0
    for k in jt.range(3):
        acc = acc + x[k]
    o[0] = acc


def bad_dtype(x, o):
    acc = jnp.zeros(4, jnp.int32)
    for k in jt.range(3):
        acc = acc.astype(jnp.float32) + x[k]
    o[0] = acc


def bad_weak(x, o):
    n = jnp.zeros((), jnp.int32)
    for _ in jt.range(3):
        n = 0.5
    o[0, 0] = n


def bad_kind(x, o):
    mode = "a"
    for _ in jt.range(3):
        mode = mode + "b"
    o[0, 0] = len(mode) * 1.0


def bad_swap(x, o):
    a, b = x.tiles(1, 4), o.tiles(1, 4)
    for k in jt.range(3):
        b[k, 0] = a[k, 0]
        a, b = b, a


def bad_structure(x, o):
    t = (x[0], x[1])
    for _ in jt.range(3):
        t = (t[0], t[1], t[0])
    o[0] = t[0]


def bad_while_shape(x, o):
    v = x[0]
    while v[0] < 3:
        v = v[:2]
    o[0, 0] = v[0]


def bad_branch_types(x, o):
    if x[0, 0] > 0:
        y = x[0]
    else:
        y = x[0, :2]
    o[0, 0] = y[0]


def bad_branch_kinds(x, o):
    if x[0, 0] > 0:
        y = "a"
    else:
        y = "b"
    o[0, 0] = float(len(y))


def bad_tile_condition(x, o):
    if x[0] > 0:
        o[0, 0] = 1.0


def bad_tile_and(x, o):
    if (x[0] > 0) and (x[1] > 0):
        o[0, 0] = 1.0


def bad_assert(x, o):
    assert x[0, 0] > 0


def bad_bound(x, o):
    for _ in range(x[0, 0].astype(jnp.int32)):
        o[0, 0] = 1.0


def bad_list_index(x, o):
    o[0, 0] = [1.0, 2.0][jt.program_id(0)]


def bad_numpy(x, o):
    o[0] = np.sin(x[0])


def bad_leak(x, o):
    rows = []
    for k in jt.range(3):
        rows.append(x[k])
    o[0] = rows[0] + 1.0


def bad_float_counter(x, o):
    s = 0.0
    for k in jt.range(3):
        s = k
    o[0, 0] = s


REFUSED = {
    bad_leak: (KernelTypeError, "appended to a list.*assign it to a name", "o[0] = rows[0] + 1.0"),
    bad_float_counter: (KernelTypeError, "'s' changes", "for k in jt.range(3):"),
    bad_break_in_finally: (KernelSyntaxError, "'break' cannot stand in a jt.range loop.*behind the `try`", "break"),
    bad_late_name_after_a_break: (KernelSyntaxError, "'y' gets its value only inside", "for k in jt.range(3):"),
    bad_name_behind_a_break: (KernelSyntaxError, "'y' gets its value only inside", "while True:"),
    bad_return_on_one_path: (KernelTypeError, "ends without a return", "if v > 0:"),
    bad_return_kinds: (KernelTypeError, "values of different kinds", "if v > 0:"),
    bad_return_types: (KernelTypeError, "value that this function returns has another type", "if x[0, 0] > 0:"),
    bad_max_key: (KernelTypeError, "max over traced values takes no key", "o[0, 0] = max("),
    bad_max_rank: (KernelTypeError, r"rank 1, got shape \(6, 4\); write jnp.max", "o[0, 0] = max(x[...])"),
    bad_step: (KernelTypeError, "the step of jt.range is an integer scalar", "for k in jt.range(0, 3, x[0, 0]):"),
    bad_tile_case: (KernelTypeError, "if takes one bool", "case 1:"),
    bad_class_case: (
        KernelTypeError,
        "this `match` stays Python's because of a class in a pattern: match what is traced in a `match` of its own",
        "case 1:",
    ),
    bad_rest_case: (KernelTypeError, "stays Python's because of a starred name in a pattern", "case [1, *_]:"),
    bad_while_true: (KernelTypeError, "if takes one bool", "if x[0] > 1:"),
    bad_recursion: (
        KernelTypeError,
        "calls itself without end while the kernel is traced",
        ("if n <= 0:", "_countdown(n - 1)"),
    ),
    bad_raise: (KernelSyntaxError, "jt.assert_", "raise ValueError"),
    bad_one_branch: (KernelSyntaxError, "'y' is bound in one branch only", "if x[0, 0] > 0:"),
    bad_other_branch: (KernelSyntaxError, "'y' is bound in one branch only", "if x[0, 0] > 0:"),
    bad_late_name: (KernelSyntaxError, "'y' gets its value only inside this loop", "for k in jt.range(3):"),
    bad_loop_variable: (KernelSyntaxError, "'k' gets its value only inside this loop", "for k in jt.range(3):"),
    bad_unbound_carry: (KernelSyntaxError, "'y' gets its value only inside this loop", "for k in jt.range(3):"),
    bad_shape: (
        KernelTypeError,
        r"'acc' changes.*was float32\[\] and becomes float32\[4\].*jt.zeros",
        "for k in jt.range(3):",
    ),
    bad_dtype: (KernelTypeError, r"'acc' changes.*was int32\[4\] and becomes float32\[4\]", "for k in jt.range(3):"),
    bad_weak: (KernelTypeError, r"'n' changes.*was int32\[\] and becomes float32\[\]", "for _ in jt.range(3):"),
    bad_kind: (KernelTypeError, "'mode' changes its kind.*'a' and becomes 'ab'", "for _ in jt.range(3):"),
    bad_swap: (KernelTypeError, "'a' changes its kind", "for k in jt.range(3):"),
    bad_structure: (KernelTypeError, "'t' changes its kind", "for _ in jt.range(3):"),
    bad_while_shape: (KernelTypeError, r"'v' changes.*float32\[4\] and becomes float32\[2\]", "while v[0] < 3:"),
    bad_branch_types: (
        KernelTypeError,
        r"'y' has another type in each branch: float32\[\d\] and float32\[\d\]",
        "if x[0, 0] > 0:",
    ),
    bad_branch_kinds: (KernelTypeError, "'y' is not of one kind", "if x[0, 0] > 0:"),
    bad_tile_condition: (KernelTypeError, r"if takes one bool.*\.any\(\)", "if x[0] > 0:"),
    bad_tile_and: (KernelTypeError, "write & ", "if (x[0] > 0) and"),
    bad_assert: (KernelTypeError, "needed as a Python value", "assert x[0, 0] > 0"),
    bad_bound: (KernelTypeError, "jt.range for a loop bound", "for _ in range("),
    bad_list_index: (KernelTypeError, "needed as a Python value", "[1.0, 2.0]"),
    bad_numpy: (KernelTypeError, "given to NumPy.* take the function of jnp", "np.sin"),
}


@pytest.mark.parametrize("kernel", REFUSED, ids=lambda f: f.__name__)
def test_refused(lower, kernel):
    kind, message, line = REFUSED[kernel]
    with pytest.raises(kind, match=message) as e:
        lower(kernel, [X], [jax.ShapeDtypeStruct(X.shape, F32)], grid=(1,))
    _, _, shown = str(e.value).partition("\n  at ")
    assert shown.startswith(__file__)
    assert any(each in shown.splitlines()[1] for each in (line if isinstance(line, tuple) else (line,)))
    assert shown.splitlines()[2].strip() == "^"
