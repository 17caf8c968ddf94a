if not __name__.startswith("jtile."):
    raise ImportError("import jtile.lowering, not lowering: this folder is part of the jtile package")
