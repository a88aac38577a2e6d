"""Everything that measures: `python -m benchmarks`, run from a checkout."""
