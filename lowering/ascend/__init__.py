"""The back end for Ascend NPUs: Tile IR to TTIR, by triton-adapter-opt to linalg, by bishengir-compile to HIVM.

Both are tools of the vendor that the user installs (`make ascend-tools`); nothing of theirs is part of jtile. What
comes out is checked as far as the open half of the vendor's compiler goes, and was never run on an NPU."""
