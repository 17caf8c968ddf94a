"""Kernel in, kernel out: differentiation, batching and partition of kernels."""
