"""Every kernel under compute-sanitizer: `python -m benchmarks.sanitize`."""
