"""`jtile_call`, the one JAX primitive behind every kernel: its parameter, its rules, its lowering to custom calls."""
