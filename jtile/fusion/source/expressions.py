"""Steps as text: what a person would write for an equation, and the statements of a body."""

from __future__ import annotations

import dataclasses
import keyword
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jtile._errors import UnsupportedError
from jtile.fusion.steps import Constant, Operand, Step, Value

ATOM, UNARY, POWER, TIMES, PLUS, AND, XOR, OR, COMPARES = 9, 8, 8, 7, 6, 5, 4, 3, 2
LONGEST = 80  # characters of an expression, at most

INFIX = {
    "add": ("+", PLUS), "add_any": ("+", PLUS), "sub": ("-", PLUS), "mul": ("*", TIMES), "and": ("&", AND),
    "xor": ("^", XOR), "or": ("|", OR), "eq": ("==", COMPARES), "ne": ("!=", COMPARES), "lt": ("<", COMPARES),
    "le": ("<=", COMPARES), "gt": (">", COMPARES), "ge": (">=", COMPARES),
}  # fmt: skip
# Functions that spread their operands against each other.
CALLED = {
    "abs": "jnp.abs", "max": "jnp.maximum", "min": "jnp.minimum", "atan2": "jnp.arctan2", "sign": "jnp.sign",
    "square": "jnp.square", "sqrt": "jnp.sqrt", "rsqrt": "jax.lax.rsqrt", "cbrt": "jnp.cbrt", "floor": "jnp.floor",
    "ceil": "jnp.ceil", "is_finite": "jnp.isfinite", "exp": "jnp.exp", "exp2": "jnp.exp2", "expm1": "jnp.expm1",
    "log": "jnp.log", "log1p": "jnp.log1p", "log2": "jnp.log2", "sin": "jnp.sin", "cos": "jnp.cos", "tan": "jnp.tan",
    "asin": "jnp.arcsin", "acos": "jnp.arccos", "atan": "jnp.arctan", "sinh": "jnp.sinh", "cosh": "jnp.cosh",
    "tanh": "jnp.tanh", "asinh": "jnp.arcsinh", "acosh": "jnp.arccosh", "atanh": "jnp.arctanh",
    "logistic": "jax.nn.sigmoid", "erf": "jax.lax.erf", "erfc": "jax.lax.erfc", "erf_inv": "jax.lax.erf_inv",
    "lgamma": "jax.lax.lgamma", "digamma": "jax.lax.digamma", "clz": "jax.lax.clz",
    "population_count": "jax.lax.population_count",
}  # fmt: skip
# Functions whose operands have one shape.
EVEN = {
    "div": "jax.lax.div", "rem": "jax.lax.rem", "pow": "jax.lax.pow", "nextafter": "jax.lax.nextafter",
    "shift_left": "jax.lax.shift_left", "shift_right_logical": "jax.lax.shift_right_logical",
    "shift_right_arithmetic": "jax.lax.shift_right_arithmetic",
}  # fmt: skip
KEPT = frozenset(["copy", "copy_p", "stop_gradient"])
TEMPORARY = {
    "reduce_sum": "total", "reduce_max": "largest", "reduce_min": "least", "reduce_prod": "product",
    "dot_general": "product", "select_n": "chosen", "exp": "power", "div": "quotient", "sub": "difference",
    "add": "total", "mul": "product", "convert_element_type": "cast", "gather": "taken", "iota": "number",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Text:
    """An expression.

    Attributes:
      text: the expression. level: how strongly its outermost operator binds.
      constant: its value, if it is a number that is known. shape: which dimensions it has (any key); None: a number's.
      mean: for a sum, (what the mean of the same elements is called, their number).
    """

    text: str
    level: int = ATOM
    constant: Any = None
    shape: Any = None
    mean: tuple[str, int] | None = None

    def at(self, level: int) -> str:
        """The text as an operand of an operator of that level."""
        return self.text if self.level >= level else f"({self.text})"


def dtype_text(dtype: Any) -> str:
    name = np.dtype(dtype).name
    return "jnp.bool_" if name == "bool" else f"jnp.{name}"


def number(value: Any, dtype: Any) -> str:
    """A number of a dtype as a Python literal, as short as it can be."""
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        return str(int(value))
    if dtype.kind == "b":
        return str(bool(value))
    wide = float(value)
    if wide != wide:
        return "jnp.nan"
    if wide in (np.inf, -np.inf):
        return "jnp.inf" if wide > 0 else "-jnp.inf"
    short = str(np.asarray(value, dtype)[()])
    return short if "." in short + "." * ("e" in short) and dtype.type(float(short)) == value else repr(wide)


def constant(value: Any, dtype: Any) -> Text:
    found = number(value, dtype)
    return Text(found, UNARY if found.startswith("-") else ATOM, np.asarray(value, dtype)[()])


def typed(x: Text, dtype: Any) -> str:
    """An operand that says its dtype, where nothing beside it does."""
    return x.text if x.constant is None else f"{dtype_text(dtype)}({x.text})"


class Names:
    """Names that are free in a scope."""

    def __init__(self, taken: Sequence[str] = ()):
        self._taken = {"jax", "jnp", "np", "jt", *taken}

    def new(self, wanted: str) -> str:
        """The name `wanted` if it is free, otherwise that name with a number behind it."""
        wanted = re.sub(r"\W", "_", wanted) or "x"
        wanted = f"{wanted}_" if keyword.iskeyword(wanted) or wanted[0].isdigit() else wanted
        found, k = wanted, 2
        while found in self._taken:
            found, k = f"{wanted}_{k}", k + 1
        self._taken.add(found)
        return found


class Body:
    """The statements of a function, and how its values are called there.

    Attributes:
      lines: the statements, indented by `indent` levels. texts: of each value.
    """

    def __init__(self, names: Names, called: dict[Value, str], uses: dict[Value, int], indent: int = 1):
        self.names, self._called, self._uses = names, called, uses
        self.lines: list[str] = []
        self.texts: dict[Value, Text] = {}
        self.indent = indent

    def line(self, text: str) -> None:
        self.lines.append("    " * self.indent + text if text else "")

    def read(self, x: Operand) -> Text:
        return constant(x.value, x.dtype) if isinstance(x, Constant) else self.texts[x]

    def name(self, text: Text, wanted: str) -> Text:
        """Gives an expression a name."""
        found = self.names.new(wanted)
        self.line(f"{found} = {text.text}")
        return dataclasses.replace(text, text=found, level=ATOM, mean=None)

    def give(self, value: Value, text: Text, wanted: str) -> None:
        """The expression of a value, which gets a name where it is read several times or the program named it."""
        plain = text.constant is not None or text.text.isidentifier()
        if not plain and (value in self._called or self._uses.get(value, 0) != 1 or len(text.text) > LONGEST):
            text = self.name(text, self._called.get(value, wanted))
        self.texts[value] = text

    def operands(self, step: Step) -> list[Text]:
        """The texts of a step's operands; long ones get names of their own first."""
        found = [self.read(x) for x in step.ins]
        while sum(len(x.text) for x in found) > LONGEST + 10 and any(not x.text.isidentifier() for x in found):
            k = max(range(len(found)), key=lambda k: (not found[k].text.isidentifier()) * len(found[k].text))
            if len(found[k].text) < LONGEST // 4:
                break
            x = step.ins[k]
            named = self.name(found[k], "part")
            if isinstance(x, Value):
                self.texts[x] = named
            found = [named if y is x else t for y, t in zip(step.ins, found)]
        return found


Spread = Callable[[Text], str]  # a function that writes an operand in the shape of the result


def elementwise(step: Step, xs: list[Text], spread: Spread, shape: Any) -> Text:
    """An elementwise step of operands; the result has the key `shape`.

    Raises:
      UnsupportedError: there is no text for it.
    """
    name, (out,) = step.name, step.outs
    if all(x.constant is not None for x in xs) and xs:
        return _folded(step, xs)
    dtype = step.ins[0].dtype
    if (left := _left(name, xs)) is not None and left.shape == shape:
        return left
    if name in KEPT or (name == "convert_element_type" and out.dtype == dtype):
        return xs[0]
    if name == "select_n":
        return _chosen(step, xs, shape)
    if name == "div" and np.dtype(dtype).kind != "i" and np.dtype(dtype).kind != "u":
        return _quotient(step, xs, shape)
    if name in INFIX:
        sign, level = INFIX[name]
        left, right = xs[0].at(level + (level == COMPARES)), xs[1].at(level + 1)
        return Text(f"{left} {sign} {right}", level, shape=shape)
    if name in CALLED:
        return Text(f"{CALLED[name]}({', '.join(x.text for x in xs)})", shape=shape)
    if name in EVEN:
        return Text(f"{EVEN[name]}({', '.join(map(spread, xs))})", shape=shape)
    if name in ("neg", "not"):
        return Text(("-" if name == "neg" else "~") + xs[0].at(UNARY + 1), UNARY, shape=shape)
    if name == "integer_pow":
        return Text(f"{xs[0].at(POWER + 1)} ** {step.params['y']}", POWER, shape=shape)
    if name == "clamp":
        return Text(f"jnp.clip({xs[1].text}, {xs[0].text}, {xs[2].text})", shape=shape)
    if name == "convert_element_type":
        return Text(f"{xs[0].at(ATOM)}.astype({dtype_text(out.dtype)})", shape=shape)
    if name == "round":
        kind = step.params["rounding_method"].name
        how = "" if kind == "TO_NEAREST_EVEN" else f", jax.lax.RoundingMethod.{kind}"
        return Text(f"jax.lax.round({xs[0].text}{how})" if how else f"jnp.round({xs[0].text})", shape=shape)
    if name == "reduce_precision":
        p = step.params
        bits = f"exponent_bits={p['exponent_bits']}, mantissa_bits={p['mantissa_bits']}"
        return Text(f"jax.lax.reduce_precision({xs[0].text}, {bits})", shape=shape)
    if name == "one_minus_square":
        return Text(f"1 - jnp.square({xs[0].text})", PLUS, shape=shape)
    raise no_text(step)


def no_text(step: Step) -> UnsupportedError:
    from jax.extend import source_info_util

    where = source_info_util.summarize(step.eqn.source_info)
    return UnsupportedError(
        f"jt.tile writes no {step.name} ({where}): tile a part of the function without it, and call the rest around it"
    )


def _left(name: str, xs: list[Text]) -> Text | None:
    """The operand that is the result where the other one changes nothing, such as x of x * 1; None elsewhere."""
    nothing = {"max": -np.inf, "min": np.inf, "mul": 1, "div": 1}.get(name)
    for x, y in ((xs[0], xs[-1]), (xs[-1], xs[0])):
        if nothing is not None and y.constant is not None and y.constant == nothing and (name != "div" or y is xs[1]):
            return x
    return None


def _folded(step: Step, xs: list[Text]) -> Text:
    """The result of a step on known numbers, as a number."""
    with jax.ensure_compile_time_eval():
        args = [np.asarray(x.constant, y.dtype) for x, y in zip(xs, step.ins, strict=True)]
        found = step.run([jax.numpy.asarray(a, a.dtype) for a in args])[0]
    return constant(np.asarray(found)[()], step.outs[0].dtype)


def _chosen(step: Step, xs: list[Text], shape: Any) -> Text:
    which, *cases = xs
    dtype = step.outs[0].dtype
    if which.constant is not None:
        return cases[int(which.constant)]
    if np.dtype(step.ins[0].dtype).kind == "b" and len(cases) == 2:
        no, yes = cases
        given = typed(yes, dtype) if no.constant is not None else yes.text
        return Text(f"jnp.where({which.text}, {given}, {no.text})", shape=shape)
    text = typed(cases[-1], dtype)
    for k in reversed(range(len(cases) - 1)):
        text = f"jnp.where({which.at(COMPARES + 1)} == {k}, {cases[k].text}, {text})"
    return Text(text, shape=shape)


def _quotient(step: Step, xs: list[Text], shape: Any) -> Text:
    x, y = xs
    if x.mean and y.constant is not None and float(y.constant) == x.mean[1] and step.ins[0].dtype.itemsize >= 4:
        return Text(x.mean[0], shape=shape)
    return Text(f"{x.at(TIMES)} / {y.at(TIMES + 1)}", TIMES, shape=shape)
