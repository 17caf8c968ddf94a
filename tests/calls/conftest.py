"""How these tests call a kernel."""

import pytest


@pytest.fixture(params=("native", "interpreter"))
def run(request):
    """Calls a kernel natively or in the interpreter."""
    return lambda k, *args, **meta: k.with_options(interpret=request.param == "interpreter")(*args, **meta)
