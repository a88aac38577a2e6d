"""Time of whole rounds: `python -m benchmarks round`."""
