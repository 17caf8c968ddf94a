"""Products whose left operand has two of every four numbers, as dense ones that the PTX makes sparse; see
`lowering/triton/sparse.py`."""

from __future__ import annotations

import dataclasses

from ..sparse import held, mark
from ..ttir import Val
from .code import LaidCode

TERMS = 32  # terms of an instruction


def count_words(v: Val) -> int:
    """How many registers of a thread the places of a product [64, k / 8] take: one for each 64 terms."""
    return v.shape[1] // 8


def on_words(code: LaidCode, v: Val, asm: str) -> Val:
    """Assembly over the registers with places, which are its operands behind as many results."""
    out, words = dataclasses.replace(v, name=code.name()), count_words(v)
    constraints = ",".join(["=&r"] * words + ["r"] * words)
    attributes = f'{{constraints = "{constraints}", packed_element = {4 * words} : i32, pure = false}}'
    code.do(f'{out.name} = tt.elementwise_inline_asm "{asm}" {attributes} {v.name} : {v.type} -> {v.type}')
    return out


def whole_words(code: LaidCode, v: Val) -> Val:
    """The places in their registers from here on: registers that were put together between products would make ptxas
    wait for each product before the next."""
    words = count_words(v)
    return on_words(code, v, " ".join(f"mov.b32 ${k}, ${words + k};" for k in range(words)))


def marked(code: LaidCode, v: Val, step: int, steps: int) -> None:
    """Say that the next product is instruction number `step` of `steps`, and where its places are."""
    on_words(code, v, mark(f"${count_words(v) + step // 2}", step % 2, step, steps))


def hold(code: LaidCode, v: Val) -> None:
    """Keep the places in their registers until here."""
    words = count_words(v)
    on_words(code, v, " ".join(held(f"${words + k}") for k in range(words)))
