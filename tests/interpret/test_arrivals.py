"""Arrivals in the interpreter: what the last program sees, and the races, counts and programs that are missing."""

import numpy as np
import pytest
from arrival_kernels import ROWS, TWICE_INPUT, TWICE_OUTPUT, rows, rows_input, rows_output, twice

from jtile._errors import OutOfBoundsError, ProtocolError, RaceError, UninitializedReadError
from jtile.interpret import interpret
from jtile.ir import parse_kernel, verify
from jtile.transforms.batch import batch

SEEDS = range(8)
EARLY = (RaceError, UninitializedReadError)  # by the order of the programs: another one wrote, or has yet to write


@pytest.mark.parametrize("seed", SEEDS)
def test_the_last_one_sees_all_parts(seed):
    x = rows_input()
    parts, o = interpret(rows(), [x], seed=seed)
    np.testing.assert_array_equal(parts, 2 * x.reshape(3, 4, 8))
    np.testing.assert_array_equal(o, rows_output(x))


@pytest.mark.parametrize("seed", SEEDS)
def test_sums_of_all_programs(seed):
    np.testing.assert_array_equal(interpret(twice(), [TWICE_INPUT], seed=seed)[1], TWICE_OUTPUT)


def test_lanes_of_vmap_do_not_meet():
    x = np.stack([rows_input(), -rows_input()])
    _, o = interpret(batch(rows(), 2, [True] * 3), [x], seed=3)
    np.testing.assert_array_equal(o, np.stack([rows_output(rows_input()), rows_output(-rows_input())]))


def fails(kind, text, words, seeds=SEEDS, inputs=None):
    kernel = parse_kernel(text)
    verify(kernel)
    for seed in seeds:
        with pytest.raises(kind, match=words):
            interpret(kernel, [rows_input()] if inputs is None else inputs, seed=seed)


def test_parts_without_an_arrival_are_a_race():
    text = ROWS.replace('last_arrival %i, %c4 counters="rows" size=3', "eq %k, %c0")
    fails(EARLY, text, "race: it (reads|writes) element .* which program|which nobody wrote")


def test_what_is_written_after_the_arrival_is_a_race():
    store = "  store %parts[%i, %k, %c0:+8], %b\n"
    late = ROWS.replace(store, "").replace("  if %last", f"{store}  if %last")
    fails(RaceError, late, "race: it (reads|writes) element")


def test_who_is_not_last_knows_nothing():
    loaded = ROWS.replace("  if %last {\n", "").replace("    store %o[%i, %c0:+8], %sum\n  }\n", "")
    fails(EARLY, loaded, "race|nobody wrote")


def test_programs_that_never_come():
    fails(
        ProtocolError, ROWS.replace("full 4", "full 5"), r"4 of 5 programs arrived at rows\[[012]\] when all had ended"
    )


def test_counts_that_differ():
    text = ROWS.replace("%i, %c4 counters", "%i, %n counters").replace("  %a =", "  %n = add %k, %c4 : i32\n  %a =")
    fails(ProtocolError, text, r"arrives at rows\[\d\] as one of \d programs, and program .* as one of \d")


def test_a_count_of_none():
    fails(ProtocolError, ROWS.replace("full 4", "full 0").replace("%c4", "%none"), "at least 1, got 0")


def test_no_such_counter():
    fails(OutOfBoundsError, ROWS.replace("size=3", "size=2"), r"there is no counter rows\[2\]: there are 2")


def test_without_checks_it_still_counts():
    x = rows_input()
    np.testing.assert_array_equal(interpret(rows(), [x], check=False)[1], rows_output(x))


# Two roles write a part each; "sums" arrives for the program.
ROLES = """kernel @roles(%x: ref<4x2x8xf32>, %parts: ref<4x2x8xf32, out>, %o: ref<2x8xf32, out>) grid(4) {
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %c4 = full 4 : i32
  %told = alloc_barriers : barrier<1>
  %k = program_id 0 : i32
  roles {
    role sums warps=4 {
      %a = load %x[%k, %c0, %c0:+8] : tile<8xf32>
      store %parts[%k, %c0, %c0:+8], %a
      wait %told[%c0], %c0
      %last = last_arrival %c0, %c4 counters="all" size=1 : bool
      if %last {
        %all = load %parts[%c0:+4, %c0:+2, %c0:+8] : tile<4x2x8xf32>
        %sum = reduce sum %all axes=(0) : tile<2x8xf32>
        store %o[%c0:+2, %c0:+8], %sum
      }
    }
    role others warps=4 {
      %b = load %x[%k, %c1, %c0:+8] : tile<8xf32>
      store %parts[%k, %c1, %c0:+8], %b
      arrive %told[%c0]
    }
  }
}
"""


def roles_input():
    return np.random.default_rng(1).standard_normal((4, 2, 8)).astype(np.float32)


@pytest.mark.parametrize("seed", SEEDS)
def test_in_a_role(seed):
    kernel = parse_kernel(ROLES)
    verify(kernel, "block")
    x = roles_input()
    np.testing.assert_allclose(interpret(kernel, [x], seed=seed)[1], x.sum(0), rtol=1e-6)


def test_other_roles_count_where_a_barrier_orders_them():
    """Without the wait nothing puts the other role's store before the arrival."""
    kernel = parse_kernel(ROLES.replace("      wait %told[%c0], %c0\n", ""))
    for seed in SEEDS:
        with pytest.raises(EARLY):
            interpret(kernel, [roles_input()], seed=seed)


def test_other_roles_do_not_learn_of_it():
    """What the role that arrived last knows, another role of its program knows only where a barrier tells it."""
    load = ROLES[ROLES.index("        %all =") : ROLES.index("      }\n    }\n    role others")]
    text = ROLES.replace(load, "").replace("      arrive %told[%c0]\n", "      arrive %told[%c0]\n" + load)
    kernel = parse_kernel(text)
    for seed in SEEDS:
        with pytest.raises(EARLY):
            interpret(kernel, [roles_input()], seed=seed)
