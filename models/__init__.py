if not __name__.startswith("jtile."):
    raise ImportError("import jtile.models, not models: this folder is part of the jtile package")
