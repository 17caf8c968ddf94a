"""`python -m benchmarks serve`: an engine and servers under load: tokens a second, and how long clients wait."""
