"""What is AMD's own: TTIR is that of `lowering/triton`, in pointer form; here its machine code is read."""
