"""jtile's FFI library: the native code that loads compiled kernels and runs them inside XLA programs.

Nothing is loaded or registered at import. `register` does both, once, when the first kernel is lowered.
"""

if not __name__.startswith("jtile."):
    raise ImportError("import jtile.ffi, not ffi: this folder is part of the jtile package")

from jtile.ffi._library import FfiError as FfiError
from jtile.ffi._library import images_alive as images_alive
from jtile.ffi._library import images_loaded as images_loaded
from jtile.ffi._library import library_path as library_path
from jtile.ffi._register import TARGET_CPU as TARGET_CPU
from jtile.ffi._register import register as register
from jtile.ffi._run import LoadedImage as LoadedImage
from jtile.ffi._run import check_isa as check_isa
from jtile.ffi._run import link_image as link_image
from jtile.ffi._run import run_image as run_image
