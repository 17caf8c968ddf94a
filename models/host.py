"""Where kernels run."""

import jtile as jt


def on_host() -> bool:
    """Whether kernels run on the processors of the host, which reads what they have written without a copy."""
    return "host" in jt.target().features
