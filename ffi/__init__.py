"""jtile's FFI library: the native code that loads compiled kernels and runs them inside XLA programs.

`import jtile` registers the targets (`register_early`), so that exported and serialised programs run in a process that
lowers no kernel. That loads the library, in less than a millisecond, and initialises no backend.
"""

if not __name__.startswith("jtile."):
    raise ImportError("import jtile.ffi, not ffi: this folder is part of the jtile package")

from ._library import FfiError as FfiError
from ._library import images_alive as images_alive
from ._library import images_loaded as images_loaded
from ._library import library_path as library_path
from ._library import modules_alive as modules_alive
from ._library import modules_loaded as modules_loaded
from ._library import reach as reach
from ._register import register as register
from ._register import register_early as register_early
from ._run import LoadedImage as LoadedImage
from ._run import check_isa as check_isa
from ._run import link_image as link_image
from ._run import run_image as run_image
