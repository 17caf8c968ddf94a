"""Choosing the next token from logits inside the jitted step: greedy, temperature, top-k and top-p."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from jtile._errors import PromptError

BISECTIONS = 40  # of the nucleus' probability threshold: 2^-40 of the largest probability is below float32's steps


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    temperature: 0 takes the most likely token; larger values flatten the distribution.
    top_k: only the k most likely tokens; None for all. top_p: only the smallest set of most likely tokens whose
    probabilities (after top_k) sum to at least p; None for all. seed: equal seeds give equal tokens.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self):
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise PromptError(f"temperature must be 0 (greedy) or a positive number, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise PromptError(f"top_k must be at least 1, got {self.top_k}; leave it out to sample from all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise PromptError(f"top_p must be in (0, 1], got {self.top_p}; leave it out to sample from all tokens")
        if not -(2**31) <= self.seed < 2**32:
            raise PromptError(f"seed must fit 32 bits, got {self.seed}")

    @property
    def static(self) -> tuple[bool, int | None, bool]:
        """What decides the compiled program: (greedy, top_k, whether there is a nucleus)."""
        greedy = self.temperature == 0 or self.top_k == 1
        return greedy, None if greedy else self.top_k, not greedy and self.top_p is not None and self.top_p < 1

    def traced(self) -> dict[str, jax.Array]:
        """The numbers that may change from call to call without a new compilation."""
        return {
            "temperature": jnp.float32(self.temperature or 1.0),
            "top_p": jnp.float32(self.top_p or 1.0),
            "key": jax.random.key(self.seed & 0xFFFFFFFF),
        }


def choose(logits, step, static: tuple[bool, int | None, bool], numbers: dict[str, jax.Array]):
    """The next token, int32 [batch], for logits float32 [batch, vocab]; `step` (int32) is how many were made so far."""
    greedy, top_k, nucleus = static
    if greedy:
        return _argmax(logits)
    logits = logits / numbers["temperature"].reshape(1, 1)
    if top_k is not None and top_k < logits.shape[-1]:
        smallest = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits >= smallest, logits, -jnp.inf)
    if nucleus:
        logits = _keep_nucleus(logits, numbers["top_p"])
    return jax.random.categorical(jax.random.fold_in(numbers["key"], step), logits, axis=-1).astype(jnp.int32)


def _argmax(logits):
    """The first largest entry of each row; XLA makes scalar code of jnp.argmax (225 us for 49152 entries, this 40)."""
    last = logits.shape[-1] - 1
    columns = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    top = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.min(jnp.where(logits >= top, columns, last), axis=-1)


def _keep_nucleus(logits, top_p):
    """-inf outside the nucleus, whose smallest probability is found by bisection: no sort of the vocabulary.

    Tokens of equal probability enter together, so that the nucleus does not depend on the order of the vocabulary.
    """
    probabilities = jax.nn.softmax(logits, axis=-1)

    def halve(_, bounds):
        low, high = bounds  # the nucleus {p >= low} weighs at least top_p, {p >= high} less
        middle = (low + high) / 2
        mass = jnp.sum(jnp.where(probabilities >= middle, probabilities, 0.0), axis=-1, keepdims=True)
        enough = mass >= top_p.reshape(1, 1)
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    largest = jnp.max(probabilities, axis=-1, keepdims=True)
    top_fits = largest * jnp.sum((probabilities >= largest).astype(jnp.float32), axis=-1, keepdims=True)
    low, _ = jax.lax.fori_loop(0, BISECTIONS, halve, (jnp.zeros_like(largest), largest))
    low = jnp.where(top_fits >= top_p.reshape(1, 1), largest, low)
    return jnp.where(probabilities >= low, logits, -jnp.inf)
