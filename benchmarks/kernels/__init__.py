"""Correctness and time of every attention kernel: `python -m benchmarks kernels`."""
