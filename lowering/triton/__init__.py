"""The GPU back end: Tile IR to TTIR text to a cubin (NVIDIA) or an hsaco (AMD), by the stages of the triton package.
No GPU is needed; triton is imported when the first kernel is compiled."""
