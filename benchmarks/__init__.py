"""Speeds of jtile's kernels against their peers: `python -m benchmarks cpu`."""
