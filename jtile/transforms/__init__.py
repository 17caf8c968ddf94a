"""Kernel in, kernel out: differentiation, batching and partition of kernels. Empty until the transforms release."""
