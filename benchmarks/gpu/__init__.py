"""`python -m benchmarks gpu`: jtile's kernels on a GPU against what JAX and torch users have there."""

WORKLOADS = (
    "gemm", "gemv", "fp8", "grouped", "attention", "backward", "decode", "mla", "mla_prefill", "rows", "losses",
    "gated", "quantized", "launch", "llm", "gradients", "recurrences",
    "flex", "dropout", "zoo", "fuse",
)  # fmt: skip
ONLY = ("tutorial", "choices", "numpy")  # these run only if they are asked for by name
