"""Small, awkward arguments for ops of the library that came after `library_cases`: what compiles, and every transform.

`library_cases` is the table of the page about transforms, whose checks cost seconds an op. What is here compiles for
GPUs in every run of the tests, too, and is checked under every transform among the slow ones.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from ascend_numbers import CASES as OTHERS
from library_cases import POSITIVE, LibraryCase, case, f, floats

from jtile import ops
from jtile.ops import bodies, fourier, images, native_sparse, sampling, sparse_products, two_of_four
from jtile.ops.argmax import argmax_reference
from jtile.ops.index_scores import index_scores_reference
from jtile.ops.latent_selected import mla_selected_reference

STARTS, COLUMNS = np.array([0, 2, 2, 5, 7], np.int32), np.array([3, 0, 1, 4, 2, 4, 1], np.int32)
KEY = np.array([0, 7], np.uint32)


def sparse(run):
    return lambda data, b: run(data, COLUMNS, STARTS, b)


def two_of(run):
    codes = ops.sparse24(floats(6, 16)).codes
    return lambda x, values: run(x, ops.Sparse24Tensor(values, codes))


def parts(run):
    """A complex transform as pairs of real numbers."""

    def pairs(real, imaginary):
        y = run(jax.lax.complex(real, imaginary))
        return y.real, y.imag

    return pairs


def halves(run):
    return lambda x: (run(x).real, run(x).imag)


def scored(run):
    return lambda *args: run(*args, block=4, stride=2, keys=4, count=2, window=5)


def finite(run):
    """Scores of keys that a token does not see are -inf, which no difference of results can hold."""

    def scores(q, keys, weights):
        y = run(q, keys, weights, np.array([9, 4], np.int32))
        return jnp.where(jnp.isfinite(y), y, jnp.zeros((), y.dtype))

    return scores


def listed(run):
    places = np.array([[[6, 0, 3, 8], [1, 8, 2, 0]], [[2, 0, 1, 7], [3, 5, 4, 6]]], np.int32)
    return lambda q, cache: run(q, cache, places, np.array([[4, 3], [0, 1]], np.int32), rank=6)


def drawn(run):
    return lambda logits: run(logits, jax.random.wrap_key_data(jnp.asarray(KEY)), p=0.8)


LONG = ("native_sparse_attention",)  # takes long to compile
NEWER: dict[str, LibraryCase] = {
    "csr_matmul": case(sparse(ops.csr_matmul), sparse(sparse_products.csr_matmul_reference), f(7), f(5, 6)),
    "bsr_matmul": case(sparse(ops.bsr_matmul), sparse(sparse_products.bsr_matmul_reference), f(7, 2, 3), f(15, 6)),
    "sparse24_matmul": case(
        two_of(ops.sparse24_matmul), two_of(two_of_four.sparse24_matmul_reference), f(3, 16), f(6, 4, 2)
    ),
    "fft": case(parts(ops.fft), parts(fourier.fft_reference), f(3, 12), f(3, 12, seed=1), tolerance=1e-6),
    "rfft": case(halves(ops.rfft), halves(fourier.rfft_reference), f(3, 12), tolerance=1e-6),
    "n_body": case(
        ops.n_body, bodies.n_body_reference, f(5, 3), f(5, **POSITIVE), meta={"softening": 0.5},
        derivative_tolerance=1e-5,
    ),
    "index_scores": case(
        finite(ops.index_scores), finite(index_scores_reference), f(2, 2, 3, 4), f(2, 9, 4, seed=1), f(2, 2, 3, seed=2),
        skip={"numeric": "the score of a head has a kink at zero"},
    ),
    "mla_selected": case(
        listed(ops.mla_selected), listed(mla_selected_reference), f(2, 2, 3, 8), f(2, 9, 8, seed=1)
    ),
    "argmax": case(ops.argmax, argmax_reference, f(3, 17)),
    "sample_top_p": case(drawn(ops.sample_top_p), drawn(sampling.sample_top_p_reference), f(3, 17, low=-4, high=4)),
    "bilateral_filter": case(
        ops.bilateral_filter, images.bilateral_filter_reference, f(6, 7), meta={"space": 1.0, "level": 1.0}
    ),
    "resize": case(
        ops.resize, images.resize_reference, f(5, 7, 2), meta={"shape": (8, 4, 2)}
    ),
    "native_sparse_attention": case(
        scored(ops.native_sparse_attention), scored(native_sparse.native_sparse_attention_reference),
        f(1, 12, 2, 4), f(1, 12, 1, 4, seed=1), f(1, 12, 1, 4, seed=2), f(1, 12, 2, 3, **POSITIVE),
    ),
}  # fmt: skip
EMPTY = {"skip": {"numeric": "a segment without rows is -inf"}}
MAXIMA = dataclasses.replace(OTHERS["segment_max"], options=OTHERS["segment_max"].options | EMPTY)
CASES: dict[str, LibraryCase] = OTHERS | {"segment_max": MAXIMA} | NEWER
