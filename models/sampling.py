"""Choosing the next token from logits inside the jitted step: penalties and biases, then greedy or a draw."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from jtile import ops
from jtile._errors import PromptError

from .host import on_host
from .parallel import Shares

# Bits of a threshold that a pass over the logits finds: a GPU, which waits for each pass, takes 15 sums at once.
DIGIT = {"host": 1, "device": 4}
REAL = (int, float, np.integer, np.floating)
SMALLEST, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
ALL = 2**31 - 1  # a top_k that keeps every token


class SamplingOptions(TypedDict, total=False):
    """The keyword arguments of `Sampling`, for functions that pass them on."""

    temperature: float | Sequence[float]
    top_k: int | Sequence[int | None] | None
    top_p: float | Sequence[float | None] | None
    min_p: float | Sequence[float | None] | None
    repetition_penalty: float | Sequence[float | None] | None
    presence_penalty: float | Sequence[float | None] | None
    frequency_penalty: float | Sequence[float | None] | None
    logit_bias: Mapping[int, float] | Sequence[Mapping[int, float] | None] | None
    seed: int | Sequence[int]


class Steps(NamedTuple):
    """Which steps a choice takes; a compiled program has those that some row needs, and takes their numbers as
    arguments."""

    draws: bool = False  # some row samples
    greedy: bool = True  # some row takes its most likely token
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    repetition: bool = False
    counts: bool = False  # presence or frequency penalties
    bias: bool = False


# the default of each option, and which numbers it may have
_RANGES: dict[str, tuple[float, str, Callable[[float], bool]]] = {
    "temperature": (0.0, "must be 0 (greedy) or a positive number", lambda x: 0 <= x < math.inf),
    "top_k": (ALL, "must be an int of at least 1; leave it out to sample from all tokens", lambda x: 1 <= x <= ALL),
    "top_p": (1.0, "must be in (0, 1]; leave it out to sample from all tokens", lambda x: 0 < x <= 1),
    "min_p": (0.0, "must be in [0, 1]; leave it out to sample from all tokens", lambda x: 0 <= x <= 1),
    "repetition_penalty": (1.0, "must be a positive number; 1 is none", lambda x: 0 < x < math.inf),
    "presence_penalty": (0.0, "must be a finite number; 0 is none", math.isfinite),
    "frequency_penalty": (0.0, "must be a finite number; 0 is none", math.isfinite),
    "seed": (0, "must be an int that fits 32 bits", lambda x: -(2**31) <= x < 2**32),
}
INTEGERS = ("top_k", "seed")
# what `Sampling._values` gives for None
_DEFAULTS = {
    name: np.asarray([default], np.int64 if name in INTEGERS else np.float32) for name, (default, *_) in _RANGES.items()
}


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Each option is one value for all rows of a batch, or a sequence with one a row, in which
    None stands for the default.

    In this order: `logit_bias` {token id: what is added to its logit} (-inf bans a token); `repetition_penalty` divides
    the positive logits of the tokens of prompt and answer, and multiplies their negative ones; `presence_penalty` is
    subtracted from the logits of the answer's tokens, `frequency_penalty` as often as they came; `temperature` 0 takes
    the most likely token, other temperatures divide the logits; `top_k`: only the k most likely tokens are
    left; `top_p`: only the smallest set of most likely ones whose probabilities (after top_k) sum to at least p;
    `min_p`: only those of at least p times the probability of the most likely one. Then one is drawn.

    seed: equal seeds give equal tokens: those of a row depend on its seed and its logits, not on the rows beside it.
    One int s for a batch stands for the seeds s, s + 1, ... of its rows.

    Raises:
      PromptError: an option is out of its range, or of another type.
    """

    temperature: float | Sequence[float] = 0.0
    top_k: int | Sequence[int | None] | None = None
    top_p: float | Sequence[float | None] | None = None
    min_p: float | Sequence[float | None] | None = None
    repetition_penalty: float | Sequence[float | None] | None = None
    presence_penalty: float | Sequence[float | None] | None = None
    frequency_penalty: float | Sequence[float | None] | None = None
    logit_bias: Mapping[int, float] | Sequence[Mapping[int, float] | None] | None = None
    seed: int | Sequence[int] = 0

    def __post_init__(self):
        for name in _RANGES:
            self._values(name)
        for biases in self._biases():
            _check_biases(biases)

    def _values(self, name: str) -> np.ndarray:
        """The numbers of an option, [1] or [rows]."""
        default, wanted, fits = _RANGES[name]
        value, integers = getattr(self, name), name in INTEGERS
        if value is None:
            return _DEFAULTS[name]
        kinds = (int, np.integer) if integers else REAL
        rows = list(value) if np.iterable(value) and not isinstance(value, str) else [value]
        rows = [default if x is None else x for x in rows]
        for x in rows:
            is_number = isinstance(x, kinds) and not isinstance(x, bool)
            if is_number and not integers and not _fits_float32(x):
                raise PromptError(f"{name} {wanted}, as float32 (from {SMALLEST:.3g} to {LARGEST:.3g}); got {x!r}")
            if not is_number or not fits(x):
                raise PromptError(f"{name} {wanted}; got {x!r}")
        if not rows:
            raise PromptError(f"{name} is a number, or one a row; got {value!r}")
        return np.asarray(rows, np.int64 if integers else np.float32)

    def _biases(self) -> list[Mapping[int, float]]:
        """The biases of all rows, or one mapping for each."""
        value = self.logit_bias
        rows = [value] if value is None or isinstance(value, Mapping) or not np.iterable(value) else list(value)
        return [{} if biases is None else biases for biases in rows]

    @property
    def _draws(self) -> np.ndarray:
        """Whether the token of each row is drawn, bool [rows]."""
        return (self._values("temperature") > 0) & (self._values("top_k") > 1)

    @functools.cached_property
    def static(self) -> Steps:
        """The steps that the options need, for which a program is compiled."""
        differs = lambda name: getattr(self, name) is not None and bool((self._values(name) != _RANGES[name][0]).any())
        draws = bool(self._draws.any())
        return Steps(
            draws=draws,
            greedy=not self._draws.all(),
            top_k=draws and differs("top_k"),
            top_p=draws and differs("top_p"),
            min_p=draws and differs("min_p"),
            repetition=differs("repetition_penalty"),
            counts=differs("presence_penalty") or differs("frequency_penalty"),
            bias=any(self._biases()),
        )

    def traced(self, batch: int, vocab: int) -> dict[str, np.ndarray]:
        """The numbers that may change from call to call without a new compilation: each is [batch, 1], seeds are uint32
        [batch], biases float32 [1, vocab] or [batch, vocab].

        Raises:
          PromptError: an option has another number of rows than the batch, or a bias names no token.
        """
        steps = self.static
        wanted = ["temperature", "seed"] if steps.draws else []
        wanted += [name for name in ("top_k", "top_p", "min_p") if getattr(steps, name)]
        wanted += ["repetition_penalty"] if steps.repetition else []
        wanted += ["presence_penalty", "frequency_penalty"] if steps.counts else []
        rows = self.rows(batch)
        numbers = {name: rows[name] for name in wanted}
        if steps.bias:
            numbers["bias"] = self._table(batch, vocab)
        return numbers

    def rows(self, batch: int) -> dict[str, np.ndarray]:
        """The numbers of every option but biases, [batch, 1], seeds uint32 [batch]: the temperature is 0 if a row is
        greedy, and top_p is above all sums if it keeps every token, since a rounded sum of all probabilities may be
        less than 1 or reach it early.

        Raises:
          PromptError: an option has another number of rows than the batch.
        """
        numbers = {}
        for name in _RANGES:
            values = _of_rows(name, self._values(name), batch)
            if name == "seed":
                first = np.arange(batch) if np.ndim(self.seed) == 0 else 0
                numbers[name] = ((values + first) & 0xFFFFFFFF).astype(np.uint32)
            else:
                numbers[name] = values.astype(np.int32 if name == "top_k" else np.float32)[:, None]
        numbers["temperature"] = numbers["temperature"] * _of_rows("temperature", self._draws, batch)[:, None]
        numbers["top_p"] = np.where(numbers["top_p"] == 1, np.float32(2), numbers["top_p"])
        return numbers

    def _table(self, batch: int, vocab: int) -> np.ndarray:
        rows = self._biases()
        if len(rows) not in (1, batch):
            raise PromptError(f"logit_bias is one mapping, or one a row; got {len(rows)} for {batch} rows")
        table = np.zeros((len(rows), vocab), np.float32)
        for row, biases in zip(table, rows, strict=True):
            for token, bias in biases.items():
                if not 0 <= token < vocab:
                    raise PromptError(f"logit_bias names the token {token}, outside the vocabulary of {vocab} tokens")
                row[token] = bias
        return table


def _check_biases(biases) -> None:
    if not isinstance(biases, Mapping):
        raise PromptError(f"logit_bias is a mapping from token ids to numbers, or one a row; got {biases!r}")
    for token, bias in biases.items():
        number = isinstance(bias, REAL) and not isinstance(bias, bool)
        number = number and (bias == -math.inf or _fits_float32(bias))
        if isinstance(token, bool) or not isinstance(token, int | np.integer) or not number:
            raise PromptError(
                f"logit_bias maps token ids to numbers below infinity, as float32 (from {SMALLEST:.3g} to "
                f"{LARGEST:.3g}); got {token!r}: {bias!r}"
            )


def _fits_float32(x) -> bool:
    """Whether a number is 0 or a normal float32: devices compute with float32 and take subnormal numbers for 0."""
    try:
        size = abs(float(x))
    except OverflowError:  # an int of hundreds of digits
        return False
    return size == 0 or SMALLEST <= size <= LARGEST


def _of_rows(name: str, values: np.ndarray, batch: int) -> np.ndarray:
    if len(values) not in (1, batch):
        raise PromptError(f"{name} is one value, or one a row; got {len(values)} for {batch} rows")
    if len(values) == batch:
        return values
    return np.broadcast_to(values, (batch,))


def begin(ids, lengths, vocab: int, steps: Steps) -> dict[str, jax.Array]:
    """What penalties know of each row behind its prompt, the first `lengths` [batch] of ids int32 [batch, length]:
    "seen", bool [batch, vocab], the tokens of prompt and answer; "counts", int32 [batch, vocab], how often each token
    stands in the answer. It has only what the steps need."""
    state = {}
    if steps.repetition:
        real = jnp.arange(ids.shape[1], dtype=jnp.int32)[None, :] < lengths[:, None]
        rows = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]
        state["seen"] = jnp.zeros((ids.shape[0], vocab), bool).at[rows, ids].max(real)
    if steps.counts:
        state["counts"] = jnp.zeros((ids.shape[0], vocab), jnp.int32)
    return state


def noted(state: dict[str, jax.Array], tokens, real=None) -> dict[str, jax.Array]:
    """The state after one more token a row, tokens int32 [batch]; `real`, bool [batch]: the rows that took theirs
    (default: all)."""
    rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    real = jnp.ones(tokens.shape, bool) if real is None else real
    adds = {
        "seen": lambda x: x.at[rows, tokens].max(real),
        "counts": lambda x: x.at[rows, tokens].add(real.astype(x.dtype)),
    }
    return {name: adds[name](x) for name, x in state.items()}


def choose(logits, step, steps: Steps, numbers: dict[str, jax.Array], state: dict[str, jax.Array]):
    """The next token, int32 [batch], for logits float32 [batch, vocab], or `Shares` of them; for rows with NaN it is
    the number `vocab`, which is no token: the host sees it, and the device does nothing more for it. `step` (int32, or
    [batch] of them) is how many tokens were made so far, `numbers` come from `Sampling.traced`, `state` from `begin`
    and `noted`."""
    if isinstance(logits, Shares):
        if steps == Steps():
            return logits.largest()
        logits = logits.whole()
    logits = _adjusted(logits, steps, numbers, state)
    if not steps.draws:
        return _argmax(logits)
    temperature = numbers["temperature"]
    # The largest logit becomes 0, so that no temperature makes two of them infinite; -inf alone stays as it is.
    top = jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), jnp.finfo(logits.dtype).min)
    drawn = _draw((logits - top) / jnp.where(temperature > 0, temperature, 1.0), step, steps, numbers)
    return jnp.where(temperature[:, 0] > 0, drawn, _argmax(logits)) if steps.greedy else drawn


def log_probability(logits, tokens):
    """The log-probability, float32 [...], of tokens int32 [...] under the model's own logits [..., vocab], before any
    option."""
    at = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return at - jax.nn.logsumexp(logits, axis=-1)


def _adjusted(logits, steps: Steps, numbers, state):
    if steps.bias:
        logits = logits + numbers["bias"]
    if steps.repetition:
        penalty = numbers["repetition_penalty"]
        logits = jnp.where(state["seen"], jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    if steps.counts:
        counts = state["counts"].astype(jnp.float32)
        logits = logits - numbers["frequency_penalty"] * counts
        logits = logits - numbers["presence_penalty"] * (counts > 0).astype(jnp.float32)
    if steps.bias or steps.repetition or steps.counts:  # sums of numbers near the largest float may be infinite
        logits = jnp.minimum(logits, jnp.finfo(logits.dtype).max)
    return logits


def _draw(logits, step, steps: Steps, numbers):
    """Draws a token for each row, by its own key, out of those that are left."""
    if steps.top_k:
        k = jnp.minimum(numbers["top_k"], logits.shape[-1]).astype(jnp.float32)
        logits = _heaviest(logits, jnp.ones_like(logits), k)
    if steps.top_p:
        logits = _heaviest(logits, jax.nn.softmax(logits, axis=-1), numbers["top_p"])
    if steps.min_p:
        bound = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(numbers["min_p"])
        logits = jnp.where(logits >= bound, logits, -jnp.inf)
    step = jnp.broadcast_to(step, logits.shape[:1])
    noise = jax.vmap(lambda seed, step: _noise(seed, step, logits.shape[-1]))(numbers["seed"], step)
    return _argmax(logits + noise)


def _noise(seed, step, vocab: int):
    """Gumbel noise [vocab] of one row: the largest of logits with it is a draw from their softmax."""
    return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), step), (vocab,), jnp.float32)


def _argmax(logits):
    """The first largest entry of each row, or the number of entries where one is NaN, which comparisons do not find."""
    found = ops.argmax(logits)
    top = jnp.take_along_axis(logits, found[:, None], axis=1)[:, 0]
    return jnp.where(jnp.isnan(top), jnp.int32(logits.shape[-1]), found)


def _heaviest(logits, weights, enough):
    """The logits, -inf outside of the smallest set of most likely tokens whose `weights` [batch, vocab] sum to `enough`
    [batch, 1].

    The smallest logit of the set is found digit by digit, without a sort of the vocabulary. Tokens of equal logits
    enter together, so that the set does not depend on their order.
    """
    bits = jax.lax.bitcast_convert_type(logits, jnp.int32)
    sign = jnp.int32(-(2**31))
    order = jax.lax.bitcast_convert_type(jnp.where(bits < 0, ~bits, bits ^ sign), jnp.uint32)  # ordered as the floats
    width = DIGIT["host" if on_host() else "device"]
    digits = jnp.arange(1, 1 << width, dtype=jnp.uint32)[None, :]

    def settle(i, low):  # the largest bound so far, [batch, 1], of the tokens from which on there are enough
        shift = (32 - width * (i + 1)).astype(jnp.uint32)
        bounds = low + jax.lax.shift_left(digits, jnp.broadcast_to(shift, digits.shape))
        above = jnp.where(order[:, None, :] >= bounds[:, :, None], weights[:, None, :], 0.0).sum(-1)
        digit = (above >= enough).sum(-1, keepdims=True).astype(jnp.uint32)
        return low + jax.lax.shift_left(digit, jnp.broadcast_to(shift, digit.shape))

    low = jax.lax.fori_loop(0, 32 // width, settle, jnp.zeros((logits.shape[0], 1), jnp.uint32))
    return jnp.where(order >= low, logits, -jnp.inf)
