if not __name__.startswith("jtile."):
    raise ImportError("import jtile.ffi, not ffi: this folder is part of the jtile package")
