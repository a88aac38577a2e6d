"""Tensor parallelism, on the CPU with gloo."""
