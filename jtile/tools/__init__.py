"""The command line `jtile` and what stands behind it. Nothing else in jtile imports this package."""
