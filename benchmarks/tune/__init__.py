"""The search for the attention kernels' block shapes: `python -m benchmarks tune`."""
