"""The modes of attention that its tests go through, forwards and backwards."""

import jax.numpy as jnp
from library import normal

OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 50},
    "two-sided": {"window": 30},
    "left": {"window": (7, None)},
    "right": {"window": (None, 3)},
    "softcap": {"softcap": 5.0, "scale": 0.3},
    "lengths": {"lengths": (150, 0)},
    "offsets": {"causal": True, "offsets": (200, 3)},
    "all": {"causal": True, "offsets": (200, 3), "lengths": (260, 2), "window": 100, "softcap": 20.0},
}


def operands(batch, t, s, heads, groups, d, dtype="float32"):
    return normal(0, batch, t, heads, d, dtype=dtype), *(normal(k, batch, s, groups, d, dtype=dtype) for k in (1, 2))


def of_batch(options, batch):
    return {k: jnp.array(v[:batch], jnp.int32) if k in ("lengths", "offsets") else v for k, v in options.items()}
