"""The families of the soak: `FAMILIES[name](draw)` is one random call of an op whose kernels run at the block level on
Hopper, now and then one that has to stay at tile level."""

from __future__ import annotations

from collections.abc import Callable

from soak import Case, Draw
from soak_attention import (
    attention,
    attention_gradients,
    attention_saved,
    decode,
    latent_decode,
    latent_gradients,
    latent_prefill,
    mixed,
)
from soak_convolutions import convolutions
from soak_products import (
    few_rows,
    gated,
    grouped,
    grouped_gradients,
    long_sums,
    products,
    products_of_bytes,
    quantized_products,
    quantized_rows,
    scaled_products,
)

# New ones go to the end: a family's number is the seed of its shapes.
FAMILIES: dict[str, Callable[[Draw], Case]] = {
    f.__name__: f
    for f in (
        products, products_of_bytes, scaled_products, few_rows, gated, grouped, grouped_gradients, attention,
        attention_saved, attention_gradients, decode, latent_decode, latent_prefill, latent_gradients, quantized_rows,
        quantized_products, long_sums, mixed, convolutions,
    )
}  # fmt: skip
