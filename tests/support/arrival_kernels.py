"""Kernels whose programs arrive at counters, as text: parts of rows, put together by whoever comes last."""

import numpy as np

from jtile.ir import parse_kernel

# Program (k, i) writes part k of row i; the last one of row i adds the parts up, 0, 1, 2 ...
ROWS = """kernel @rows(%x: ref<3x32xf32>, %parts: ref<3x4x8xf32, out>, %o: ref<3x8xf32, out>) grid(4, 3) {
  %k = program_id 0 : i32
  %i = program_id 1 : i32
  %c0 = full 0 : i32
  %c4 = full 4 : i32
  %a = load %x[%i, tile(%k, 8)] : tile<8xf32>
  %b = add %a, %a : tile<8xf32>
  store %parts[%i, %k, %c0:+8], %b
  %last = last_arrival %i, %c4 counters="rows" size=3 : bool
  if %last {
    %all = load %parts[%i, %c0:+4, %c0:+8] : tile<4x8xf32>
    %sum = reduce sum %all axes=(0) : tile<8xf32>
    store %o[%i, %c0:+8], %sum
  }
}
"""

# Counted: nobody writes parts, all add to one element; every program arrives twice, at counters of two names.
TWICE = """kernel @twice(%x: ref<6xi32>, %sum: ref<1xi32, out>, %o: ref<2xi32, out>) grid(6) init(%sum = 0) {
  %k = program_id 0 : i32
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %c6 = full 6 : i32
  %a = load %x[%k] : i32
  %old = atomic add %sum[%c0], %a : i32
  %first = last_arrival %c1, %c6 counters="one" size=2 : bool
  if %first {
    %s = load %sum[%c0] : i32
    store %o[%c0], %s
  }
  %second = last_arrival %c0, %c6 counters="two" size=1 : bool
  if %second {
    %s_1 = load %sum[%c0] : i32
    %t = load %o[%c0] : i32
    %u = add %s_1, %t : i32
    store %o[%c1], %u
  }
}
"""


def rows():
    return parse_kernel(ROWS)


def rows_input() -> np.ndarray:
    """Whole numbers, whose sums are exact in any order."""
    return np.random.default_rng(0).integers(-9, 9, (3, 32)).astype(np.float32)


def rows_output(x: np.ndarray) -> np.ndarray:
    return 2 * x.reshape(3, 4, 8).sum(1)


def twice():
    return parse_kernel(TWICE)


TWICE_INPUT = np.arange(6, dtype=np.int32) + 1
TWICE_OUTPUT = np.array([21, 42], np.int32)
