"""Small kernels with a search space."""

import numpy as np

import jtile as jt

SPACE = {"bm": [4, 16, 64], "num_warps": [4, 8]}


def double_kernel(**options):
    @jt.autotune(space=SPACE, **options)
    @jt.kernel(out_type=lambda x, **_: jt.like(x), grid=lambda x, *, bm, **_: jt.cdiv(x.shape[0], bm))
    def double(x, y, *, bm=2, plus=0.0):
        i = jt.program_id(0)
        y.tiles(bm)[i] = x.tiles(bm)[i] * 2.0 + plus

    return double


def choosy_kernel():
    """A kernel whose author refuses some tiles of its own space."""

    @jt.autotune(space={"bm": [4, 16, 48]})
    @jt.kernel(out_type=lambda x, **_: jt.like(x), grid=lambda x, *, bm, **_: jt.cdiv(x.shape[0], bm))
    def copy(x, y, *, bm=8):
        assert x.shape[0] % bm == 0, f"tiles of {bm}"
        y.tiles(bm)[jt.program_id(0)] = x.tiles(bm)[jt.program_id(0)]

    return copy


def slow_kernel(space):
    """`turns` says how often the same is computed; results of odd numbers of turns are wrong."""

    @jt.autotune(space=space)
    @jt.kernel(out_type=lambda x, **_: jt.like(x), grid=lambda x, **_: x.shape[0])
    def slow(x, y, *, turns=600):
        i = jt.program_id(0)
        t = x[i, :]
        for _ in jt.range(turns):
            t = 1.0 - t
        y[i, :] = t

    return slow


X = np.arange(64, dtype=np.float32)
