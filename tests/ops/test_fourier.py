"""Fourier transforms of any length against the matrix of the transform, and NumPy's of real numbers."""

import jax
import numpy as np
import pytest
from library import agree, gradients_agree, normal

import jtile as jt
from jtile import ops
from jtile.errors import KernelTypeError, KernelValueError
from jtile.ops import fourier
from jtile.testing import relative_error
from jtile.testing.evaluate import evaluated


def complexes(seed, *shape):
    return jax.device_put((np.asarray(normal(seed, *shape)) + 1j * np.asarray(normal(seed + 1, *shape))).astype("c8"))


@pytest.mark.parametrize(
    ("n", "arch"),
    [(1, None), (12, None), (13, None), (34, None), (64, None), (2, "sm_90"), (30, "sm_90"), (64, "sm_90")],
)
def test_lengths(n, arch):
    """Powers of two, small primes and their products, and a prime that is too large."""
    with jt.config(arch=arch):
        x = complexes(n, 3, n)
        agree(ops.fft, fourier.fft_reference, x, tolerance=1e-6, interpret=arch is None and n == 12)
        if n != 64:
            agree(ops.ifft, fourier.ifft_reference, x, tolerance=1e-6)


@pytest.mark.parametrize(("n", "arch"), [(2, None), (9, "sm_90"), (24, None)])
def test_real_numbers(n, arch):
    with jt.config(arch=arch):
        x = normal(n, 2, n, 3)
        agree(lambda x: ops.rfft(x, 1), lambda x: fourier.rfft_reference(x, 1), x, tolerance=1e-6)
        z = np.fft.rfft(np.asarray(x), axis=1).astype("c8") + np.complex64(0.1j)
        got = evaluated(lambda z: ops.irfft(z, n, 1))(z)
        assert got.dtype == np.float32 and relative_error(got, np.fft.irfft(z, n, 1)) < 1e-6


def test_two_passes(monkeypatch):
    monkeypatch.setattr(fourier, "_LONGEST", (8, 8))
    agree(ops.fft, fourier.fft_reference, complexes(0, 2, 60), tolerance=1e-6)


def test_derivatives_and_maps():
    x = normal(0, 3, 12)
    both = lambda f: lambda x: (f(x).real, f(x).imag)
    gradients_agree(both(ops.rfft), both(fourier.rfft_reference), x)
    z = complexes(3, 4, 3, 12)
    agree(jax.vmap(ops.fft), fourier.fft_reference, z, tolerance=1e-6)
    pushed = lambda f: lambda z: jax.jvp(f, (z,), (z * np.complex64(2j),))[1]
    agree(pushed(ops.ifft), pushed(fourier.ifft_reference), z[0], tolerance=1e-6)
    squares = lambda f: jax.grad(lambda z: (abs(f(z, 0)) ** 4).sum())
    agree(squares(ops.fft), squares(fourier.fft_reference), z[0], tolerance=1e-5)


def test_errors():
    for error, match, call in [
        (KernelTypeError, "complex64", lambda: ops.fft(np.zeros(4, np.int32))),
        (KernelTypeError, "is an array", lambda: ops.ifft([1.0])),
        (KernelTypeError, "float array", lambda: ops.rfft(np.zeros(4, np.complex64))),
        (KernelValueError, "no axis", lambda: ops.fft(np.zeros(4, np.float32), 1)),
        (KernelValueError, "no elements", lambda: ops.fft(np.zeros((2, 0), np.float32))),
        (KernelValueError, "n is 6 or 7", lambda: ops.irfft(np.zeros(4, np.complex64), 9)),
    ]:
        with pytest.raises(error, match=match):
            call()


def test_what_is_left_to_xla():
    """Many numbers, on NVIDIA's GPUs: cuFFT was two to four times as quick."""
    x = jax.ShapeDtypeStruct((1024, 1024), np.float32)
    for arch, kernels in (("sm_90", False), ("gfx942", True)):
        for transform in (ops.fft, ops.ifft, ops.rfft):
            with jt.config(arch=arch):
                assert ("jtile_call" in str(jax.make_jaxpr(lambda x, f=transform: f(x))(x))) == kernels
