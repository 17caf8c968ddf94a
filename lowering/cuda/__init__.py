"""What is NVIDIA's own: the table of its architectures, its targets, and the record of its platform. Code is made by
`lowering/triton`."""
