"""`jtile demo`: four kernels against jnp under jit, then text from a model that is made of such kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import jtile as jt
from jtile import ops
from jtile.testing import relative_error, time_alternating

PROMPT = "Explain in two sentences why the sky is blue."


class Case(NamedTuple):
    """One row of the table: the two functions take `args`; `tolerance` bounds the relative error."""

    name: str
    size: str
    ours: Callable
    reference: Callable
    args: tuple[Any, ...]
    tolerance: float


@jt.kernel(out_type=lambda x, y, **_: jt.like(x), grid=lambda x, y, *, block, **_: (jt.cdiv(x.shape[0], block),))
def vector_add(x, y, o, *, block=16384):
    i = jt.program_id(0)
    X, Y, O = x.tiles(block), y.tiles(block), o.tiles(block)
    O[i] = X[i] + Y[i]


def run(*, text: bool, repeats: int) -> int:
    """Print the table of kernels, then (with `text`) what SmolLM2 says to a prompt. Returns the exit status."""
    console = Console()
    console.print("Kernels inside jax.jit, against their jnp counterparts under jax.jit\n", highlight=False)
    console.print(table(repeats))
    if not text:
        return 0
    console.print(f"\nSmolLM2-135M, every operation a jtile kernel: [bold]{PROMPT}[/bold]\n", highlight=False)
    return _text()


def table(repeats: int) -> Table:
    """Times and errors of every case, ours and XLA's alternating."""
    out = Table("kernel", "size", *(f"{name} us" for name in ("jtile", "XLA")), "XLA / jtile", "relative error")
    for column in out.columns[2:]:
        column.justify = "right"
    for case in cases():
        ours, reference = jax.jit(case.ours), jax.jit(case.reference)
        error = relative_error(ours(*case.args), reference(*case.args))
        if not error <= case.tolerance:
            raise AssertionError(
                f"{case.name} differs from its reference by {error:.2g}, more than {case.tolerance:.0g}"
            )
        times = time_alternating(
            {"ours": lambda f=ours, a=case.args: f(*a), "xla": lambda f=reference, a=case.args: f(*a)}, repeats=repeats
        )
        mine, theirs = times["ours"].median_us, times["xla"].median_us
        out.add_row(case.name, case.size, f"{mine:,.0f}", f"{theirs:,.0f}", f"{theirs / mine:.2f}", f"{error:.1e}")
    return out


def cases() -> list[Case]:
    """Vector add, matmul, softmax and attention, at sizes that take about a millisecond each."""
    keys = jax.random.split(jax.random.key(0), 8)
    draw = lambda i, *shape: jax.random.normal(keys[i], shape, jnp.float32)
    n, (batch, length, heads, width) = 1 << 20, (1, 1024, 8, 64)
    q, k, v = (draw(5 + i, batch, length, heads, width) for i in range(3))
    return [
        Case("vector add", "2^20", vector_add, jnp.add, (draw(0, n), draw(1, n)), 0),
        Case("matmul", "1024^3", ops.matmul, jnp.matmul, (draw(2, 1024, 1024), draw(3, 1024, 1024)), 1e-5),
        Case("softmax", "4096 x 1024", ops.softmax, jax.nn.softmax, (draw(4, 4096, 1024),), 1e-5),
        Case("attention", "8 x 1024 x 64", ops.attention, jax.nn.dot_product_attention, (q, k, v), 1e-5),
    ]


def _text() -> int:
    from jtile.tools.cli import run_model

    return run_model(PROMPT, max_new_tokens=100, stats=True)
