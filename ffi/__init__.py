"""jtile's FFI library: the native code that loads compiled kernels and runs them inside XLA programs.

`import jtile` registers the targets (`register_early`), so that exported and serialised programs run in a process that
lowers no kernel. That loads the library, in less than a millisecond, and initialises no backend.
"""

if not __name__.startswith("jtile."):
    raise ImportError("import jtile.ffi, not ffi: this folder is part of the jtile package")

from jtile.ffi._library import FfiError as FfiError
from jtile.ffi._library import images_alive as images_alive
from jtile.ffi._library import images_loaded as images_loaded
from jtile.ffi._library import library_path as library_path
from jtile.ffi._library import modules_alive as modules_alive
from jtile.ffi._library import modules_loaded as modules_loaded
from jtile.ffi._register import TARGET_CPU as TARGET_CPU
from jtile.ffi._register import TARGET_CUDA as TARGET_CUDA
from jtile.ffi._register import TARGET_CUDA_IO as TARGET_CUDA_IO
from jtile.ffi._register import TARGET_ROCM as TARGET_ROCM
from jtile.ffi._register import TARGET_ROCM_IO as TARGET_ROCM_IO
from jtile.ffi._register import TARGETS as TARGETS
from jtile.ffi._register import register as register
from jtile.ffi._register import register_early as register_early
from jtile.ffi._run import LoadedImage as LoadedImage
from jtile.ffi._run import check_isa as check_isa
from jtile.ffi._run import link_image as link_image
from jtile.ffi._run import run_image as run_image
