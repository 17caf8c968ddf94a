"""The kernel library: functions over arrays, each with a reference in its module (`softmax`,
`softmax_reference`).

Every function takes any leading axes and float dtypes, computes in float32 where it does not say otherwise, raises
typed errors, and runs inside `jax.jit`. The kernels stand in the modules too (`jtile.ops.softmaxes:softmax_rows`);
`choices` says which of them a call takes, and why not others. What letters mean in all of them, such as `i` and `X`, is
said in docs/extending.md, under "Names in kernels".
"""

import jtile as _jt
from jtile.ops import collectives as collectives
from jtile.ops.activations import geglu as geglu
from jtile.ops.activations import swiglu as swiglu
from jtile.ops.argmax import argmax as argmax
from jtile.ops.bodies import n_body as n_body
from jtile.ops.convolutions import convolution as convolution
from jtile.ops.convolutions import convolution_transpose as convolution_transpose
from jtile.ops.dispatch import Choice as Choice
from jtile.ops.dispatch import choices as choices
from jtile.ops.elementwise import bias_gelu_residual as bias_gelu_residual
from jtile.ops.embeddings import embedding as embedding
from jtile.ops.filters import dilate as dilate
from jtile.ops.filters import erode as erode
from jtile.ops.filters import separable_filter as separable_filter
from jtile.ops.filters import stencil as stencil
from jtile.ops.flash_attention import attention as attention
from jtile.ops.fourier import fft as fft
from jtile.ops.fourier import ifft as ifft
from jtile.ops.fourier import irfft as irfft
from jtile.ops.fourier import rfft as rfft
from jtile.ops.gated_mlp import gated_mlp as gated_mlp
from jtile.ops.grouped_matmul import grouped_matmul as grouped_matmul
from jtile.ops.histograms import histogram as histogram
from jtile.ops.images import bilateral_filter as bilateral_filter
from jtile.ops.images import resize as resize
from jtile.ops.index_scores import index_scores as index_scores
from jtile.ops.latent_attention import mla_decode as mla_decode
from jtile.ops.latent_prefill import mla_attention as mla_attention
from jtile.ops.latent_selected import mla_selected as mla_selected
from jtile.ops.layout import transpose as transpose
from jtile.ops.linear_attention import linear_attention as linear_attention
from jtile.ops.linear_losses import linear_cross_entropy as linear_cross_entropy
from jtile.ops.losses import cross_entropy as cross_entropy
from jtile.ops.matmul import matmul as matmul
from jtile.ops.native_sparse import native_sparse_attention as native_sparse_attention
from jtile.ops.normed_products import rms_norm_gated_mlp as rms_norm_gated_mlp
from jtile.ops.normed_products import rms_norm_matmul as rms_norm_matmul
from jtile.ops.norms import layer_norm as layer_norm
from jtile.ops.norms import rms_norm as rms_norm
from jtile.ops.optimizers import AdamState as AdamState
from jtile.ops.optimizers import adam as adam
from jtile.ops.optimizers import adam_init as adam_init
from jtile.ops.optimizers import adamw as adamw
from jtile.ops.optimizers import newton_schulz as newton_schulz
from jtile.ops.quantized import quantized_matmul as quantized_matmul
from jtile.ops.quantized_tensor import QuantizedTensor as QuantizedTensor
from jtile.ops.quantizing import from_gguf_blocks as from_gguf_blocks
from jtile.ops.quantizing import quantize as quantize
from jtile.ops.rotary import rope as rope
from jtile.ops.routed_matmul import routed_matmul as routed_matmul
from jtile.ops.routed_matmul import routes_unsorted as routes_unsorted
from jtile.ops.routing import route as route
from jtile.ops.rwkv import rwkv7 as rwkv7
from jtile.ops.sampling import sample_top_p as sample_top_p
from jtile.ops.scaled_matmul import scaled_matmul as scaled_matmul
from jtile.ops.scans import cumsum as cumsum
from jtile.ops.segments import segment_max as segment_max
from jtile.ops.segments import segment_mean as segment_mean
from jtile.ops.segments import segment_min as segment_min
from jtile.ops.segments import segment_sum as segment_sum
from jtile.ops.softmaxes import log_softmax as log_softmax
from jtile.ops.softmaxes import softmax as softmax
from jtile.ops.sorting import argsort as argsort
from jtile.ops.sorting import sort as sort
from jtile.ops.sorting import top_k as top_k
from jtile.ops.sparse_attention import block_sparse_attention as block_sparse_attention
from jtile.ops.sparse_products import bsr_matmul as bsr_matmul
from jtile.ops.sparse_products import csr_matmul as csr_matmul
from jtile.ops.split_attention import decode_attention as decode_attention
from jtile.ops.state_space import selective_scan as selective_scan
from jtile.ops.state_space import ssd as ssd
from jtile.ops.stencils import stencil_2d as stencil_2d
from jtile.ops.thresholds import largest as largest
from jtile.ops.two_of_four import Sparse24Tensor as Sparse24Tensor
from jtile.ops.two_of_four import sparse24 as sparse24
from jtile.ops.two_of_four import sparse24_matmul as sparse24_matmul

_OF_NUMBERS = ("choices", "from_gguf_blocks", "quantize", "routes_unsorted", "sparse24")  # what a format is made by


def _take_marks(names: dict[str, object]) -> None:
    """Let every function of the library take arrays with marks of `jt.dynamic`."""
    for name, value in list(names.items()):
        if not name.startswith("_") and name not in _OF_NUMBERS and callable(value) and not isinstance(value, type):
            names[name] = marked = _jt.takes_marks(value)
            marked.__module__ = __name__  # where pickle finds it: in its own module stands the function that it calls


_take_marks(globals())
