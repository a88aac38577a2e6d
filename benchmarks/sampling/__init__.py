"""Correctness and time of the sampling kernels: `python -m benchmarks sampling`."""
