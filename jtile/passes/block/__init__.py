"""From tile level to block level, and passes on kernels at block level."""
