"""`jt.fuse`: array programs become tile kernels by themselves.

A function of `jax.numpy` is traced; its jaxpr is cut into groups (`groups`), each becomes one kernel (`bodies`), and
the other equations stay XLA's. `layout` says which axes the values of a group share, `costs` what a kernel is worth.
"""

from .fused import Explanation, Fused, fuse

__all__ = ["Explanation", "Fused", "fuse"]
