"""The programs of docs/examples as modules."""

import importlib.util
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent.parent / "docs" / "examples"


def example(name):
    """Registered as a dataclass needs it."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
