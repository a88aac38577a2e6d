"""What README.md and docs/ publish: every measured number and the chart, made from the files in `benchmarks/results`."""
