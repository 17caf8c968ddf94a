"""What the language covers, from the rule tables themselves. `python -m jtile.tools.support` prints docs/support.md."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jtile.lowering.targets import Target

_PAGE = """# What is supported

Which functions and dtypes a kernel may use, on which target. The page is made from the compiler's own tables, by
`python -m jtile.tools.support > docs/support.md`.

## JAX functions in a kernel

JAX breaks every function of `jnp`, `lax` and `jax.nn` down into *primitives*. A kernel body may use any function whose
primitives are all in this list; `jnp.linalg.norm`, `jax.nn.gelu` and `einsum` are examples. (To see the primitives of a
function, print `jax.make_jaxpr(fn)(x)`.) Names that begin with `jtile_` belong to jtile's own functions.

{primitives}
These primitives also work on complex numbers:

{complex}

These are refused, with an error that names the source line:

{refused}
## Targets

Where the table says *all*, a kernel may use every dtype of the language. Where the number of elements of a tile is
limited, the sides of a tile count as the next power of two.

{targets}
{gaps}
## Execution graphs

{graphs}

## Ops of Tile IR

[Tile IR](ir.md) is the compiler's own form of a kernel. At tile level every target has code for all of these ops,
except for the gaps listed above:

{ops}

At [the block level](block_level.md), which is for sm_90, there are also:

{block_ops}
"""


def page() -> str:
    """The text of docs/support.md."""
    from jtile import ir

    grammar = ir.stage_grammar()
    return _PAGE.format(
        primitives="".join(_item(f"**{family}**: {_names(names)}") for family, names in primitives().items()),
        complex=textwrap.fill(_names(complex_primitives()), 118, break_on_hyphens=False),
        refused="".join(_item(f"{_names(names)}: {why}") for why, names in refused().items()),
        targets="".join(f"| {' | '.join(row)} |\n" for row in _table()),
        gaps="".join(map(_item, gaps())),
        graphs=textwrap.fill(_graphs(), 118, break_on_hyphens=False),
        ops=textwrap.fill(_names(grammar["tile"]), 118, break_on_hyphens=False),
        block_ops=textwrap.fill(_names(set(grammar["block"]) - set(grammar["tile"])), 118, break_on_hyphens=False),
    )


def primitives() -> dict[str, list[str]]:
    """Family (file of the rules) -> the JAX primitives that it covers."""
    out: dict[str, list[str]] = {}
    for name, rule in _rules():
        if _why(rule) is None:
            out.setdefault(rule.__module__.rpartition(".")[2], []).append(name)
    return dict(sorted(out.items()))


def complex_primitives() -> list[str]:
    """The JAX primitives that complex tiles may be operands of."""
    from jtile.trace.pairs.numbers import ORDERED
    from jtile.trace.pairs.walk import RULES

    return sorted(set(RULES) - set(ORDERED))


def refused() -> dict[str, list[str]]:
    """Reason, and what to use instead -> the JAX primitives that a kernel cannot have."""
    out: dict[str, list[str]] = {}
    for name, rule in _rules():
        why = _why(rule)
        if why is not None:
            out.setdefault(why, []).append(name)
    return dict(sorted(out.items()))


def _rules() -> list[tuple[str, Callable]]:
    from jtile.trace import lower, rules  # noqa: F401  the package fills the table

    return sorted(lower.RULES.items())


def _why(rule: Callable) -> str | None:
    """The reason of a rule that only refuses: it ignores the values that it is given, and has one text."""
    code = getattr(rule, "__code__", None)
    if code is None or code.co_varnames[1:2] != ("_",):
        return None
    return max((c for c in code.co_consts if isinstance(c, str)), key=len, default=None)


def dtypes(names: Iterable[str]) -> str:
    """`all`, or the names of what a target takes."""
    from jtile import ir

    names = list(names)
    return "all" if set(names) == set(ir.DTYPES) else ", ".join(names)


def gaps() -> list[str]:
    """One sentence for everything that targets cannot run although the language has it."""
    found: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for target in _static_targets():
        for gap in target.gaps:
            found.setdefault((gap.op, gap.instead), {}).setdefault(target.name, []).append(gap.dtype)
    alike: dict[tuple[str, ...], list[str]] = {}
    for what, dtypes_of in found.items():
        for target, missing in dtypes_of.items():
            alike.setdefault((*what, *missing), []).append(target)
    short = {what: _among(_short(some)) for what, some in alike.items()}
    return [
        f"`{op}`{'' if missing == ['*'] else f' on {_among(missing)}'} does not run on {some}: {instead}"
        for (op, instead, *missing), some in short.items()
    ]


def _graphs() -> str:
    """Where `jt.graph` runs, and which kernels keep launches of their own."""
    from jtile.lowering import platforms

    able = [p for p in platforms.every() if p.graph_call is not None]
    pools = [f"{p.name}:*" for p in able if p.compile_graph is None]
    launches = [f"{p.name}:*" for p in able if p.compile_graph is not None]
    text = (
        f"[Execution graphs](graph.md) run on {_among([*pools, *launches])}. Kernels that print, assert, talk to other "
        "devices or have sizes that are not known before they run keep calls of their own"
    )
    more = f"; on {_among(launches)} so do those at the block level and those with private memory" if launches else ""
    return f"{text}{more}."


def _short(names: list[str]) -> list[str]:
    """Names of targets, where those that are all of a platform are one: `ascend:*`."""
    out: dict[str, None] = {}
    for name in names:
        platform = name.partition(":")[0]
        whole = [t.name for t in _static_targets() if t.platform == platform]
        out[f"{platform}:*" if len(whole) > 1 and set(whole) <= set(names) else name] = None
    return list(out)


def _table() -> list[tuple[str, ...]]:
    """What targets can hold, those that are alike in one row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for t in _static_targets():
        tile = t.limit("tile")
        rows.setdefault((dtypes(t.dtypes), f"at most {tile} elements" if tile else "of any size"), []).append(t.name)
    head = [("targets", "dtypes", "a tile is"), ("---",) * 3]
    return [*head, *((", ".join(f"`{name}`" for name in some), *what) for what, some in rows.items())]


def _among(names: list[str]) -> str:
    """Names as a list in a sentence: `a`, `b` and `c`."""
    return " and ".join(filter(None, [", ".join(f"`{n}`" for n in names[:-1]), f"`{names[-1]}`"]))


def _static_targets() -> list[Target]:
    """The targets that are the same on every machine."""
    from jtile.lowering import targets

    return [targets.resolve(name) for name in targets.names() if name != targets.host_target().name]


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _item(text: str) -> str:
    """One item of a list, in lines that a person can read."""
    return textwrap.fill(text, 118, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False) + "\n"


if __name__ == "__main__":
    print(page(), end="")
